#pragma once

#include <algorithm>
#include <tuple>
#include <utility>

#include "kernels/optim_step.h"
#include "kernels/optim_step/codecs.h"
#include "kernels/optim_step/coder.h"
#include "kernels/optim_step/parameter.h"
#include "kernels/optim_step/rank1.h"
#include "kernels/optim_step/rules.h"
#include "kernels/optim_step/side.h"

namespace reef::kernels {

/// A rule over the tiles of one tensor, with every state in one format.
template <class L, class Rule, template <class, bool> class Codec, OptimFormat kFormat>
class Tiles {
 public:
  using F = typename L::Floats;

  // Flat: a call for each few lanes would cost more than its work.
  [[REEF_FLAT]] static std::int64_t step(const OptimTensor& tensor, std::int64_t first, std::int64_t last) {
    Tiles tiles(tensor);
    return tiles.each(first, last, [&](const auto&... where) { return tiles.update(where...); });
  }

  [[REEF_FLAT]] static std::int64_t survey(const OptimTensor& tensor, std::int64_t first, std::int64_t last) {
    Tiles tiles(tensor);
    return tiles.each(first, last, [&](const auto&... where) { return tiles.raise(where...); });
  }

  [[REEF_FLAT]] static OptimSquares measure(const OptimTensor& tensor, std::int64_t first,
                                            std::int64_t last) {
    OptimSquares squares;
    Tiles tiles(tensor);
    tiles.each(first, last, [&](const auto&... where) { return tiles.add(squares, where...); });
    return squares;
  }

 private:
  static constexpr int kStates = Rule::kStates;
  static constexpr int kTogether = 4;  ///< lanes after lanes at one stage
  static constexpr bool kHalves = requires { &Rule::begin; };
  static constexpr bool kSettles = kStates > 0 && Codec<L, true>::kSettles;
  template <std::size_t... i>
  static auto codecs_of(std::index_sequence<i...>) -> std::tuple<Codec<L, Rule::is_signed(i)>...>;
  using Codecs = decltype(codecs_of(std::make_index_sequence<kStates>()));

  explicit Tiles(const OptimTensor& tensor) : tensor_(tensor), rule_(tensor.constants), parameter_(tensor) {}

  // Calls `work` with each tile; gives the number of elements of gradients that it found not to be finite.
  template <class Work>
  std::int64_t each(std::int64_t first, std::int64_t last, const Work& work) {
    std::int64_t nonfinite = 0;
    for (std::int64_t tile = first; tile < last; ++tile) {
      const std::uint32_t key = key_of(tensor_.key, tile);
      const std::int64_t elements = std::min(kTileElements, tensor_.elements - tile * kTileElements);
      if (elements == kTileElements) {
        nonfinite += work(tensor_, tile, kTileElements, key);
      } else {
        nonfinite += partial(tile, elements, key, work);
      }
    }
    return nonfinite;
  }

  template <class Work>
  std::int64_t partial(std::int64_t tile, std::int64_t elements, std::uint32_t key, const Work& work) {
    Side<kTileElements * 4> gradient, parameter, master;
    SideState<kFormat> states[kStates + 1];
    OptimTensor side = tensor_;
    const auto read = [&](auto& to, std::byte* whole, std::int64_t bytes) {
      return whole == nullptr ? whole : to.read(whole + tile * kTileElements * bytes, elements * bytes);
    };
    side.gradient =
        read(gradient, const_cast<std::byte*>(tensor_.gradient), optim_dtype_bytes(tensor_.gradient_dtype));
    side.parameter = read(parameter, tensor_.parameter, optim_dtype_bytes(tensor_.parameter_dtype));
    side.master = read(master, tensor_.master, optim_master_bytes(tensor_.master_kind));
    for (int i = 0; i < kStates; ++i) side.states[i] = states[i].read(tensor_.states[i], tile, elements);
    const std::int64_t nonfinite = work(side, 0, elements, key);
    parameter.write();
    master.write();
    for (int i = 0; i < kStates; ++i) states[i].write();
    return nonfinite;
  }

