#include "device/runtime/nccl_combine.h"

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstring>
#include <type_traits>

namespace reef::played {
namespace {

// 16-bit numbers are added and multiplied as float and then rounded. This gives the correctly rounded result,
// because float has more than twice their significant bits.
template <class T>
auto widened(T value) {
  if constexpr (std::is_same_v<T, __half>)
    return __half2float(value);
  else if constexpr (std::is_same_v<T, __nv_bfloat16>)
    return __bfloat162float(value);
  else if constexpr (std::is_integral_v<T>)
    return static_cast<std::uint64_t>(value);  // Integers wrap around, as in NCCL.
  else
    return value;
}

template <class T, class Wide>
T rounded(Wide value) {
  if constexpr (std::is_same_v<T, __half>)
    return __float2half(static_cast<float>(value));
  else if constexpr (std::is_same_v<T, __nv_bfloat16>)
    return __float2bfloat16(static_cast<float>(value));
  else
    return static_cast<T>(value);
}

template <class T>
T sum(T a, T b) {
  return rounded<T>(widened(a) + widened(b));
}
template <class T>
T product(T a, T b) {
  return rounded<T>(widened(a) * widened(b));
}
// As in NCCL, a NaN is ignored if the other operand is a number.
template <class T>
T smaller(T a, T b) {
  if constexpr (std::is_integral_v<T>)
    return std::min(a, b);
  else
    return rounded<T>(std::fmin(widened(a), widened(b)));
}
template <class T>
T larger(T a, T b) {
  if constexpr (std::is_integral_v<T>)
    return std::max(a, b);
  else
    return rounded<T>(std::fmax(widened(a), widened(b)));
}

template <class T>
T element(const char* of, std::size_t i) {
  T value;
  std::memcpy(&value, of + i * sizeof(T), sizeof value);
  return value;
}

// Calls `with` with a value of the C++ type, and returns whether there is such a type.
template <class With>
bool with_type(ncclDataType_t type, const With& with) {
  switch (type) {
    case ncclInt8:
      return with(std::int8_t{}), true;
    case ncclUint8:
      return with(std::uint8_t{}), true;
    case ncclInt32:
      return with(std::int32_t{}), true;
    case ncclUint32:
      return with(std::uint32_t{}), true;
    case ncclInt64:
      return with(std::int64_t{}), true;
    case ncclUint64:
      return with(std::uint64_t{}), true;
    case ncclFloat16:
      return with(__half{}), true;
    case ncclFloat32:
      return with(float{}), true;
    case ncclFloat64:
      return with(double{}), true;
    case ncclBfloat16:
      return with(__nv_bfloat16{}), true;
    default:
      return false;
  }
}

template <class T>
void multiply(T factor, char* elements, std::size_t count) {
  for (std::size_t i = 0; i < count; ++i) {
    const T value = product(element<T>(elements, i), factor);
    std::memcpy(elements + i * sizeof(T), &value, sizeof value);
  }
}

template <class T, class Two>
void fold(const std::vector<const char*>& inputs, char* output, std::size_t count, const Two& two) {
  for (std::size_t i = 0; i < count; ++i) {
    T all = element<T>(inputs[0], i);
    for (std::size_t rank = 1; rank < inputs.size(); ++rank) all = two(all, element<T>(inputs[rank], i));
    std::memcpy(output + i * sizeof(T), &all, sizeof all);
  }
}

template <class T>
void fold(ncclRedOp_t op, const std::vector<const char*>& inputs, char* output, std::size_t count) {
  if (op == ncclProd) return fold<T>(inputs, output, count, product<T>);
  if (op == ncclMin) return fold<T>(inputs, output, count, smaller<T>);
  if (op == ncclMax) return fold<T>(inputs, output, count, larger<T>);
  fold<T>(inputs, output, count, sum<T>);
  if constexpr (std::is_integral_v<T>) {
    if (op != ncclAvg) return;
    for (std::size_t i = 0; i < count; ++i) {
      const T value = static_cast<T>(element<T>(output, i) / static_cast<T>(inputs.size()));
      std::memcpy(output + i * sizeof(T), &value, sizeof value);
    }
  }
}

}  // namespace

std::size_t bytes_of(ncclDataType_t type) {
  std::size_t bytes = type == ncclFloat8e4m3 || type == ncclFloat8e5m2 ? 1 : 0;
  with_type(type, [&](auto value) { bytes = sizeof value; });
  return bytes;
}

bool is_reduced(ncclDataType_t type) {
  return with_type(type, [](auto) {});
}

void prepare(const Reduction& reduction, ncclDataType_t type, int ranks, char* elements, std::size_t count) {
  with_type(type, [&](auto value) {
    using T = decltype(value);
    if (reduction.op == kMultipliedSum)
      multiply(element<T>(reduction.factor.data(), 0), elements, count);
    else if (reduction.op == ncclAvg && !std::is_integral_v<T>)
      multiply(rounded<T>(std::is_same_v<T, double> ? 1.0 / ranks : static_cast<float>(1.0 / ranks)),
               elements, count);
  });
}

void combine(const Reduction& reduction, ncclDataType_t type, const std::vector<const char*>& inputs,
             char* output, std::size_t count) {
  with_type(type, [&](auto value) { fold<decltype(value)>(reduction.op, inputs, output, count); });
}

}  // namespace reef::played
