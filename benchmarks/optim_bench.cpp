// What a step of AdamW costs for each parameter, by format of its states, beside LibTorch's own class and its
// fused kernel; and what encoding and decoding cost. All work on the same parameters and gradients, in turn,
// and so do passes with next to no arithmetic over the bytes that must be read and written: the memory's
// limit.
#include <ATen/ops/_fused_adamw.h>
#include <torch/torch.h>

#include <algorithm>
#include <cstdint>
#include <string>
#include <vector>

#include "harness.h"
#include "kernels/parallel.h"
#include "reef/ledger.h"
#include "reef/optim.h"

namespace {

using reef::bench::in_turn;
using reef::bench::print;
using reef::bench::Variant;
namespace ro = reef::optim;

constexpr int kRounds = 15;

struct Format {
  std::string name;
  ro::StateFormat format;
};
const std::vector<Format> kFormats = {{"float32", ro::StateFormat::kFloat32},
                                      {"bfloat16", ro::StateFormat::kBFloat16},
                                      {"int8", ro::StateFormat::kInt8},
                                      {"companded8", ro::StateFormat::kCompanded8},
                                      {"int4", ro::StateFormat::kInt4},
                                      {"int4_rank1", ro::StateFormat::kInt4Rank1},
                                      {"int8_compensated", ro::StateFormat::kInt8Compensated},
                                      {"int4_compensated", ro::StateFormat::kInt4Compensated}};

// The 148 tensors of GPT-2's 12 layers, of a width that comes near 52 million.
std::vector<std::vector<std::int64_t>> gpt2_shapes() {
  constexpr std::int64_t d = 448;
  std::vector<std::vector<std::int64_t>> shapes = {{50304, d}, {1024, d}};
  for (int layer = 0; layer < 12; ++layer) {
    for (const std::vector<std::int64_t>& shape : std::vector<std::vector<std::int64_t>>{
             {d}, {d}, {3 * d, d}, {3 * d}, {d, d}, {d}, {d}, {d}, {4 * d, d}, {4 * d}, {d, 4 * d}, {d}}) {
      shapes.push_back(shape);
    }
  }
  shapes.push_back({d});
  shapes.push_back({d});
  return shapes;
}

std::vector<at::Tensor> parameters(const std::vector<std::vector<std::int64_t>>& shapes,
                                   at::ScalarType dtype) {
  torch::manual_seed(0);
  std::vector<at::Tensor> made;
  for (const auto& shape : shapes) {
    made.push_back((torch::randn(shape) * 0.02).to(dtype).requires_grad_());
    made.back().mutable_grad() = (torch::randn(shape) * 1e-3).to(dtype);
  }
  return made;
}

#if defined(__x86_64__)
#define REEF_WIDE __attribute__((target_clones("avx512f", "avx2", "default")))
#else
#define REEF_WIDE
#endif
/// 28 bytes: a step with float32 states.
REEF_WIDE void stream_floats(float* __restrict p, const float* __restrict g, float* __restrict m,
                             float* __restrict v, std::int64_t elements) {
  for (std::int64_t i = 0; i < elements; ++i) {
    m[i] += 1e-3F * g[i];
    v[i] += 1e-6F * g[i];
    p[i] += 1e-9F * m[i];
  }
}
/// 16 bytes: a step with states of 8 bits.
REEF_WIDE void stream_codes(float* __restrict p, const float* __restrict g, std::uint8_t* __restrict m,
                            std::uint8_t* __restrict v, std::int64_t elements) {
  for (std::int64_t i = 0; i < elements; ++i) p[i] += 1e-9F * g[i];
  for (std::int64_t i = 0; i < elements; ++i) m[i] ^= 1;
  for (std::int64_t i = 0; i < elements; ++i) v[i] ^= 1;
}
REEF_WIDE void stream_to_codes(const float* __restrict from, std::int8_t* __restrict to,
                               std::int64_t elements) {
  for (std::int64_t i = 0; i < elements; ++i) to[i] = static_cast<std::int8_t>(static_cast<int>(from[i]));
}
REEF_WIDE void stream_from_codes(const std::int8_t* __restrict from, float* __restrict to,
                                 std::int64_t elements) {
  for (std::int64_t i = 0; i < elements; ++i) to[i] = static_cast<float>(from[i]);
}
#undef REEF_WIDE

constexpr std::int64_t kPiece = 4096;  // elements: its codes are touched while its floats are in cache
template <class Pass>
void by_pieces(std::int64_t elements, const Pass& pass) {
  reef::kernels::parallel_for(0, elements, 8 * kPiece, [&](std::int64_t begin, std::int64_t end) {
    for (std::int64_t at = begin; at < end; at += kPiece) pass(at, std::min(kPiece, end - at));
  });
}

/// What memory takes for a step, by the bytes of a state.
template <class State>
class Streams {
 public:
  explicit Streams(const std::vector<at::Tensor>& parameters) : parameters_(parameters) {
    for (const at::Tensor& p : parameters_) {
      for (auto* states : {&first_, &second_}) states->emplace_back(static_cast<std::size_t>(p.numel()));
    }
  }
  void step() {
    for (std::size_t i = 0; i < parameters_.size(); ++i) {
      float* const p = parameters_[i].mutable_data_ptr<float>();
      const float* const g = parameters_[i].grad().const_data_ptr<float>();
      by_pieces(parameters_[i].numel(), [&](std::int64_t at, std::int64_t elements) {
        if constexpr (std::is_same_v<State, float>) {
          stream_floats(p + at, g + at, &first_[i][at], &second_[i][at], elements);
        } else {
          stream_codes(p + at, g + at, &first_[i][at], &second_[i][at], elements);
        }
      });
    }
  }

