#include "kernels/count_nonfinite.h"

#include <c10/util/BFloat16.h>
#include <c10/util/Half.h>

#include <cmath>

namespace reef::kernels::reference {
namespace {

template <class Element>
std::int64_t count(const void* data, std::int64_t elements) {
  const auto* values = static_cast<const Element*>(data);
  std::int64_t found = 0;
  for (std::int64_t i = 0; i < elements; ++i) {
    if (!std::isfinite(static_cast<double>(values[i]))) ++found;
  }
  return found;
}

}  // namespace

std::int64_t count_nonfinite(const void* data, std::int64_t elements, FloatFormat format) {
  switch (format) {
    case FloatFormat::kFloat16:
      return count<c10::Half>(data, elements);
    case FloatFormat::kBFloat16:
      return count<c10::BFloat16>(data, elements);
    case FloatFormat::kFloat32:
      return count<float>(data, elements);
    case FloatFormat::kFloat64:
      break;
  }
  return count<double>(data, elements);
}

}  // namespace reef::kernels::reference
