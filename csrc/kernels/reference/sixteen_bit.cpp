#include "kernels/sixteen_bit.h"

#include <c10/util/BFloat16.h>
#include <c10/util/Half.h>

#include <cmath>

namespace reef::kernels::reference {
namespace {

std::uint16_t nan_of(float nan, FloatFormat format) {
  if (format == FloatFormat::kBFloat16) return 0xFFFF;
  const auto bits = __builtin_bit_cast(std::uint32_t, nan);
  return static_cast<std::uint16_t>((bits >> 16U & 0x8000U) | 0x7E00U | (bits >> 13U & 0x3FFU));
}

template <class Function>
auto with_type(FloatFormat format, const Function& function) {
  return format == FloatFormat::kBFloat16 ? function(c10::BFloat16()) : function(c10::Half());
}

}  // namespace

bool round_to_sixteen_bits(const float* values, const float* before, std::int64_t elements,
                           FloatFormat format, std::uint16_t* rounded, float* left) {
  return with_type(format, [&]<class Element>(Element) {
    bool nonfinite = false;
    for (std::int64_t i = 0; i < elements; ++i) {
      const float sum = before == nullptr ? values[i] : values[i] + before[i];
      auto code = static_cast<Element>(sum);
      if (std::isnan(sum)) code.x = nan_of(sum, format);
      const float lost = sum - static_cast<float>(code);
      rounded[i] = code.x;
      left[i] = std::isfinite(lost) ? lost : 0;
      nonfinite = nonfinite || !std::isfinite(static_cast<float>(code));
    }
    return nonfinite;
  });
}

void sum_of_sixteen_bits(const std::vector<const std::uint16_t*>& parts, std::int64_t elements,
                         FloatFormat format, int divisor, float* to) {
  with_type(format, [&]<class Element>(Element) {
    const auto value = [&](std::size_t part, std::int64_t i) {
      return static_cast<float>(Element(parts[part][i], Element::from_bits()));
    };
    for (std::int64_t i = 0; i < elements; ++i) {
      float sum = value(0, i);
      for (std::size_t part = 1; part < parts.size(); ++part) sum += value(part, i);
      to[i] = sum / static_cast<float>(divisor);
    }
    return 0;
  });
}

}  // namespace reef::kernels::reference
