#pragma once

#include <cstddef>

namespace reef {

/// A cost for each number of slots: (seconds + behind[i]) + before[i].
struct LowerTerm {
  double seconds;
  const double* behind;
  const double* before;
};
inline constexpr std::size_t kLowerTerms = 4;

/// best[i] becomes the least of itself and of up to kLowerTerms terms, which are read in one pass. All of the
/// dynamic program's time is spent here.
using Lower = void (*)(double* best, std::size_t count, const LowerTerm* terms, std::size_t term_count);

template <std::size_t kTerms>
static void lower_with_terms(double* __restrict__ best, std::size_t count, const LowerTerm* terms) {
  LowerTerm local[kTerms];
  for (std::size_t k = 0; k < kTerms; ++k) local[k] = terms[k];
  for (std::size_t i = 0; i < count; ++i) {
    double least = best[i];
    for (std::size_t k = 0; k < kTerms; ++k) {
      const double cost = local[k].seconds + local[k].behind[i] + local[k].before[i];
      least = cost < least ? cost : least;
    }
    best[i] = least;
  }
}

/// A copy for each source, which may be compiled for another processor.
[[maybe_unused]] static void lower_with(double* best, std::size_t count, const LowerTerm* terms,
                                        std::size_t term_count) {
  if (term_count == 1) lower_with_terms<1>(best, count, terms);
  if (term_count == 2) lower_with_terms<2>(best, count, terms);
  if (term_count == 3) lower_with_terms<3>(best, count, terms);
  if (term_count == 4) lower_with_terms<4>(best, count, terms);
}

/// The same bits, twice as fast; nullptr where the processor cannot. (Twins: lower_avx2.cpp,
/// no_lower_avx2.cpp.)
Lower lower_with_avx2();

}  // namespace reef