  template <class Gradient>
  static bool finite(const Gradient& g) {
    F poison[kTogether] = {};
    for (int i = 0; i < kTileElements; i += kTogether * L::kLanes) {
      for (int k = 0; k < kTogether; ++k) poison[k] = poisoned(poison[k], g.load(i + k * L::kLanes));
    }
    return none(poison);
  }
  // NaN for ever after a value that is not finite.
  static F poisoned(F poison, F x) { return fma(x, L::all(0.0F), poison); }
  static bool none(const F (&poison)[kTogether]) {
    const F any = (poison[0] + poison[1]) + (poison[2] + poison[3]);
    return all(any >= any);
  }
  std::int64_t count_nonfinite(const OptimTensor& tensor, std::int64_t tile) {
    const float* const g = gradient_.open(tensor, tile).values;
    return std::count_if(g, g + kTileElements, [](float x) { return !(x - x == 0); });
  }

  void open(const OptimTensor& tensor, std::int64_t tile, std::uint32_t key) {
    int slot = 0;
    const OptimState* state = tensor.states;
    std::apply([&](auto&... codec) { (codec.open(*state++, tile, key_of_state(key, slot++)), ...); },
               codecs_);
  }
  void load(F* s, int i) {
    std::apply([&](auto&... codec) { ((*s++ = codec.load(i)), ...); }, codecs_);
  }

  // What is padded stays zero.
  static void pad(F* s, int i, std::int64_t elements) {
    for (int k = 0; k < kStates; ++k) s[k] = within(s[k], i, elements);
  }
  // 0 in lanes, from element i on, that lie beyond so many elements.
  static F within(F x, int i, std::int64_t elements) {
    const auto beyond = L::index() + L::all(i + 1) > L::all(static_cast<std::int32_t>(elements));
    return select(beyond, L::all(0.0F), x);
  }

  // What the first half of a step leaves to the second. Rules without a second half leave the parameter.
  struct Begun {
    F p, g, first, half;
  };
  F begin(F p, F g, F* s) const {
    if constexpr (kHalves) {
      return rule_.begin(p, g, s);
    } else {
      rule_.step(p, g, s);
      return p;
    }
  }
  F end(const Begun& begun) const {
    if constexpr (kHalves) {
      return rule_.end(begun.p, begun.g, begun.first, begun.half);
    } else {
      return begun.half;
    }
  }

  std::int64_t update(const OptimTensor& tensor, std::int64_t tile, std::int64_t elements,
                      std::uint32_t key) {
    open(tensor, tile, key);
    bool done = false;
    if (elements == kTileElements && BFloat16Lanes<L>::fits(tensor)) {
      const BFloat16Lanes<L> p(tensor.parameter, tile);
      const BFloat16Lanes<L> g(tensor.gradient, tile);
      done = passes<true>(p, g, elements);
    } else {
      const Float32Lanes<L> p = parameter_.open(tensor, tile, key);
      const Float32Lanes<L> g = gradient_.open(tensor, tile);
      done = elements == kTileElements ? passes<true>(p, g, elements) : passes<false>(p, g, elements);
      if (done) parameter_.close();
    }
    return done ? 0 : count_nonfinite(tensor, tile);
  }
  // False, and nothing is written, if a gradient is not finite.
  template <bool kWhole, class Parameter, class Gradient>
  bool passes(const Parameter& p, const Gradient& g, std::int64_t elements) {
    if constexpr (kSettles) {
      if (!first_pass<kWhole>(p, g, elements)) return false;
      second_pass(p, g);
    } else {
      if (!finite(g)) return false;
      only_pass<kWhole>(p, g, elements);
    }
    return true;
  }

  // While some lanes divide, the next are begun.
  template <bool kWhole, class Parameter, class Gradient>
  void only_pass(const Parameter& p, const Gradient& g, std::int64_t elements) {
    const auto lanes = [&](int i) {
      p.prefetch(i, prefetch_bytes);
      g.prefetch(i, prefetch_bytes);
      F s[kStates + 1];
      load(s, i);
      Begun begun{p.load(i), g.load(i), {}, {}};
      begun.half = begin(begun.p, begun.g, s);
      if constexpr (kStates > 0) begun.first = s[0];
      if constexpr (!kWhole) pad(s, i, elements);
      const F* value = s;
      std::apply([&](auto&... codec) { (put(codec, i, *value++), ...); }, codecs_);
      return begun;
    };
    Begun before = lanes(0);
    for (int i = L::kLanes; i < kTileElements; i += L::kLanes) {
      const Begun begun = lanes(i);
      p.store(i - L::kLanes, end(before));
      before = begun;
    }
    p.store(kTileElements - L::kLanes, end(before));
  }
  template <class State>
  static void put(State& codec, int i, F x) {
    if constexpr (!kSettles) codec.put(i, x);
  }

