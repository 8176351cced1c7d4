// All of this source is compiled for AVX2.
#include "chain/lower.h"

namespace reef {
namespace {

void lower(double* best, std::size_t count, double seconds, const double* behind, const double* before) {
  lower_with(best, count, seconds, behind, before);
}

}  // namespace

Lower lower_with_avx2() { return __builtin_cpu_supports("avx2") ? &lower : nullptr; }

}  // namespace reef
