// All of this source is compiled for AVX2.
#include "chain/lower.h"

namespace reef {
namespace {

void lower(double* best, std::size_t count, const LowerTerm* terms, std::size_t term_count) {
  lower_with(best, count, terms, term_count);
}

}  // namespace

Lower lower_with_avx2() { return __builtin_cpu_supports("avx2") ? &lower : nullptr; }

}  // namespace reef
