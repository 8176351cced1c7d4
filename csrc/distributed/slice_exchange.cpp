#include "distributed/slice_exchange.h"

#include <ATen/ops/add.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/empty_like.h>

#include <algorithm>
#include <torch/csrc/distributed/c10d/ProcessGroup.hpp>
#include <utility>
#include <vector>

#include "distributed/group_compat.h"
#include "distributed/members.h"
#include "kernels/ordered_sum.h"

namespace reef {
namespace {

using at::Tensor;

// What is added up stays in a core's cache.
constexpr std::int64_t kCachedElements = 16384;
// While one chunk is added up, the next is received.
constexpr std::int64_t kChunkBytes = std::int64_t{1} << 20;
// Messages between two ranks are told apart by their tags, which must not be those of the program's own.
constexpr int kFirstTag = 1 << 28;
constexpr int kTags = 1 << 19;  // of calls in order; as many of subjects

// Of `parts`, in their order.
void ordered_sum(const std::vector<Tensor>& parts, const Tensor& own, Reduction reduction) {
  const std::int64_t elements = own.numel();
  if (own.is_cpu() && own.scalar_type() == at::kFloat) {
    std::vector<const float*> from;
    for (const Tensor& part : parts) from.push_back(part.const_data_ptr<float>());
    return kernels::ordered_sum(from, own.mutable_data_ptr<float>(), elements, reduction == Reduction::kMean);
  }
  const std::int64_t most = own.is_cpu() ? kCachedElements : std::max<std::int64_t>(elements, 1);
  Tensor sum = at::empty({std::min(most, elements)}, own.options());
  for (std::int64_t begin = 0; begin < elements; begin += most) {
    const std::int64_t count = std::min(most, elements - begin);
    const auto of = [&](const Tensor& tensor) { return tensor.narrow(0, begin, count); };
    Tensor chunk = sum.narrow(0, 0, count);
    at::add_out(chunk, of(parts[0]), of(parts[1]));
    for (std::size_t i = 2; i < parts.size(); ++i) chunk.add_(of(parts[i]));
    if (reduction == Reduction::kMean) chunk.div_(static_cast<std::int64_t>(parts.size()));
    of(own).copy_(chunk);
  }
}

}  // namespace

SliceExchange::SliceExchange(ProcessGroupPtr group, int number)
    : group_(std::move(group)),
      rank_(group_->getRank()),
      ranks_(group_->getSize()),
      first_tag_(kFirstTag + number % kNumbers * 2 * kTags) {}

Tensor SliceExchange::slice(const Tensor& flat, int rank) const {
  const std::int64_t elements = flat.numel() / ranks_;
  return flat.narrow(0, rank * elements, elements);
}

int SliceExchange::next_tag() { return first_tag_ + calls_++ % kTags; }

template <class Issue>
void SliceExchange::run(const char* name, const Issue& issue) const {
  Works works;
  try {
    issue(works);  // a connection that is known to be gone is refused here already
    for (const auto& work : works) work->wait();
  } catch (const std::exception& error) {
    throw rank_failed(*group_, name, error);
  }
}

void SliceExchange::reduce_scatter(const Tensor& flat, const Tensor& own, Reduction reduction) {
  if (ranks_ == 1) {
    if (own.storage().unsafeGetStorageImpl() != flat.storage().unsafeGetStorageImpl()) own.copy_(flat);
    return;
  }
  if (flat.is_cpu()) {
    run("the reduce-scatter of gradients",
        [&](Works& works) { receive_and_add(flat, own, reduction, works); });
  } else {
    Tensor received = at::empty_like(flat);
    run("the reduce-scatter of gradients", [&](Works& works) {
      Tensor from = flat;
      works.push_back(compat::all_to_all(*group_, received, from));
    });
    std::vector<Tensor> parts;
    for (int rank = 0; rank < ranks_; ++rank) parts.push_back(slice(received, rank));
    ordered_sum(parts, own, reduction);
  }
  sent_bytes_ += (ranks_ - 1) * (flat.numel() / ranks_) * static_cast<std::int64_t>(flat.element_size());
}

// By messages of a chunk each, of which two from every rank are under way.
void SliceExchange::receive_and_add(const Tensor& flat, const Tensor& own, Reduction reduction,
                                    Works& works) {
  const int tag = next_tag();
  const std::int64_t elements = own.numel();
  const std::int64_t most = kChunkBytes / static_cast<std::int64_t>(flat.element_size());
  const std::int64_t chunks = (elements + most - 1) / most;
  const auto chunk_of = [&](const Tensor& whole, std::int64_t chunk) {
    return whole.narrow(0, chunk * most, std::min(most, elements - chunk * most));
  };
  const Tensor received =
      at::empty({std::min<std::int64_t>(2, chunks), ranks_ - 1, std::min(most, elements)}, flat.options());
  const auto place = [&](std::int64_t chunk, int rank) {
    return received[chunk % 2][rank < rank_ ? rank : rank - 1].narrow(
        0, 0, std::min(most, elements - chunk * most));
  };
  Works coming[2];
  const auto receive = [&](std::int64_t chunk) {
    for (int rank = 0; rank < ranks_ && chunk < chunks; ++rank) {
      if (rank == rank_) continue;
      std::vector<Tensor> to = {place(chunk, rank)};
      coming[chunk % 2].push_back(group_->recv(to, rank, tag));
    }
  };
  receive(0);
  receive(1);
  for (std::int64_t chunk = 0; chunk < chunks; ++chunk) {
    for (int step = 1; step < ranks_; ++step) {  // not all to rank 0 at first
      const int to = (rank_ + step) % ranks_;
      std::vector<Tensor> from = {chunk_of(slice(flat, to), chunk)};
      works.push_back(group_->send(from, to, tag));
    }
  }
  for (std::int64_t chunk = 0; chunk < chunks; ++chunk) {
    for (const auto& work : coming[chunk % 2]) work->wait();
    coming[chunk % 2].clear();
    std::vector<Tensor> parts;
    for (int rank = 0; rank < ranks_; ++rank)
      parts.push_back(rank == rank_ ? chunk_of(slice(flat, rank), chunk) : place(chunk, rank));
    ordered_sum(parts, chunk_of(own, chunk), reduction);
    receive(chunk + 2);
  }
}

void SliceExchange::all_gather(const Tensor& flat, std::optional<int> subject) {
  gather("the all-gather of parameters", flat, subject);
  sent_bytes_ += (ranks_ - 1) * flat.numel() / ranks_ * static_cast<std::int64_t>(flat.element_size());
}

void SliceExchange::tell(const Tensor& flat) {
  gather("the exchange of flags and texts", flat, std::nullopt);
}

void SliceExchange::gather(const char* name, const Tensor& flat, std::optional<int> subject) {
  if (ranks_ == 1) return;
  run(name, [&](Works& works) {
    if (flat.is_cpu()) {
      const int tag = subject ? first_tag_ + kTags + *subject % kTags : next_tag();
      for (int step = 1; step < ranks_; ++step) {
        const int from = (rank_ + ranks_ - step) % ranks_;
        std::vector<Tensor> to = {slice(flat, from)};
        works.push_back(group_->recv(to, from, tag));
      }
      for (int step = 1; step < ranks_; ++step) {
        std::vector<Tensor> own = {own_slice(flat)};
        works.push_back(group_->send(own, (rank_ + step) % ranks_, tag));
      }
    } else {
      Tensor to = flat;
      Tensor own = own_slice(flat);
      works.push_back(compat::all_gather(*group_, to, own));
    }
  });
}

void SliceExchange::any(const Tensor& flags) {
  if (ranks_ == 1) return;
  const std::int64_t count = flags.numel();
  const Tensor all = at::empty({ranks_ * count}, flags.options());
  own_slice(all).copy_(flags);
  tell(all);
  flags.copy_(all.view({ranks_, count}).amax(0));
}

}  // namespace reef
