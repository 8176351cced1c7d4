#pragma once

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

/// Adds the squares of a tile. There are sixteen partial sums for any kind of lanes, so the order of
/// additions is always the same.
template <class L>
[[gnu::noinline, REEF_FLAT]] void add_squares(OptimSquares& squares, const float* p, const float* measured,
                                              std::int64_t elements) {
  constexpr int kSums = 16;
  const PaddedValues<L> parameters(p, elements);
  const PaddedValues<L> others(measured, elements);
  alignas(64) float sums[2][kSums] = {};
  for (int i = 0; i < kTileElements; i += L::kLanes) {
    const auto x = L::load(parameters.data + i);
    const auto y = L::load(others.data + i);
    const int lane = i % kSums;
    L::store(sums[0] + lane, fma(x, x, L::load(sums[0] + lane)));
    L::store(sums[1] + lane, fma(y, y, L::load(sums[1] + lane)));
  }
  for (int i = 0; i < kSums; ++i) {
    squares.parameter += sums[0][i];
    squares.measured += sums[1][i];
  }
}

/// The loops of a rule over whole tiles; all states have the same kind of codec.
///
/// The loops are compiled once for each rule and format, or once for each rule if the formats are staged. All
/// other variations (dtypes, masters, coupled decay, tiles that are not whole) are handled outside of them.
template <class L, class Rule, template <class, bool> class CodecOf>
class TileLoops {
 public:
  using F = typename L::Floats;
  static constexpr int kStates = Rule::kStates;

  // REEF_FLAT inlines all calls: a call for each vector would cost more than the work it does.
  [[gnu::noinline, REEF_FLAT]] static std::int64_t step(const StagedFormat* formats,
                                                        const OptimTensor& tensor, std::int64_t first,
                                                        std::int64_t last, std::int64_t elements) {
    std::int64_t nonfinite = 0;
    const Rule rule(tensor.constants);
    ParameterTile<L> parameter(tensor);
    GradientTile<L> gradient(ahead());
    Codecs codecs;
    use(codecs, formats);
    for (std::int64_t tile = first; tile < last; ++tile) {
      const std::uint32_t key = key_of(tensor.key, tile);
      const Numbers<L> p = parameter.open(tensor, tile, key);
      const Numbers<L> g = gradient.open(tensor, tile, Rule::kCouples ? p : Numbers<L>{});
      if (!g.are_there()) {
        nonfinite += gradient.count_nonfinite(tensor, tile);
        continue;
      }
      each_state(codecs, [&](auto& codec, int i) {
        open_to_load(codec, tensor.states[i], tile, key_of_state(key, i));
      });
      if constexpr (kSettles) {
        alignas(64) Values roots;
        first_pass(rule, codecs, p, g, roots, elements);
        each_state(codecs, [](auto& codec, int) { codec.close(); });
        second_pass(rule, codecs, p, g, roots);
      } else {
        only_pass(rule, codecs, p, g);
        each_state(codecs, [&](auto& codec, int i) {
          if constexpr (requires { codec.close(tensor.states[i], tile, key, elements); }) {
            codec.close(tensor.states[i], tile, key_of_state(key, i), elements);
          }
        });
      }
      parameter.close();
    }
    return nonfinite;
  }

  // Computes the new unsigned states and keeps only their scales. It is used with the codecs of Surveyed: no
  // unsigned state depends on a signed one, so the compiler drops the computation of signed states and
  // parameters.
  [[gnu::noinline, REEF_FLAT]] static std::int64_t survey(const OptimTensor& tensor, std::int64_t first,
                                                          std::int64_t last, std::int64_t elements) {
    std::int64_t nonfinite = 0;
    const Rule rule(tensor.constants);
    ParameterTile<L> parameter(tensor);
    GradientTile<L> gradient(ahead());
    Codecs codecs;
    GatheredColumns<L> gathered[kStates];
    for (std::int64_t tile = first; tile < last; ++tile) {
      const Numbers<L> p = parameter.open(tensor, tile, 0);
      const Numbers<L> g = gradient.open(tensor, tile, Rule::kCouples ? p : Numbers<L>{});
      if (!g.are_there()) {
        nonfinite += gradient.count_nonfinite(tensor, tile);
        continue;
      }
      each_state(codecs, [&](auto& codec, int i) {
        if constexpr (requires { codec.raise(gathered); }) open_to_load(codec, tensor.states[i], tile, 0);
      });
      put_new_states(rule, codecs, p, g, elements, [](int, F) {});
      each_state(codecs, [&](auto& codec, int i) {
        if constexpr (requires { codec.raise(gathered); }) codec.raise(gathered + i);
      });
    }
    for (GatheredColumns<L>& columns : gathered) columns.flush();
    return nonfinite;
  }

