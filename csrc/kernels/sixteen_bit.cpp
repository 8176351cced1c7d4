#include "kernels/sixteen_bit.h"

#include <atomic>

#include "kernels/parallel.h"
#include "kernels/sixteen_bit/all_loops.h"

namespace reef::kernels {
namespace {

constexpr std::int64_t kGrain = std::int64_t{1} << 15;  // the least that is worth a thread

const SixteenBitLoops& loops(FloatFormat format) {
  static const SixteenBitKernels* const with_avx2 = sixteen_bit_kernels_with_avx2();
  const SixteenBitKernels& kernels = with_avx2 != nullptr ? *with_avx2 : kSixteenBit;
  return format == FloatFormat::kBFloat16 ? kernels.bfloat16 : kernels.float16;
}

}  // namespace

bool round_to_sixteen_bits(const float* values, const float* before, std::int64_t elements,
                           FloatFormat format, std::uint16_t* rounded, float* left) {
  std::atomic<bool> nonfinite{false};
  parallel_for(0, elements, kGrain, [&](std::int64_t begin, std::int64_t end) {
    const float* const of_before = before == nullptr ? nullptr : before + begin;
    if (loops(format).round(values + begin, of_before, end - begin, rounded + begin, left + begin))
      nonfinite.store(true, std::memory_order_relaxed);
  });
  return nonfinite.load();
}

void sum_of_sixteen_bits(const std::vector<const std::uint16_t*>& parts, std::int64_t elements,
                         FloatFormat format, int divisor, float* to) {
  parallel_for(0, elements, kGrain, [&](std::int64_t begin, std::int64_t end) {
    loops(format).sum(parts.data(), static_cast<std::int64_t>(parts.size()), begin, end - begin, divisor, to);
  });
}

}  // namespace reef::kernels
