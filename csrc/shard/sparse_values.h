#pragma once

#include <ATen/core/Tensor.h>

#include <cstdint>

#include "shard/sparse_gradient.h"

namespace reef {

/// What is done with sparse gradients in memory of float32 and one dimension, on the CPU or on CUDA: there by
/// the current stream. The gradients themselves are on the CPU.
namespace sparse_values {

/// kernels::take_largest(). An undefined residual stands for zeros.
SparseGradient take_largest(const at::Tensor& gradient, const at::Tensor& residual, const at::Tensor& left,
                            std::int64_t k);
/// Adds the entries to the values at their indices.
void add(const at::Tensor& values, const SparseGradient& entries);
/// Sets the values at the entries' indices to 0.
void clear(const at::Tensor& values, const SparseGradient& entries);
/// Sets the values to the entries from index `begin` on, divided by `divisor`, and to 0 where there is no
/// entry.
void become(const at::Tensor& values, const SparseGradient& entries, std::int64_t begin, float divisor);

/// The same by operators of LibTorch, on any device.
namespace by_operators {
void add(const at::Tensor& values, const SparseGradient& entries);
void clear(const at::Tensor& values, const SparseGradient& entries);
void become(const at::Tensor& values, const SparseGradient& entries, std::int64_t begin, float divisor);
}  // namespace by_operators

}  // namespace sparse_values
}  // namespace reef
