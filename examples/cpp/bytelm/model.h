#pragma once

#include <torch/nn.h>

#include <optional>
#include <string>

#include "options.h"
#include "reef/chain.h"

namespace bytelm {

/// x + attention(norm(x)), then x + mlp(norm(x)). A row is one byte of one window: [batch * length, width] to
/// the same. (Linear layers want rows: on more dimensions LibTorch's C++ Linear adds the bias in a step of
/// its own, which costs memory and rounds otherwise than Python's.)
class BlockImpl : public torch::nn::Module {
 public:
  explicit BlockImpl(const Options& options);
  torch::Tensor forward(torch::Tensor x, std::int64_t length);

 private:
  torch::Tensor attention(const torch::Tensor& x, std::int64_t length);

  std::int64_t heads_;
  torch::nn::LayerNorm attention_norm_;
  torch::nn::Linear qkv_;
  torch::nn::Linear projection_;
  torch::nn::LayerNorm mlp_norm_;
  torch::nn::Linear up_;
  torch::nn::Linear down_;
};
TORCH_MODULE(Block);

/// A GPT whose tokens are the 256 bytes. The head is the byte embedding once more (tied).
class ByteGPTImpl : public torch::nn::Module {
 public:
  explicit ByteGPTImpl(const Options& options);

  /// Bytes [batch, length] (int64) to logits of the byte after each: [batch * length, 256].
  torch::Tensor forward(const torch::Tensor& bytes);

  /// From now on a step's forward and backward pass through the blocks need no more than so many bytes,
  /// gradients included; ranks of the group do so alike.
  void recompute_within(std::int64_t bytes, const reef::ProcessGroupPtr& group);
  /// What that came to; "" before the first step.
  const std::string& recomputation() const { return recomputation_; }

 private:
  void initialize(std::int64_t depth);
  torch::Tensor through_blocks(const torch::Tensor& x, std::int64_t length);

  torch::nn::Embedding bytes_;
  torch::nn::Embedding positions_;
  torch::nn::ModuleList blocks_;
  torch::nn::LayerNorm norm_;
  std::int64_t context_;
  std::optional<reef::PlannedChain> recomputed_;
  std::int64_t recompute_bytes_ = 0;
  std::string recomputation_;
};
TORCH_MODULE(ByteGPT);

/// What a ByteGPT begins and ends with: bytes [batch, length] to a row for each, and rows to logits.
torch::Tensor embedded(torch::nn::EmbeddingImpl& bytes, torch::nn::EmbeddingImpl& positions,
                       const torch::Tensor& data);
torch::Tensor logits_of(torch::nn::LayerNormImpl& norm, torch::nn::EmbeddingImpl& bytes,
                        const torch::Tensor& x);

/// Mean cross entropy, in nats per byte, of each byte of `windows` ([batch, length + 1]) given those before
/// it.
torch::Tensor next_byte_loss(ByteGPT& model, const torch::Tensor& windows);

}  // namespace bytelm
