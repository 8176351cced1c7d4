#include "kernels/sum_of_squares.h"

#include <c10/util/BFloat16.h>
#include <c10/util/Half.h>

#include <algorithm>
#include <mutex>

#include "kernels/parallel.h"

namespace reef::kernels {
namespace {

constexpr std::int64_t kGrain = 64;  // the least of these sums that are worth a thread
constexpr int kLanes = 8;

template <class T>
double of_some(const T* values, std::int64_t count) {
  double sums[kLanes] = {};
  std::int64_t i = 0;
  for (; i + kLanes <= count; i += kLanes) {
    for (int lane = 0; lane < kLanes; ++lane) {
      const auto x = static_cast<double>(values[i + lane]);
      sums[lane] += x * x;  // exact, but for doubles
    }
  }
  for (; i < count; ++i) {
    const auto x = static_cast<double>(values[i]);
    sums[i % kLanes] += x * x;
  }
  return ((sums[0] + sums[1]) + (sums[2] + sums[3])) + ((sums[4] + sums[5]) + (sums[6] + sums[7]));
}

template <class T>
ExactSum of_all(const void* data, std::int64_t elements) {
  const auto* const values = static_cast<const T*>(data);
  ExactSum sum;
  std::mutex mutex;
  const std::int64_t blocks = (elements + kSquaresTogether - 1) / kSquaresTogether;
  parallel_for(0, blocks, kGrain, [&](std::int64_t begin, std::int64_t end) {
    ExactSum own;
    for (std::int64_t block = begin; block < end; ++block) {
      const std::int64_t first = block * kSquaresTogether;
      own.add(of_some(values + first, std::min(kSquaresTogether, elements - first)));
    }
    const std::lock_guard lock(mutex);
    sum.add(own);
  });
  return sum;
}

}  // namespace

ExactSum sum_of_squares(const void* data, std::int64_t elements, FloatFormat format) {
  switch (format) {
    case FloatFormat::kFloat16:
      return of_all<c10::Half>(data, elements);
    case FloatFormat::kBFloat16:
      return of_all<c10::BFloat16>(data, elements);
    case FloatFormat::kFloat32:
      return of_all<float>(data, elements);
    case FloatFormat::kFloat64:
      break;
  }
  return of_all<double>(data, elements);
}

}  // namespace reef::kernels
