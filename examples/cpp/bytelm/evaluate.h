#pragma once

#include <string>

#include "model.h"

namespace bytelm {

/// Bits per byte of the model on 128 windows spread evenly over `text`, `batch` of them at a time.
double bits_per_byte(ByteGPT& model, const torch::Tensor& text, const Options& options, torch::Device device);

/// `options.sample` bytes drawn from the model, one after the other, beginning on a new line.
std::string sample(ByteGPT& model, const Options& options, torch::Device device);

/// The same text with every byte that is neither printable ASCII nor a line break written as \xNN.
std::string printable(const std::string& bytes);

}  // namespace bytelm
