#include "optim/step.h"

#include <algorithm>
#include <atomic>
#include <cmath>
#include <cstdlib>

#include "kernels/parallel.h"
#include "optim/one_bit_adam.h"
#include "reef/error.h"

namespace reef::optim {

using kernels::kTileElements;
using kernels::OptimFormat;
using kernels::OptimKernels;
using kernels::OptimLevel;
using kernels::OptimMaster;
using kernels::OptimRule;

namespace {

constexpr std::string_view kFormatNames[] = {"float32",
                                             "bfloat16",
                                             "int8",
                                             "int4",
                                             "companded8",
                                             "int8_compensated",
                                             "int4_compensated",
                                             "companded8_compensated",
                                             "int4_rank1"};
constexpr std::string_view kMasterNames[] = {"none", "float32", "split", "stochastic"};

template <class Enum, std::size_t kCount>
Enum by_name(const std::string_view (&names)[kCount], std::string_view given, const char* what) {
  std::string all;
  for (std::size_t i = 0; i < kCount; ++i) {
    if (names[i] == given) return static_cast<Enum>(i);
    all += (i == 0 ? "" : ", ") + std::string(names[i]);
  }
  throw ConfigError("'" + std::string(given) + "' is no " + what + "; use one of " + all);
}

// The best that the processor has, or what the environment asks for: so that one machine can measure them
// all.
OptimLevel chosen_level() {
  const char* const asked = std::getenv("REEF_CPU");
  if (asked == nullptr || *asked == '\0') return kernels::levels().front();
  if (const auto found = kernels::level_by_name(asked)) return *found;
  std::string names;
  for (const OptimLevel level : kernels::levels()) {
    names += (names.empty() ? "" : ", ") + std::string(kernels::level_name(level));
  }
  throw ConfigError("REEF_CPU is '" + std::string(asked) +
                    "', which is no instruction set that the optimizers' kernels have on this processor; "
                    "unset it, or set it to one of " +
                    names);
}

const OptimKernels& best_kernels() {
  static const OptimKernels& best = *kernels::optim_kernels(chosen_level());
  return best;
}

/// Some tiles of one tensor: what a thread takes at once. Sums are added up piece by piece, so their size is
/// fixed.
struct Piece {
  std::size_t work;
  std::int64_t first;
  std::int64_t last;
};
constexpr std::int64_t kPieceTiles = 64;

void add_pieces(std::vector<Piece>& pieces, std::size_t work, std::int64_t elements) {
  const std::int64_t tiles = kernels::tiles_of(elements);
  for (std::int64_t first = 0; first < tiles; first += kPieceTiles) {
    pieces.push_back({work, first, std::min(first + kPieceTiles, tiles)});
  }
}

void count(std::int64_t& nonfinite, std::int64_t found) {
  if (found > 0) std::atomic_ref(nonfinite).fetch_add(found, std::memory_order_relaxed);
}

template <class Work>
void over(const std::vector<Piece>& pieces, const Work& work) {
  kernels::parallel_for(0, static_cast<std::int64_t>(pieces.size()), 1,
                        [&](std::int64_t begin, std::int64_t end) {
                          for (std::int64_t i = begin; i < end; ++i) work(static_cast<std::size_t>(i));
                        });
}

// With states in kInt4Rank1, tensors are surveyed and stepped in groups of about this many elements, so that
// the step finds in a cache the gradients that the survey has read.
constexpr std::int64_t kSurveyedElements = 1 << 20;

// Raises the new scales of works in kInt4Rank1, and drops the pieces of those that are not finite.
void survey(OptimRule rule, const std::vector<OptimWork>& works, std::vector<Piece>& pieces,
            std::int64_t* nonfinite) {
  const auto kernel = best_kernels().survey[static_cast<std::size_t>(rule)];
  over(pieces, [&](std::size_t i) {
    const Piece& piece = pieces[i];
    const OptimWork& work = works[piece.work];
    if (work.format != OptimFormat::kInt4Rank1) return;
    count(nonfinite[piece.work], kernel(work.tensor, piece.first, piece.last));
  });
  std::erase_if(pieces, [&](const Piece& piece) { return nonfinite[piece.work] > 0; });
}

void settle(const OptimWork& work) {
  for (const kernels::OptimState& state : work.tensor.states) {
    const std::int64_t count = state.matrix.rows + state.matrix.columns;
    std::copy_n(state.new_scales, count, reinterpret_cast<float*>(state.scales));
  }
}

void set_trusts(OptimRule rule, const OptimHyper& hyper, std::vector<OptimWork>& works) {
  if (std::any_of(works.begin(), works.end(), [](const OptimWork& work) { return !work.squares; })) {
    const std::vector<ExactSquares> sums = squares_on_cpu(rule, works);
    for (std::size_t i = 0; i < works.size(); ++i) {
      if (!works[i].squares) works[i].squares = {sums[i].parameter.value(), sums[i].measured.value()};
    }
  }
  for (OptimWork& work : works) set_trust(rule, hyper, *work.squares, work);
}

}  // namespace

OptimFormat optim_format(std::string_view name) {
  return by_name<OptimFormat>(kFormatNames, name, "format of states");
}
OptimMaster optim_master(std::string_view name) {
  return by_name<OptimMaster>(kMasterNames, name, "kind of master weights");
}
std::string_view name(OptimFormat format) { return kFormatNames[static_cast<std::size_t>(format)]; }
std::string_view name(OptimMaster master) { return kMasterNames[static_cast<std::size_t>(master)]; }

void set_constants(OptimRule rule, const OptimHyper& hyper, OptimWork& work) {
  const float gradient = work.tensor.constants.gradient;
  work.tensor.constants = optim_constants(rule, hyper, work.step, work.begins);
  if (work.gets_momentum) step_by_momentum(hyper, work.tensor.constants);
  work.tensor.constants.gradient = hyper.maximize != 0 ? -gradient : gradient;
}

void set_trust(OptimRule rule, const OptimHyper& hyper, const kernels::OptimSquares& sum, OptimWork& work) {
  work.tensor.constants.trust =
      !work.adapts
          ? 1
          : static_cast<float>(optim_trust(rule, hyper, std::sqrt(sum.parameter), std::sqrt(sum.measured)));
}

std::int64_t new_scales_of(const std::vector<OptimWork>& works) {
  std::int64_t count = 0;
  for (const OptimWork& work : works) {
    for (const kernels::OptimState& state : work.tensor.states) {
      count += state.matrix.rows + state.matrix.columns;
    }
  }
  return count;
}

void set_new_scales(std::vector<OptimWork>& works, float* memory) {
  for (OptimWork& work : works) {
    for (kernels::OptimState& state : work.tensor.states) {
      state.new_scales = memory;
      memory += state.matrix.rows + state.matrix.columns;
    }
  }
}

std::vector<ExactSquares> squares_on_cpu(OptimRule rule, const std::vector<OptimWork>& works) {
  std::vector<Piece> pieces;
  for (std::size_t i = 0; i < works.size(); ++i) add_pieces(pieces, i, works[i].tensor.elements);
  const auto& kernels = best_kernels().measure[static_cast<std::size_t>(rule)];
  std::vector<ExactSquares> of_pieces(pieces.size());
  over(pieces, [&](std::size_t i) {
    const Piece& piece = pieces[i];
    const OptimWork& work = works[piece.work];
    const auto kernel = kernels[static_cast<std::size_t>(work.format)];
    for (std::int64_t tile = piece.first; tile < piece.last; ++tile) {
      const kernels::OptimSquares squares = kernel(work.tensor, tile, tile + 1);
      of_pieces[i].parameter.add(squares.parameter);
      of_pieces[i].measured.add(squares.measured);
    }
  });
  std::vector<ExactSquares> sums(works.size());
  for (std::size_t i = 0; i < pieces.size(); ++i) {
    sums[pieces[i].work].parameter.add(of_pieces[i].parameter);
    sums[pieces[i].work].measured.add(of_pieces[i].measured);
  }
  return sums;
}

void step_on_cpu(OptimRule rule, const OptimHyper& hyper, std::vector<OptimWork>& works,
                 std::int64_t* nonfinite) {
  const auto r = static_cast<std::size_t>(rule);
  for (OptimWork& work : works) set_constants(rule, hyper, work);
  if (best_kernels().measure[r][0] != nullptr) set_trusts(rule, hyper, works);
  std::vector<float> new_scales(static_cast<std::size_t>(new_scales_of(works)));
  set_new_scales(works, new_scales.data());
  const bool surveys = !new_scales.empty();
  const auto& kernels = best_kernels().step[r];
  std::vector<Piece> pieces;
  std::int64_t elements = 0;
  for (std::size_t i = 0; i < works.size(); ++i) {
    add_pieces(pieces, i, works[i].tensor.elements);
    elements += works[i].tensor.elements;
    const bool more_fit = !surveys || elements < kSurveyedElements;
    if (more_fit && i + 1 < works.size()) continue;
    if (surveys) survey(rule, works, pieces, nonfinite);
    over(pieces, [&](std::size_t k) {
      const Piece& piece = pieces[k];
      const OptimWork& work = works[piece.work];
      const auto kernel = kernels[static_cast<std::size_t>(work.format)];
      count(nonfinite[piece.work], kernel(work.tensor, piece.first, piece.last));
    });
    pieces.clear();
    elements = 0;
  }
  if (!surveys) return;
  for (std::size_t i = 0; i < works.size(); ++i) {
    if (nonfinite[i] == 0) settle(works[i]);
  }
}

void encode_on_cpu(OptimFormat format, bool is_signed, const float* values, const kernels::OptimState& state,
                   std::int64_t elements) {
  const auto encode = best_kernels().encode[static_cast<std::size_t>(format)][is_signed ? 1 : 0];
  std::vector<Piece> pieces;
  add_pieces(pieces, 0, elements);
  const auto run = [&](kernels::OptimEncode kernel, const kernels::OptimState& to) {
    over(pieces, [&](std::size_t i) { kernel(values, to, elements, pieces[i].first, pieces[i].last); });
  };
  kernels::OptimState to = state;
  if (format == OptimFormat::kInt4Rank1) {
    to.new_scales = reinterpret_cast<float*>(state.scales);
    std::fill_n(to.new_scales, state.matrix.rows + state.matrix.columns, 0.0F);
    run(best_kernels().survey_values, to);
  }
  run(encode, to);
}

void decode_on_cpu(OptimFormat format, bool is_signed, const kernels::OptimState& state, float* values,
                   std::int64_t elements) {
  const auto decode = best_kernels().decode[static_cast<std::size_t>(format)][is_signed ? 1 : 0];
  std::vector<Piece> pieces;
  add_pieces(pieces, 0, elements);
  over(pieces, [&](std::size_t i) { decode(state, values, elements, pieces[i].first, pieces[i].last); });
}

}  // namespace reef::optim
