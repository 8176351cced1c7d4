#include "kernels/warp_kernels.h"

#include <algorithm>
#include <vector>

#include "kernels/optim_step/rules.h"
#include "kernels/optim_step/warp/rank1.h"
#include "kernels/optim_step/warp/step.h"

namespace reef::kernels {
namespace {

using namespace warp;

// As threads exchange them: the largest of those that share a block.
template <class Of>
void exchange(float (&largest)[kThreads][kMostStates * 2 + 1], int blocks) {
  for (int block = 0; block < blocks; ++block) {
    for (int first = 0; first < kThreads; first += Of::kSharing) {
      float most = 0;
      for (int t = first; t < first + Of::kSharing; ++t) most = std::max(most, largest[t][block]);
      for (int t = first; t < first + Of::kSharing; ++t) largest[t][block] = most;
    }
  }
}

template <bool kWhole>
using Parts = std::vector<Part<kWhole>>;

// Calls `work` with the parts that threads have of each of the tiles [first, last) of so many elements.
template <class Work>
void each_tile(std::int64_t elements, bool aligned, std::int64_t first, std::int64_t last, const Work& work) {
  for (std::int64_t tile = first; tile < last; ++tile) {
    Parts<true> whole;
    Parts<false> others;
    for (int t = 0; t < kThreads; ++t) {
      whole.push_back({tile, static_cast<int>(kTileElements), t});
      others.push_back(part_of(tile, elements, t));
    }
    if (aligned && (tile + 1) * kTileElements <= elements) {
      work(whole);
    } else {
      work(others);
    }
  }
}

template <class Rule, template <bool> class State>
struct Kernel {
  // Calls `work` with the threads of each tile whose gradient is finite.
  template <class Work>
  static std::int64_t each(const OptimTensor& tensor, std::int64_t first, std::int64_t last,
                           const Work& work) {
    std::int64_t nonfinite = 0;
    const auto step = [&]<bool kWhole>(const Parts<kWhole>& parts) {
      static const Maps<State> maps = Maps<State>::all();
      std::vector<Step<Rule, State, kWhole>> all;
      std::int64_t found = 0;
      for (const auto& part : parts) found += all.emplace_back(tensor, part, maps).nonfinite();
      nonfinite += found;
      if (found == 0) work(all);
    };
    each_tile(tensor.elements, is_aligned<Rule>(tensor), first, last, step);
    return nonfinite;
  }

  static std::int64_t step(const OptimTensor& tensor, std::int64_t first, std::int64_t last) {
    return each(tensor, first, last, []<class Thread>(std::vector<Thread>& all) {
      float largest[kThreads][kMostStates * 2 + 1];
      for (std::size_t t = 0; t < all.size(); ++t) all[t].begin(largest[t]);
      exchange<Thread>(largest, Rule::kStates * Thread::kBlocks);
      for (std::size_t t = 0; t < all.size(); ++t) all[t].end(largest[t]);
    });
  }

  static std::int64_t survey(const OptimTensor& tensor, std::int64_t first, std::int64_t last) {
    return each(tensor, first, last, [](auto& all) {
      for (auto& thread : all) thread.survey();
    });
  }

  static OptimSquares measure(const OptimTensor& tensor, std::int64_t first, std::int64_t last) {
    OptimSquares sum;
    each(tensor, first, last, [&](auto& all) {
      for (auto& thread : all) {
        const OptimSquares own = thread.squares();
        sum.parameter += own.parameter;
        sum.measured += own.measured;
      }
    });
    return sum;
  }
};

template <template <bool> class State, bool kSigned>
struct Coder {
  static void encode(const float* values, const OptimState& state, std::int64_t elements, std::int64_t first,
                     std::int64_t last) {
    const auto maps = Maps<State>::all();
    const auto encode = [&]<bool kWhole>(const Parts<kWhole>& parts) {
      std::vector<Encode<State, kSigned, kWhole>> all;
      float largest[kThreads][kMostStates * 2 + 1];
      for (std::size_t t = 0; t < parts.size(); ++t) {
        all.emplace_back(values, state, parts[t], maps.template of<kSigned>()).begin(largest[t]);
      }
      exchange<State<kSigned>>(largest, State<kSigned>::kBlocks);
      for (std::size_t t = 0; t < all.size(); ++t) all[t].end(largest[t]);
    };
    each_tile(elements, are_aligned(values, state.codes), first, last, encode);
  }
  static void decode(const OptimState& state, float* values, std::int64_t elements, std::int64_t first,
                     std::int64_t last) {
    const auto maps = Maps<State>::all();
    each_tile(elements, are_aligned(values, state.codes), first, last, [&](const auto& parts) {
      for (const auto& part : parts) {
        warp::decode<State, kSigned>(state, values, part, maps.template of<kSigned>());
      }
    });
  }
};

template <template <bool> class State, OptimFormat kFormat>
void add_format(OptimKernels& kernels) {
  const auto f = static_cast<std::size_t>(kFormat);
  for_every_rule<Lanes, rounds_as_torch(kFormat)>([&]<class Rule>(OptimRule rule) {
    const auto r = static_cast<std::size_t>(rule);
    kernels.step[r][f] = &Kernel<Rule, State>::step;
    if constexpr (requires { &Rule::measured; }) kernels.measure[r][f] = &Kernel<Rule, State>::measure;
  });
  kernels.encode[f][0] = &Coder<State, false>::encode;
  kernels.encode[f][1] = &Coder<State, true>::encode;
  kernels.decode[f][0] = &Coder<State, false>::decode;
  kernels.decode[f][1] = &Coder<State, true>::decode;
}

void survey_values(const float* values, const OptimState& state, std::int64_t elements, std::int64_t first,
                   std::int64_t last) {
  each_tile(elements, are_aligned(values), first, last, [&](const auto& parts) {
    for (const auto& part : parts) survey(values, state, part);
  });
}

void add_rank1(OptimKernels& kernels) {
  constexpr auto f = static_cast<std::size_t>(OptimFormat::kInt4Rank1);
  for_every_rule<Lanes, false>([&]<class Rule>(OptimRule rule) {
    const auto r = static_cast<std::size_t>(rule);
    if constexpr (has_unsigned<Rule>()) {
      using Of = Kernel<Rule, Int4Rank1State>;
      kernels.step[r][f] = &Of::step;
      kernels.survey[r] = &Of::survey;
      if constexpr (requires { &Rule::measured; }) kernels.measure[r][f] = &Of::measure;
    }
  });
  using Unsigned = Coder<Int4Rank1State, false>;
  kernels.encode[f][0] = &Unsigned::encode;
  kernels.decode[f][0] = &Unsigned::decode;
  kernels.survey_values = &survey_values;
}

}  // namespace

const OptimKernels& warp_kernels() {
  static const OptimKernels all = [] {
    OptimKernels kernels{};
    add_format<Float32State, OptimFormat::kFloat32>(kernels);
    add_format<BFloat16State, OptimFormat::kBFloat16>(kernels);
    add_format<Int8State, OptimFormat::kInt8>(kernels);
    add_format<Int4State, OptimFormat::kInt4>(kernels);
    add_format<Companded8State, OptimFormat::kCompanded8>(kernels);
    add_format<Int8CompensatedState, OptimFormat::kInt8Compensated>(kernels);
    add_format<Int4CompensatedState, OptimFormat::kInt4Compensated>(kernels);
    add_format<Companded8CompensatedState, OptimFormat::kCompanded8Compensated>(kernels);
    add_rank1(kernels);
    return kernels;
  }();
  return all;
}

}  // namespace reef::kernels