  [[gnu::noinline, REEF_FLAT]] static void measure(OptimSquares& squares, const StagedFormat* formats,
                                                   const OptimTensor& tensor, std::int64_t first,
                                                   std::int64_t last, std::int64_t elements) {
    const Rule rule(tensor.constants);
    ParameterTile<L> parameter(tensor);
    GradientTile<L> gradient(ahead());
    Codecs codecs;
    use(codecs, formats);
    alignas(64) Values parameters, measured;
    for (std::int64_t tile = first; tile < last; ++tile) {
      const Numbers<L> g = gradient.open(tensor, tile, {});
      if (!g.are_there()) continue;
      const Numbers<L> p = parameter.open(tensor, tile, 0);
      each_state(codecs, [&](auto& codec, int i) { open_to_load(codec, tensor.states[i], tile, 0); });
      for (int i = 0; i < kTileElements; i += L::kLanes) {
        F s[kStates + 1];
        load(codecs, s, i);
        const F x = p.load(i);
        L::store(parameters + i, x);
        L::store(measured + i, rule.measured(x, g.load(i), s));
      }
      add_squares<L>(squares, parameters, measured, elements);
    }
  }

 private:
  static constexpr int kTogether = 4;  ///< vectors that are processed together
  static constexpr bool kHalves = requires { &Rule::begin; };
  static constexpr bool kSettles = kStates > 0 && CodecOf<L, true>::kSettles;
  static constexpr bool kStaged = kStates > 0 && requires(CodecOf<L, true> codec) { codec.use(nullptr); };
  template <std::size_t... i>
  static auto codecs_of(std::index_sequence<i...>) -> std::tuple<CodecOf<L, Rule::is_signed(i)>...>;
  using Codecs = decltype(codecs_of(std::make_index_sequence<kStates>()));
  using Values = float[kTileElements];

  // Returns the prefetch distance in bytes.
  static std::uintptr_t ahead() { return kSettles || kStaged ? kPrefetchBytes : prefetch_bytes; }

  static void use(Codecs& codecs, const StagedFormat* formats) {
    each_state(codecs, [&](auto& codec, int) {
      if constexpr (kStaged) codec.use(formats);
    });
  }

  template <class Work>
  static void each_state(Codecs& codecs, const Work& work) {
    int i = 0;
    std::apply([&](auto&... codec) { (work(codec, i++), ...); }, codecs);
  }
  static void load(Codecs& codecs, F* s, int i) {
    each_state(codecs, [&](auto& codec, int k) { s[k] = codec.load(i); });
  }

  // What the first half of a step passes to the second. A rule without a second half passes the new parameter
  // as `root`.
  struct Begun {
    F p, g, first, root;
  };
  static F begin(const Rule& rule, F p, F g, F* s) {
    if constexpr (kHalves) {
      return rule.begin(g, s);
    } else {
      rule.step(p, g, s);
      return p;
    }
  }
  static F end(const Rule& rule, const Begun& begun) {
    if constexpr (kHalves) {
      return rule.end(begun.p, begun.g, begun.first, begun.root);
    } else {
      return begun.root;
    }
  }

  // Begins each vector before it ends the preceding one, so that a division overlaps with other work.
  static void only_pass(const Rule& rule, Codecs& codecs, const Numbers<L>& p, const Numbers<L>& g) {
    const auto lanes = [&](int i) {
      p.prefetch(i, ahead());
      F s[kStates + 1];
      load(codecs, s, i);
      Begun begun{p.load(i), g.load(i), {}, {}};
      begun.root = begin(rule, begun.p, begun.g, s);
      if constexpr (kStates > 0) begun.first = s[0];
      each_state(codecs, [&](auto& codec, int k) {
        if constexpr (!kSettles) codec.put(i, s[k]);
      });
      return begun;
    };
    Begun before = lanes(0);
    for (int i = L::kLanes; i < kTileElements; i += L::kLanes) {
      const Begun begun = lanes(i);
      p.store(i - L::kLanes, end(rule, before));
      before = begun;
    }
    p.store(kTileElements - L::kLanes, end(rule, before));
  }

