#pragma once

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <string>
#include <vector>

namespace bytelm {

/// Text as two one-dimensional uint8 tensors on the CPU.
struct Corpus {
  at::Tensor training;
  at::Tensor validation;
  std::string description;
};

/// Reads every file among `paths` and below the folders among them, in the order of their names; without
/// paths the .py files of the Python standard library (of REEF_PYTHON, else python3). Every tenth file, or
/// the last one of fewer, is for validation; of a single file the last tenth. Throws reef::FileError for what
/// cannot be read, and reef::ConfigError if a side has fewer than `window` bytes.
Corpus load_corpus(const std::vector<std::string>& paths, std::int64_t window);

/// Rows of `window` bytes that start at `offsets` (int64): [offsets, window], int64.
at::Tensor windows_at(const at::Tensor& text, const at::Tensor& offsets, std::int64_t window);

}  // namespace bytelm
