#pragma once

#include <ATen/core/Tensor.h>

#include <string>
#include <vector>

#include "reef/collectives.h"

namespace reef {

/// Bytes (one-dimensional, on the CPU) of any number on each rank, which go by way of `device`, the group's.
/// All ranks alike. Throw RankFailed.

/// Every rank's, on every rank. Memory: twice the ranks' number times the largest.
std::vector<at::Tensor> gather_bytes(const at::Tensor& own, const ProcessGroupPtr& group, c10::Device device);

/// Gathers a text from every rank, on every rank.
std::vector<std::string> gather_texts(const std::string& own, const ProcessGroupPtr& group,
                                      c10::Device device);

/// Splits a text into its lines, so that those of two ranks can be compared.
std::vector<std::string> lines_of(const std::string& text);

/// Rank 0's; what others give is not looked at.
at::Tensor broadcast_bytes(const at::Tensor& of_first, const ProcessGroupPtr& group, c10::Device device);

}  // namespace reef