  // Decoding beside first halves, then finding codes beside second ones: each pass keeps the units of a
  // processor busy, has no chain of operations longer than it can look ahead, and waits for memory: the first
  // for gradients and codes, the second for parameters. The first writes nothing but what waits.
  template <bool kWhole, class Parameter, class Gradient>
  bool first_pass(const Parameter& p, const Gradient& g, std::int64_t elements) {
    F poison[kTogether] = {};
    for (int i = 0; i < kTileElements; i += kTogether * L::kLanes) {
      F s[kTogether][kStates + 1];
      for (int k = 0; k < kTogether; ++k) load(s[k], i + k * L::kLanes);
      for (int k = 0; k < kTogether; ++k) {
        const int at = i + k * L::kLanes;
        g.prefetch(at, kPrefetchBytes);
        const F gradient = g.load(at);
        poison[k] = poisoned(poison[k], gradient);
        L::store(half_ + at, begin(p.load(at), gradient, s[k]));
        if constexpr (!kWhole) pad(s[k], at, elements);
      }
      put(i, s, std::make_index_sequence<kStates>());
    }
    return none(poison);
  }
  template <std::size_t... k>
  void put(int i, const F (&s)[kTogether][kStates + 1], std::index_sequence<k...>) {
    (std::get<k>(codecs_).put(i, {s[0][k], s[1][k], s[2][k], s[3][k]}), ...);
  }

  template <class Parameter, class Gradient>
  void second_pass(const Parameter& p, const Gradient& g) {
    std::apply([](auto&... codec) { (codec.close(), ...); }, codecs_);
    for (int i = 0; i < kTileElements; i += kTogether * L::kLanes) {
      decltype(find(0)) found[kTogether];
      for (int k = 0; k < kTogether; ++k) found[k] = find(i + k * L::kLanes);
      Codes codes;
      for (int k = 0; k < kTogether; ++k) {
        const int at = i + k * L::kLanes;
        p.prefetch(at, kPrefetchBytes);
        const F first = std::get<0>(codecs_).waiting(at);
        p.store(at, end({p.load(at), g.load(at), first, L::load(half_ + at)}));
        code(found[k], codes, k, std::make_index_sequence<kStates>());
      }
      store(i, codes);
    }
  }
  auto find(int i) const {
    return std::apply([&](const auto&... codec) { return std::make_tuple(codec.find(i)...); }, codecs_);
  }
  using Codes = typename L::Ints[kStates + 1][kTogether];
  template <class Found, std::size_t... k>
  void code(const Found& found, Codes& codes, int place, std::index_sequence<k...>) {
    ((codes[k][place] = std::get<k>(codecs_).code(std::get<k>(found))), ...);
  }
  void store(int i, const Codes& codes) {
    const auto* of_state = codes;
    std::apply([&](auto&... codec) { (codec.store(i, *of_state++), ...); }, codecs_);
  }

  // New states, of which only their scales are kept.
  std::int64_t raise(const OptimTensor& tensor, std::int64_t tile, std::int64_t elements, std::uint32_t key) {
    open(tensor, tile, key);
    const Float32Lanes<L> g = gradient_.open(tensor, tile);
    const Float32Lanes<L> p = parameter_.open(tensor, tile, key);
    if (!first_pass<false>(p, g, elements)) return count_nonfinite(tensor, tile);
    std::apply([](auto&... codec) { (raise(codec), ...); }, codecs_);
    return 0;
  }
  template <class State>
  static void raise(State& codec) {
    if constexpr (requires { codec.raise(); }) codec.raise();
  }