  // The first pass combines decoding with the first half of the step, the second pass combines finding codes
  // with the second half. Each of them keeps all units of a processor busy, and has no dependency chain that
  // is longer than the processor's look-ahead. The first pass reads codes from memory and the second reads
  // parameters. The first writes only to buffers.
  static void first_pass(const Rule& rule, Codecs& codecs, const Numbers<L>& p, const Numbers<L>& g,
                         Values& roots, std::int64_t elements) {
    put_new_states(rule, codecs, p, g, elements, [&](int i, F root) { L::store(roots + i, root); });
  }
  // Computes the new states of a tile and puts them to the codecs. Calls keep(i, root) with what the first
  // half of the step returns for the vector that begins at element i.
  template <class Keep>
  static void put_new_states(const Rule& rule, Codecs& codecs, const Numbers<L>& p, const Numbers<L>& g,
                             std::int64_t elements, const Keep& keep) {
    for (int i = 0; i < kTileElements; i += kTogether * L::kLanes) {
      F s[kTogether][kStates + 1];
      for (int k = 0; k < kTogether; ++k) load(codecs, s[k], i + k * L::kLanes);
      for (int k = 0; k < kTogether; ++k) {
        const int at = i + k * L::kLanes;
        keep(at, begin(rule, p.load(at), g.load(at), s[k]));
      }
      if (elements < kTileElements) [[unlikely]] {
        for (int k = 0; k < kTogether; ++k) pad(s[k], i + k * L::kLanes, elements);
      }
      each_state(codecs, [&](auto& codec, int of) {
        codec.put(i, {s[0][of], s[1][of], s[2][of], s[3][of]});
      });
    }
  }
  // Sets the lanes of the vector at element i that are beyond the last of `elements` to 0.
  static void pad(F* s, int i, std::int64_t elements) {
    const auto beyond = L::index() + L::all(i + 1) > L::all(static_cast<std::int32_t>(elements));
    for (int k = 0; k < kStates; ++k) s[k] = select(beyond, L::all(0.0F), s[k]);
  }

  static void second_pass(const Rule& rule, Codecs& codecs, const Numbers<L>& p, const Numbers<L>& g,
                          const Values& roots) {
    for (int i = 0; i < kTileElements; i += kTogether * L::kLanes) {
      // Initialized in one expression, because a tuple's default constructor would zero its members first.
      const decltype(find(codecs, 0)) found[kTogether] = {find(codecs, i), find(codecs, i + L::kLanes),
                                                          find(codecs, i + 2 * L::kLanes),
                                                          find(codecs, i + 3 * L::kLanes)};
      Codes codes;
      for (int k = 0; k < kTogether; ++k) {
        const int at = i + k * L::kLanes;
        p.prefetch(at, ahead());
        const F first = std::get<0>(codecs).waiting(at);
        p.store(at, end(rule, {p.load(at), g.load(at), first, L::load(roots + at)}));
        code(codecs, found[k], codes, k, std::make_index_sequence<kStates>());
      }
      each_state(codecs, [&](auto& codec, int of) { codec.store(i, codes[of]); });
    }
  }
  static auto find(const Codecs& codecs, int i) {
    return std::apply([&](const auto&... codec) { return std::make_tuple(codec.find(i)...); }, codecs);
  }
  using Codes = typename L::Ints[kStates + 1][kTogether];
  template <class Found, std::size_t... k>
  static void code(const Codecs& codecs, const Found& found, Codes& codes, int place,
                   std::index_sequence<k...>) {
    ((codes[k][place] = std::get<k>(codecs).code(std::get<k>(found))), ...);
  }
};

/// A rule over the tiles of one tensor, with every state in one format.
template <class L, class Rule, template <class, bool> class CodecOf, OptimFormat kFormat>
struct Tiles {
  static std::int64_t step(const OptimTensor& tensor, std::int64_t first, std::int64_t last) {
    std::int64_t nonfinite = 0;
    over_tiles(tensor, kFormat, Rule::kStates, first, last,
               [&](const auto&... tiles) { nonfinite += StepLoops::step(formats(), tiles...); });
    return nonfinite;
  }

  static std::int64_t survey(const OptimTensor& tensor, std::int64_t first, std::int64_t last) {
    std::int64_t nonfinite = 0;
    over_tiles(tensor, kFormat, Rule::kStates, first, last,
               [&](const auto&... tiles) { nonfinite += TileLoops<L, Rule, Surveyed>::survey(tiles...); });
    return nonfinite;
  }

  static OptimSquares measure(const OptimTensor& tensor, std::int64_t first, std::int64_t last) {
    OptimSquares squares;
    over_tiles(tensor, kFormat, Rule::kStates, first, last,
               [&](const auto&... tiles) { Loops::measure(squares, formats(), tiles...); });
    return squares;
  }

 private:
  static constexpr bool kStaged = is_staged<L, CodecOf>();
  template <class Of>
  static auto loops() {
    if constexpr (Of::kStates == 0) {
      return TileLoops<L, Of, Float32Codec>();  // The format does not matter without states.
    } else if constexpr (kStaged) {
      return TileLoops<L, Of, Staged>();
    } else {
      return TileLoops<L, Of, CodecOf>();
    }
  }
  using Loops = decltype(loops<Rule>());
  using StepLoops = decltype(loops<typename Rule::StepsAs>());

  static const StagedFormat* formats() {
    if constexpr (kStaged) {
      static constexpr StagedFormat kBySign[] = {staged_format<L, CodecOf<L, false>>(),
                                                 staged_format<L, CodecOf<L, true>>()};
      return kBySign;
    } else {
      return nullptr;
    }
  }
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
