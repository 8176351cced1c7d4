#include "distributed/slice_exchange.h"

#include <ATen/ops/add.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/empty_like.h>

#include <c10/core/impl/VirtualGuardImpl.h>

#include <algorithm>
#include <array>
#include <torch/csrc/distributed/c10d/ProcessGroup.hpp>
#include <utility>
#include <vector>

#include "alias.h"
#include "distributed/comm_lane.h"
#include "distributed/group_compat.h"
#include "distributed/members.h"
#include "distributed/sigpipe.h"
#include "distributed/tag_space.h"
#include "kernels/ordered_sum.h"

namespace reef {
namespace {

using at::Tensor;

// What is added up stays in a core's cache.
constexpr std::int64_t kCachedElements = 16384;
// From every other rank, the next while one is added up. A sender waits until its chunk is wanted, and with
// one at a time a link of 1 Gbit/s does so for a tenth of the step, two exchanges or not.
constexpr std::int64_t kChunksAhead = 2;
constexpr std::int64_t kReceivedBytes = std::int64_t{1} << 20;  // of each of these, from all
constexpr int kTags = TagSpace::kPerNumber / 2;                 // of calls in order; as many of subjects

constexpr const char* kReduceScatter = "the reduce-scatter of gradients";
constexpr const char* kAllReduce = "the all-reduce of gradients";

// The messages in which a slice is sent, of so many bytes at most: the same on each rank.
class Chunks {
 public:
  Chunks(const Tensor& slice, std::int64_t most_bytes)
      : elements_(slice.numel()),
        most_(std::max<std::int64_t>(
                  1, most_bytes / kMultiple / static_cast<std::int64_t>(slice.element_size())) *
              kMultiple) {}
  // So many of them in one.
  Chunks together(std::int64_t chunks) const {
    Chunks larger = *this;
    larger.most_ *= chunks;
    return larger;
  }
  std::int64_t count() const { return (elements_ + most_ - 1) / most_; }
  std::int64_t largest() const { return std::min(most_, elements_); }
  std::int64_t elements(std::int64_t chunk) const { return std::min(most_, elements_ - chunk * most_); }
  Tensor of(const Tensor& slice, std::int64_t chunk) const {
    return alias(slice, chunk * most_, elements(chunk));
  }

