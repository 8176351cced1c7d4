#include "evaluate.h"

#include <ATen/CPUGeneratorImpl.h>

#include <algorithm>
#include <numbers>

#include "corpus.h"

namespace bytelm {

double bits_per_byte(ByteGPT& model, const torch::Tensor& text, const Options& options,
                     torch::Device device) {
  constexpr std::int64_t kWindows = 128;
  const torch::NoGradGuard no_grad;
  const auto window = options.context + 1;
  const auto offsets = torch::arange(kWindows).mul(text.size(0) - window).floor_divide(kWindows - 1);
  double nats = 0;
  for (const auto& some : offsets.split(options.batch)) {
    const auto loss = next_byte_loss(model, windows_at(text, some, window).to(device));
    nats += loss.item<double>() * static_cast<double>(some.size(0));
  }
  return nats / kWindows / std::numbers::ln2;
}

std::string sample(ByteGPT& model, const Options& options, torch::Device device) {
  // Below 1: likelier bytes more often, so that a short training reads well.
  constexpr double kTemperature = 0.8;
  const torch::NoGradGuard no_grad;
  auto generator = at::make_generator<at::CPUGeneratorImpl>(static_cast<std::uint64_t>(options.seed));
  auto bytes = torch::full({1, 1}, '\n', torch::kLong);
  std::string text;
  while (static_cast<std::int64_t>(text.size()) < options.sample) {
    const auto seen = bytes.slice(1, std::max<std::int64_t>(0, bytes.size(1) - options.context));
    const auto logits = model(seen.to(device)).slice(0, -1).cpu();  // the last row
    const auto next = torch::multinomial(torch::softmax(logits / kTemperature, -1), 1, false, generator);
    bytes = torch::cat({bytes, next}, 1);
    text += static_cast<char>(next.item<std::int64_t>());
  }
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