 private:
  std::vector<at::Tensor> parameters_;
  std::vector<std::vector<State>> first_, second_;
};

/// LibTorch's fused kernel, for which its C++ side has no class.
class FusedAdamW {
 public:
  explicit FusedAdamW(std::vector<at::Tensor> all) : parameters_(std::move(all)) {
    for (const at::Tensor& p : parameters_) {
      gradients_.push_back(p.grad());
      first_.push_back(at::zeros_like(p));
      second_.push_back(at::zeros_like(p));
      steps_.push_back(at::zeros({}));
    }
  }
  void step() {
    const at::NoGradGuard no_grad;
    for (at::Tensor& step : steps_) step.add_(1);
    at::_fused_adamw_(parameters_, gradients_, first_, second_, {}, steps_, 1e-4, 0.9, 0.999, 0.01, 1e-8,
                      false, false);
  }

 private:
  std::vector<at::Tensor> parameters_, gradients_, first_, second_, steps_;
};

void step(const std::string& name, const std::vector<at::Tensor>& all) {
  double elements = 0;
  for (const at::Tensor& p : all) elements += static_cast<double>(p.numel());
  FusedAdamW fused(all);
  Streams<float> floats(all);
  Streams<std::uint8_t> codes(all);
  torch::optim::AdamW theirs(all, torch::optim::AdamWOptions(1e-4));
  std::vector<std::unique_ptr<ro::AdamW>> ours;
  std::vector<Variant> variants = {{"torch fused", {}, [&] { fused.step(); }, {}},
                                   {"torch::optim::AdamW", {}, [&] { theirs.step(); }, {}},
                                   {"memory alone, float32 states", {}, [&] { floats.step(); }, {}},
                                   {"memory alone, states of 8 bits", {}, [&] { codes.step(); }, {}}};
  reef::Ledger ledger;
  for (const Format& format : kFormats) {
    const std::int64_t before = ledger.live().total();
    ours.push_back(std::make_unique<ro::AdamW>(all, ro::AdamWOptions(1e-4).state(format.format)));
    ours.back()->step();
    print(name + "/" + format.name + " states",
          static_cast<double>(ledger.live().total() - before) / elements, "B", "a parameter, by the ledger");
    variants.push_back({format.name, {}, [optimizer = ours.back().get()] { optimizer->step(); }, {}});
  }
  print(name, in_turn(variants, kRounds, elements), "ns");
}

void masters() {
  const std::vector<at::Tensor> all = parameters({{50'000'000}}, at::kBFloat16);
  std::vector<std::unique_ptr<ro::AdamW>> ours;
  std::vector<Variant> variants;
  for (const auto& [name, master] : std::vector<std::pair<std::string, ro::MasterWeights>>{
           {"none", ro::MasterWeights::kNone},
           {"float32", ro::MasterWeights::kFloat32},
           {"split", ro::MasterWeights::kSplit},
           {"stochastic", ro::MasterWeights::kStochastic}}) {
    ours.push_back(std::make_unique<ro::AdamW>(all, ro::AdamWOptions(1e-4).master(master)));
    variants.push_back({name, {}, [optimizer = ours.back().get()] { optimizer->step(); }, {}});
  }
  print("optim/step of bfloat16 parameters with float32 states, 50 million, by master",
        in_turn(variants, kRounds, 5e7), "ns");
}

void codecs() {
  const at::Tensor values = torch::randn({64 << 20});
  at::Tensor back = at::zeros_like(values);
  const auto call = [](const char* name) {
    return c10::Dispatcher::singleton().findSchemaOrThrow(name, "out");
  };
  static const auto encoder =
      call("reef::optim_encode")
          .typed<void(const at::Tensor&, const std::string&, bool, at::Tensor&, at::Tensor&)>();
  static const auto decoder =
      call("reef::optim_decode")
          .typed<void(const at::Tensor&, const at::Tensor&, const std::string&, bool, at::Tensor&)>();
  static const auto states =
      c10::Dispatcher::singleton()
          .findSchemaOrThrow("reef::optim_state", "")
          .typed<std::tuple<at::Tensor, at::Tensor>(const at::Tensor&, const std::string&, bool)>();
  std::vector<std::int8_t> bytes(static_cast<std::size_t>(values.numel()));
  const float* const read = values.const_data_ptr<float>();
  float* const written = back.mutable_data_ptr<float>();
  std::vector<Variant> encode = {{"memory alone",
                                  {},
                                  [&] {
                                    by_pieces(values.numel(), [&](std::int64_t at, std::int64_t elements) {
                                      stream_to_codes(read + at, &bytes[at], elements);
                                    });
                                  },
                                  {}}};
  std::vector<Variant> decode = {{"memory alone",
                                  {},
                                  [&] {
                                    by_pieces(values.numel(), [&](std::int64_t at, std::int64_t elements) {
                                      stream_from_codes(&bytes[at], written + at, elements);
                                    });
                                  },
                                  {}}};
  for (const Format& format : kFormats) {
    auto [codes, scales] = states.call(values, format.name, /*is_signed=*/true);
    encode.push_back({format.name,
                      {},
                      [&values, name = format.name, codes = codes, scales = scales]() mutable {
                        encoder.call(values, name, true, codes, scales);
                      },
                      {}});
    decode.push_back({format.name,
                      {},
                      [&back, name = format.name, codes = codes, scales = scales] {
                        decoder.call(codes, scales, name, true, back);
                      },
                      {}});
  }
  print("optim/encode a first moment of 64 Mi", in_turn(encode, kRounds, 64 << 20), "ns");
  print("optim/decode it", in_turn(decode, kRounds, 64 << 20), "ns");
}

}  // namespace

int main() {
  step("optim/AdamW, 50 million in one tensor", parameters({{50'000'000}}, at::kFloat));
  step("optim/AdamW, GPT-2's 148 tensors", parameters(gpt2_shapes(), at::kFloat));
  masters();
  codecs();
}