 private:
  static constexpr std::int64_t kMultiple = 256;
  std::int64_t elements_;
  std::int64_t most_;
};

using WorkPtr = c10::intrusive_ptr<c10d::Work>;

// gloo writes to the socket on the thread that calls, if it can.
WorkPtr send(c10d::ProcessGroup& group, const Tensor& from, int rank, int tag) {
  const SigpipeBlocked blocked;
  std::vector<Tensor> tensors = {from};
  return group.send(tensors, rank, tag);
}
WorkPtr receive(c10d::ProcessGroup& group, const Tensor& to, int rank, int tag) {
  const SigpipeBlocked blocked;
  std::vector<Tensor> tensors = {to};
  return group.recv(tensors, rank, tag);
}

// On devices memory may have come from another stream, which must not use it anew before this one is there.
void used_by_this_stream(const Tensor& tensor) {
  if (tensor.is_cpu()) return;
  tensor.record_stream(c10::impl::VirtualGuardImpl(tensor.device().type()).getStream(tensor.device()));
}

// Of `parts`, in their order, divided last.
void ordered_sum(const std::vector<Tensor>& parts, const Tensor& own, int divisor) {
  if (parts.size() == 1) {
    own.copy_(parts.front());
    return;
  }
  const std::int64_t elements = own.numel();
  if (own.is_cpu() && own.scalar_type() == at::kFloat) {
    std::vector<const float*> from;
    for (const Tensor& part : parts) from.push_back(part.const_data_ptr<float>());
    return kernels::ordered_sum(from, own.mutable_data_ptr<float>(), elements, divisor);
  }
  const std::int64_t most = own.is_cpu() ? kCachedElements : std::max<std::int64_t>(elements, 1);
  Tensor sum = at::empty({std::min(most, elements)}, own.options());
  for (std::int64_t begin = 0; begin < elements; begin += most) {
    const std::int64_t count = std::min(most, elements - begin);
    const auto of = [&](const Tensor& tensor) { return alias(tensor, begin, count); };
    Tensor chunk = alias(sum, 0, count);
    at::add_out(chunk, of(parts[0]), of(parts[1]));
    for (std::size_t i = 2; i < parts.size(); ++i) chunk.add_(of(parts[i]));
    if (divisor != 1) chunk.div_(divisor);
    of(own).copy_(chunk);
  }
}

}  // namespace

SliceExchange::SliceExchange(ProcessGroupPtr group, int number, int degree, SumOrder sums)
    : group_(std::move(group)),
      all_{0, group_->getSize(), group_->getRank()},
      own_{all_.rank / degree * degree, degree, all_.rank},
      sums_(sums),
      first_tag_(TagSpace::kExchanges + number * TagSpace::kPerNumber) {}

bool SliceExchange::in_any_order(c10::Device device) const {
  return sums_ == SumOrder::kRanks && by_messages(*group_, device);
}

Tensor SliceExchange::slice(const Tensor& flat, int number, const Ranks& ranks) {
  const std::int64_t elements = flat.numel() / ranks.count;
  return alias(flat, number * elements, elements);
}

// Of chunks at a time, by any rank: from all others of its copy, and from one of the copy before.
int SliceExchange::most_received() const { return own_.count - (own_.count == all_.count ? 1 : 0); }

int SliceExchange::next_tag() { return first_tag_ + calls_++ % kTags; }

// For messages between ranks.
void SliceExchange::wait(const Works& works) const {
  Heartbeat* const heart = heart_of(*group_);
  for (const auto& work : works) {
    if (heart != nullptr) {
      heart->wait_for_message(work);
    } else {
      work->wait();
    }
  }
}

template <class Issue>
void SliceExchange::run(const std::string& name, const Tensor& flat, const Issue& issue) const {
  Works works;
  try {
    issue(works);  // a connection that is known to be gone is refused here already
    if (by_messages(*group_, flat.device())) return wait(works);
    for (const auto& work : works) work->wait();
  } catch (const std::exception& error) {
    const std::int64_t step = step_;
    throw rank_failed(*group_, step > 0 ? name + " in step " + std::to_string(step) : name, error);
  }
  used_by_this_stream(flat);
}

void SliceExchange::reduce_scatter(const Tensor& flat, const Tensor& own, Reduction reduction) {
  if (all_.count == 1) {
    if (own.storage().unsafeGetStorageImpl() != flat.storage().unsafeGetStorageImpl()) own.copy_(flat);
    return;
  }
  if (sums_ == SumOrder::kNative) return reduce_natively(flat, own, reduction);
  if (!by_messages(*group_, flat.device())) return add_all(flat, own, reduction);
  run(kReduceScatter, flat, [&](Works& works) {
    receive_and_add(
        flat, own, reduction, [](std::int64_t) {}, works);
  });
}

void SliceExchange::all_reduce(const Tensor& flat, Reduction reduction) {
  if (all_.count == 1) return;
  const Tensor own = own_slice(flat);
  if (sums_ == SumOrder::kNative) {
    reef::all_reduce({flat}, group_, reduction);
    used_by_this_stream(flat);
    sent_bytes_ += 2 * (all_.count - 1) * static_cast<std::int64_t>(own.nbytes());
  } else if (by_messages(*group_, flat.device())) {
    run(kAllReduce, flat, [&](Works& works) { add_and_spread(flat, own, reduction, works); });
  } else {
    add_all(flat, own, reduction);
    all_gather(flat);
  }
}

// What is added up goes back to all at once: in larger messages, for which no memory is needed, as each costs
// two small ones of gloo's. Where it is received, what was there has been sent: it is part of it.
void SliceExchange::add_and_spread(const Tensor& flat, const Tensor& own, Reduction reduction, Works& works) {
  const int tag = next_tag();
  const Chunks added(own, kReceivedBytes / most_received());
  const std::int64_t together = most_received();
  const Chunks spread = added.together(together);
  receive_and_add(
      flat, own, reduction,
      [&](std::int64_t chunk) {
        if ((chunk + 1) % together != 0 && chunk + 1 < added.count()) return;
        const Tensor sum = spread.of(own, chunk / together);
        for (int step = 1; step < own_.count; ++step) {
          const int number = (own_.rank - own_.first + step) % own_.count;
          const Tensor to = spread.of(slice(flat, number, own_), chunk / together);
          works.push_back(receive(*group_, to, own_.first + number, tag));
          works.push_back(send(*group_, sum, own_.first + number, tag));
        }
      },
      works);
  sent_bytes_ += (own_.count - 1) * static_cast<std::int64_t>(own.nbytes());
}

// The slice of every rank by one all-to-all, each copy's from all.
void SliceExchange::add_all(const Tensor& flat, const Tensor& own, Reduction reduction) {
  const int copies = all_.count / own_.count;
  Tensor from = copies == 1 ? flat : flat.repeat({copies});
  Tensor received = at::empty_like(from);
  run(kReduceScatter, flat,
      [&](Works& works) { works.push_back(compat::all_to_all(*group_, received, from)); });
  std::vector<Tensor> parts;
  for (int rank = 0; rank < all_.count; ++rank) parts.push_back(slice(received, rank, all_));
  ordered_sum(parts, own, reduction == Reduction::kMean ? all_.count : 1);
  sent_bytes_ += (all_.count - 1) * static_cast<std::int64_t>(own.nbytes());
}

void SliceExchange::reduce_natively(const Tensor& flat, const Tensor& own, Reduction reduction) {
  if (flat.is_cpu()) {  // gloo's own reduce-scatter is this, with a copy before it
    all_reduce(flat, reduction);
    if (const Tensor sum = own_slice(flat); sum.const_data_ptr() != own.const_data_ptr()) own.copy_(sum);
    return;
  }
  Tensor from = flat;
  Tensor to = own;
  run(kReduceScatter, flat,
      [&](Works& works) { works.push_back(compat::reduce_scatter(*group_, to, from)); });
  if (reduction == Reduction::kMean) own.div_(all_.count);
  sent_bytes_ += (all_.count - 1) * static_cast<std::int64_t>(own.nbytes());
}

// That of the bucket before, if it is large enough: a thread's own heap keeps several times what comes and
// goes.
Tensor SliceExchange::receive_buffer(std::int64_t elements, const at::TensorOptions& options) {
  if (!received_.defined() || received_.numel() < elements || received_.dtype() != options.dtype()) {
    received_.reset();
    received_ = at::empty({elements}, options);
  }
  return received_;
}

// By messages of a chunk each. What the ranks before this copy have added up comes from the copy before, and
// goes on to the one behind; all of it comes back from there.
template <class Done>
void SliceExchange::receive_and_add(const Tensor& flat, const Tensor& own, Reduction reduction,
                                    const Done& done, Works& works) {
  const int tag = next_tag();
  const Chunks chunks(own, kReceivedBytes / most_received());
  const int before = own_.first > 0 ? own_.rank - own_.count : -1;
  const int behind = own_.first + own_.count < all_.count ? own_.rank + own_.count : -1;
  std::vector<int> sources;  // in the order of the sum
  if (before >= 0) sources.push_back(before);
  for (int i = 0; i < own_.count; ++i) sources.push_back(own_.first + i);

  const auto others = static_cast<std::int64_t>(sources.size()) - 1;
  const Tensor received =
      receive_buffer(std::min(kChunksAhead, chunks.count()) * others * chunks.largest(), flat.options());
  const auto parts_of = [&](std::int64_t chunk) {
    std::vector<Tensor> parts;
    std::int64_t slot = chunk % kChunksAhead * others;
    for (const int source : sources) {
      parts.push_back(source == own_.rank
                          ? chunks.of(own_slice(flat), chunk)
                          : alias(received, slot++ * chunks.largest(), chunks.elements(chunk)));
    }
    return parts;
  };
  std::array<Works, kChunksAhead> coming;
  const auto receive_all = [&](std::int64_t chunk) {
    if (chunk >= chunks.count()) return;
    const std::vector<Tensor> parts = parts_of(chunk);
    Works& of_chunk = coming[chunk % kChunksAhead];
    of_chunk.clear();
    for (std::size_t i = 0; i < sources.size(); ++i) {
      if (sources[i] != own_.rank) of_chunk.push_back(receive(*group_, parts[i], sources[i], tag));
    }
  };
  const auto send_to = [&](int rank, const Tensor& from) { works.push_back(send(*group_, from, rank, tag)); };
  for (std::int64_t chunk = 0; chunk < kChunksAhead; ++chunk) receive_all(chunk);
  for (std::int64_t chunk = 0; chunk < chunks.count(); ++chunk) {
    for (int step = 1; step < own_.count; ++step) {  // not all to the first at first
      const int number = (own_.rank - own_.first + step) % own_.count;
      send_to(own_.first + number, chunks.of(slice(flat, number, own_), chunk));
    }
  }
  const auto complete = [&](std::int64_t chunk) {
    if (before >= 0) send_to(before, chunks.of(own, chunk));
    done(chunk);
  };
  const int divisor = reduction == Reduction::kMean && behind < 0 ? all_.count : 1;
  Works back;
  for (std::int64_t chunk = 0; chunk < chunks.count(); ++chunk) {
    wait(coming[chunk % kChunksAhead]);
    const Tensor sum = chunks.of(own, chunk);
    ordered_sum(parts_of(chunk), sum, divisor);
    receive_all(chunk + kChunksAhead);
    if (behind >= 0) {
      send_to(behind, sum);
      back.push_back(receive(*group_, sum, behind, tag));  // not before all of it is there
    } else {
      complete(chunk);
    }
  }
  for (std::size_t chunk = 0; chunk < back.size(); ++chunk) {
    wait({back[chunk]});
    complete(static_cast<std::int64_t>(chunk));
  }
  const int neighbours = (before >= 0 ? 1 : 0) + (behind >= 0 ? 1 : 0);
  sent_bytes_ += (own_.count - 1 + neighbours) * static_cast<std::int64_t>(own.nbytes());
}

void SliceExchange::all_gather(const Tensor& flat, std::optional<int> subject) {
  gather("the all-gather of parameters", flat, own_, subject);
  sent_bytes_ += (own_.count - 1) * static_cast<std::int64_t>(own_slice(flat).nbytes());
}

void SliceExchange::tell(const Tensor& flat) {
  gather("the exchange of flags and texts", flat, all_, std::nullopt);
}

void SliceExchange::gather(const char* name, const Tensor& flat, const Ranks& ranks,
                           std::optional<int> subject) {
  if (ranks.count == 1) return;
  const int own_number = ranks.rank - ranks.first;
  const Tensor own = slice(flat, own_number, ranks);
  if (!by_messages(*group_, flat.device())) {
    Tensor to = flat;
    Tensor from = own;
    run(name, flat, [&](Works& works) {
      if (ranks.count == all_.count) {
        works.push_back(compat::all_gather(*group_, to, from));
        return;
      }
      std::vector<std::int64_t> elements(static_cast<std::size_t>(all_.count));  // for and from each rank
      std::fill_n(elements.begin() + ranks.first, ranks.count, own.numel());
      from = own.repeat({ranks.count});
      works.push_back(compat::all_to_all(*group_, to, from, elements));
    });
    return;
  }
  run(name, flat, [&](Works& works) {
    const auto other = [&](int step) { return (own_number + step) % ranks.count; };
    const int tag = subject ? first_tag_ + kTags + *subject % kTags : next_tag();
    for (int step = 1; step < ranks.count; ++step) {
      const int from = other(ranks.count - step);
      works.push_back(receive(*group_, slice(flat, from, ranks), ranks.first + from, tag));
    }
    for (int step = 1; step < ranks.count; ++step) {
      works.push_back(send(*group_, own, ranks.first + other(step), tag));
    }
  });
}

void SliceExchange::largest(const Tensor& values) {
  if (all_.count == 1) return;
  const std::int64_t count = values.numel();
  const Tensor all = at::empty({all_.count * count}, values.options());
  slice(all, all_.rank, all_).copy_(values);
  tell(all);
  values.copy_(all.view({all_.count, count}).amax(0));
}

}  // namespace reef
