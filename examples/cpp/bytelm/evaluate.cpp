#include "evaluate.h"

#include <ATen/CPUGeneratorImpl.h>

#include <algorithm>
#include <numbers>

#include "corpus.h"

namespace bytelm {

torch::Tensor validation_offsets(const torch::Tensor& text, const Options& options) {
  constexpr std::int64_t kWindows = 128;
  return torch::arange(kWindows).mul(text.size(0) - options.context - 1).floor_divide(kWindows - 1);
}

double bits_per_byte(ByteGPT& model, const torch::Tensor& text, const Options& options,
                     torch::Device device) {
  const torch::NoGradGuard no_grad;
  const auto offsets = validation_offsets(text, options);
  double nats = 0;
  for (const auto& some : offsets.split(options.batch)) {
    const auto loss = next_byte_loss(model, windows_at(text, some, options.context + 1).to(device));
    nats += loss.item<double>() * static_cast<double>(some.size(0));
  }
  return nats / static_cast<double>(offsets.size(0)) / std::numbers::ln2;
}

Sampler::Sampler(const Options& options)
    : context_(options.context),
      generator_(at::make_generator<at::CPUGeneratorImpl>(static_cast<std::uint64_t>(options.seed))),
      bytes_(torch::full({1, 1}, '\n', torch::kLong)) {}

torch::Tensor Sampler::seen() const {
  return bytes_.slice(1, std::max<std::int64_t>(0, bytes_.size(1) - context_));
}

std::int64_t Sampler::next(const torch::Tensor& logits) {
  // Below 1: likelier bytes more often, so that a short training reads well.
  constexpr double kTemperature = 0.8;
  const auto last = logits.slice(0, -1).cpu();
  const auto drawn = torch::multinomial(torch::softmax(last / kTemperature, -1), 1, false, generator_);
  bytes_ = torch::cat({bytes_, drawn}, 1);
  return drawn.item<std::int64_t>();
}

std::string sample(ByteGPT& model, const Options& options, torch::Device device) {
  const torch::NoGradGuard no_grad;
  Sampler sampler(options);
  std::string text;
  while (static_cast<std::int64_t>(text.size()) < options.sample)
    text += static_cast<char>(sampler.next(model(sampler.seen().to(device))));
  return text;
}

std::string printable(const std::string& bytes) {
  constexpr const char* kHex = "0123456789abcdef";
  std::string text;
  for (const char c : bytes) {
    const auto byte = static_cast<unsigned char>(c);
    if (c == '\n' || (byte >= 0x20 && byte < 0x7f)) {
      text += c;
    } else {
      text += std::string("\\x") + kHex[byte >> 4] + kHex[byte & 15];
    }
  }
  return text;
}

}  // namespace bytelm