  // In sixteen sums, whatever the lanes: the order of additions is the same everywhere.
  std::int64_t add(OptimSquares& squares, const OptimTensor& tensor, std::int64_t tile, std::int64_t elements,
                   std::uint32_t key) {
    const Float32Lanes<L> g = gradient_.open(tensor, tile);
    if (!finite(g)) return count_nonfinite(tensor, tile);
    constexpr int kSums = 16;
    const Float32Lanes<L> p = parameter_.open(tensor, tile, key);
    open(tensor, tile, key);
    alignas(64) float sums[2][kSums] = {};
    for (int i = 0; i < kTileElements; i += L::kLanes) {
      F s[kStates + 1];
      load(s, i);
      F x = p.load(i);
      F measured = rule_.measured(x, g.load(i), s);
      if (elements < kTileElements) {  // what is padded has a rest, where parameters are split, and is not 0
        x = within(x, i, elements);
        measured = within(measured, i, elements);
      }
      const int lane = i % kSums;
      L::store(sums[0] + lane, fma(x, x, L::load(sums[0] + lane)));
      L::store(sums[1] + lane, fma(measured, measured, L::load(sums[1] + lane)));
    }
    for (int i = 0; i < kSums; ++i) {
      squares.parameter += sums[0][i];
      squares.measured += sums[1][i];
    }
    return 0;
  }

  const OptimTensor& tensor_;
  const Rule rule_;
  ParameterTile<L> parameter_;
  GradientTile<L> gradient_;
  Codecs codecs_;
  alignas(64) float half_[kSettles ? kTileElements : 1];
};

template <class L, template <class, bool> class Codec, OptimFormat kFormat>
void add_format(OptimKernels& kernels) {
  const auto f = static_cast<std::size_t>(kFormat);
  for_every_rule<L, rounds_as_torch(kFormat)>([&]<class Rule>(OptimRule rule) {
    const auto r = static_cast<std::size_t>(rule);
    kernels.step[r][f] = &Tiles<L, Rule, Codec, kFormat>::step;
    if constexpr (requires { &Rule::measured; })
      kernels.measure[r][f] = &Tiles<L, Rule, Codec, kFormat>::measure;
  });
  kernels.encode[f][0] = &Coder<L, Codec, kFormat, false>::encode;
  kernels.encode[f][1] = &Coder<L, Codec, kFormat, true>::encode;
  kernels.decode[f][0] = &Coder<L, Codec, kFormat, false>::decode;
  kernels.decode[f][1] = &Coder<L, Codec, kFormat, true>::decode;
}

template <class L>
void add_rank1(OptimKernels& kernels) {
  constexpr auto f = static_cast<std::size_t>(OptimFormat::kInt4Rank1);
  for_every_rule<L, false>([&]<class Rule>(OptimRule rule) {
    const auto r = static_cast<std::size_t>(rule);
    if constexpr (has_unsigned<Rule>()) {
      using Of = Tiles<L, Rule, Int4Rank1Codec, OptimFormat::kInt4>;
      kernels.step[r][f] = &Of::step;
      kernels.survey[r] = &Of::survey;
      if constexpr (requires { &Rule::measured; }) kernels.measure[r][f] = &Of::measure;
    }
  });
  using Unsigned = Coder<L, Int4Rank1Codec, OptimFormat::kInt4, false>;
  kernels.encode[f][0] = &Unsigned::encode;
  kernels.decode[f][0] = &Unsigned::decode;
  kernels.survey_values = &Unsigned::survey;
}

template <class L>
OptimKernels all_kernels() {
  OptimKernels kernels{};
  add_format<L, Float32Codec, OptimFormat::kFloat32>(kernels);
  add_format<L, BFloat16Codec, OptimFormat::kBFloat16>(kernels);
  add_format<L, Int8Codec, OptimFormat::kInt8>(kernels);
  add_format<L, Int4Codec, OptimFormat::kInt4>(kernels);
  add_format<L, Companded8Codec, OptimFormat::kCompanded8>(kernels);
  add_format<L, Int8CompensatedCodec, OptimFormat::kInt8Compensated>(kernels);
  add_format<L, Int4CompensatedCodec, OptimFormat::kInt4Compensated>(kernels);
  add_format<L, Companded8CompensatedCodec, OptimFormat::kCompanded8Compensated>(kernels);
  add_rank1<L>(kernels);
  return kernels;
}

}  // namespace reef::kernels
