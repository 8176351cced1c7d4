#include "model.h"

#include <cmath>

namespace bytelm {

namespace nn = torch::nn;

BlockImpl::BlockImpl(const Options& options)
    : heads_(options.heads),
      attention_norm_(
          register_module("attention_norm", nn::LayerNorm(nn::LayerNormOptions({options.width})))),
      qkv_(register_module("qkv", nn::Linear(options.width, 3 * options.width))),
      projection_(register_module("projection", nn::Linear(options.width, options.width))),
      mlp_norm_(register_module("mlp_norm", nn::LayerNorm(nn::LayerNormOptions({options.width})))),
      up_(register_module("up", nn::Linear(options.width, 4 * options.width))),
      down_(register_module("down", nn::Linear(4 * options.width, options.width))) {}

torch::Tensor BlockImpl::attention(const torch::Tensor& x, std::int64_t length) {
  const auto width = x.size(1);
  // [batch * length, 3 * width] -> three of [batch, heads, length, width / heads]
  const auto qkv = qkv_(x).view({-1, length, 3, heads_, width / heads_}).permute({2, 0, 3, 1, 4});
  const auto mixed = at::scaled_dot_product_attention(qkv[0], qkv[1], qkv[2], /*attn_mask=*/{},
                                                      /*dropout_p=*/0.0, /*is_causal=*/true);
  return projection_(mixed.transpose(1, 2).reshape({-1, width}));
}

torch::Tensor BlockImpl::forward(torch::Tensor x, std::int64_t length) {
  x = x + attention(attention_norm_(x), length);
  return x + down_(torch::gelu(up_(mlp_norm_(x))));
}

ByteGPTImpl::ByteGPTImpl(const Options& options)
    : bytes_(register_module("bytes", nn::Embedding(256, options.width))),
      positions_(register_module("positions", nn::Embedding(options.context, options.width))),
      blocks_(register_module("blocks", nn::ModuleList())),
      norm_(register_module("norm", nn::LayerNorm(nn::LayerNormOptions({options.width})))),
      context_(options.context) {
  for (std::int64_t i = 0; i < options.depth; ++i) blocks_->push_back(Block(options));
  initialize(options.depth);
}

void ByteGPTImpl::initialize(std::int64_t depth) {
  // As in GPT-2: small weights, so that all bytes are equally likely at first (8 bits per byte), and smaller
  // ones where a block adds to the stream, so that its size does not grow with the depth.
  const torch::NoGradGuard no_grad;
  for (auto& parameter : named_parameters()) {
    const auto& name = parameter.key();
    if (name.find("norm") != std::string::npos) continue;
    if (name.ends_with("bias")) {
      parameter->zero_();
    } else {
      const bool adds_to_stream = name.ends_with("projection.weight") || name.ends_with("down.weight");
      parameter->normal_(0.0, adds_to_stream ? 0.02 / std::sqrt(2.0 * static_cast<double>(depth)) : 0.02);
    }
  }
}

torch::Tensor ByteGPTImpl::forward(const torch::Tensor& bytes) {
  return logits_of(*norm_, *bytes_, through_blocks(embedded(*bytes_, *positions_, bytes), bytes.size(1)));
}

torch::Tensor embedded(nn::EmbeddingImpl& bytes, nn::EmbeddingImpl& positions, const torch::Tensor& data) {
  return (bytes.forward(data) + positions.forward(torch::arange(data.size(1), data.options()))).flatten(0, 1);
}

torch::Tensor logits_of(nn::LayerNormImpl& norm, nn::EmbeddingImpl& bytes, const torch::Tensor& x) {
  return nn::functional::linear(norm.forward(x), bytes.weight);
}

torch::Tensor ByteGPTImpl::through_blocks(const torch::Tensor& x, std::int64_t length) {
  if (recomputed_ && torch::GradMode::is_enabled()) {
    if (recomputation_.empty()) recomputation_ = recomputed_->plan(x, recompute_bytes_).text();
    return (*recomputed_)(x, recompute_bytes_);
  }
  auto y = x;
  for (const auto& block : *blocks_) y = block->as<Block>()->forward(y, length);
  return y;
}

void ByteGPTImpl::recompute_within(std::int64_t bytes, const reef::ProcessGroupPtr& group) {
  reef::Chain chain;
  for (std::size_t i = 0; i < blocks_->size(); ++i) {
    chain.add(std::to_string(i), [block = blocks_->ptr<BlockImpl>(i), length = context_](
                                     const torch::Tensor& x) { return block->forward(x, length); });
  }
  recomputed_.emplace(std::move(chain), group);
  recompute_bytes_ = bytes;
}

torch::Tensor next_byte_loss(ByteGPT& model, const torch::Tensor& windows) {
  const auto length = windows.size(1) - 1;
  const auto logits = model(windows.narrow(1, 0, length));
  return nn::functional::cross_entropy(logits, windows.narrow(1, 1, length).flatten());
}

}  // namespace bytelm
