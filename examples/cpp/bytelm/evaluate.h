#pragma once

#include <cstdint>
#include <string>

#include "model.h"

namespace bytelm {

/// Bits per byte of the model on 128 windows spread evenly over `text`, `batch` of them at a time.
double bits_per_byte(ByteGPT& model, const torch::Tensor& text, const Options& options, torch::Device device);

/// Where these windows begin.
torch::Tensor validation_offsets(const torch::Tensor& text, const Options& options);

/// Draws bytes one after the other, beginning on a new line.
class Sampler {
 public:
  explicit Sampler(const Options& options);
  /// What the model is to see next: [1, length].
  torch::Tensor seen() const;
  /// Draws the byte after that; `logits` has a row for each byte that was seen.
  std::int64_t next(const torch::Tensor& logits);

 private:
  std::int64_t context_;
  torch::Generator generator_;
  torch::Tensor bytes_;
};

/// `options.sample` bytes drawn from the model, one after the other, beginning on a new line.
std::string sample(ByteGPT& model, const Options& options, torch::Device device);

/// The same text with every byte that is neither printable ASCII nor a line break written as \xNN.
std::string printable(const std::string& bytes);

}  // namespace bytelm
