#include "shard/ordered_exchange.h"

namespace reef {

void OrderedExchange::exchange(const GradientBucket& bucket) {
  if (divided()) {
    sum_.reduce_scatter(bucket.flat, bucket.own, SliceSum::Over::kAll, reduction());
  } else {
    sum_.all_reduce(bucket.flat, reduction());
  }
}

void OrderedExchange::begin_step(std::int64_t step) {
  GradientExchange::begin_step(step);
  sum_.forget();
}

}  // namespace reef
