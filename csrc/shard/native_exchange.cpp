#include "shard/native_exchange.h"

#include <torch/csrc/distributed/c10d/ProcessGroup.hpp>

#include "distributed/group_compat.h"

namespace reef {

using at::Tensor;

void NativeExchange::exchange(const GradientBucket& bucket) {
  if (divided() && !bucket.flat.is_cpu()) return reduce_scatter(bucket);
  all_reduce(bucket.flat);  // gloo's own reduce-scatter is this, with a copy before it
  if (!divided()) return;
  const Tensor sum = ranks().own_slice(bucket.flat);
  if (sum.const_data_ptr() != bucket.own.const_data_ptr()) bucket.own.copy_(sum);
}

void NativeExchange::all_reduce(const Tensor& flat) {
  const int others = ranks().all().count - 1;
  if (others == 0) return;
  reef::all_reduce({flat}, ranks().group(), reduction());
  SliceExchange::used_by_this_stream(flat);
  ranks().count_sent(2 * others * static_cast<std::int64_t>(ranks().own_slice(flat).nbytes()));
}

void NativeExchange::reduce_scatter(const GradientBucket& bucket) {
  const int others = ranks().all().count - 1;
  Tensor from = bucket.flat;
  Tensor to = bucket.own;
  if (others == 0) {
    if (from.const_data_ptr() != to.const_data_ptr()) to.copy_(from);
    return;
  }
  ranks().run("the reduce-scatter of gradients", from, [&](SliceExchange::Works& works) {
    works.push_back({compat::reduce_scatter(*ranks().group(), to, from)});
  });
  if (reduction() == Reduction::kMean) to.div_(others + 1);
  ranks().count_sent(others * static_cast<std::int64_t>(to.nbytes()));
}

}  // namespace reef
