#include "distributed/slice_sum.h"

#include <ATen/ops/add.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/empty_like.h>

#include <algorithm>
#include <array>
#include <torch/csrc/distributed/c10d/ProcessGroup.hpp>
#include <vector>

#include "alias.h"
#include "distributed/group_compat.h"
#include "distributed/slice_chunks.h"
#include "kernels/ordered_sum.h"

namespace reef {
namespace {

using at::Tensor;

// What is added up stays in a core's cache.
constexpr std::int64_t kCachedElements = 16384;
// From every other rank, the next while one is added up. A sender waits until its chunk is wanted, and with
// one at a time a link of 1 Gbit/s does so for a tenth of the step, two exchanges or not.
constexpr std::int64_t kChunksAhead = 2;

constexpr const char* kReduceScatter = "the reduce-scatter of gradients";
constexpr const char* kAllReduce = "the all-reduce of gradients";

// Those of a slice, in its memory.
class Chunks : public SliceChunks {
 public:
  Chunks(const Tensor& slice, std::int64_t most_bytes)
      : Chunks(SliceChunks(slice.numel(), static_cast<std::int64_t>(slice.element_size()), most_bytes)) {}
  Chunks together(std::int64_t chunks) const { return Chunks(SliceChunks::together(chunks)); }
  Tensor of(const Tensor& slice, std::int64_t chunk) const {
    return alias(slice, first(chunk), elements(chunk));
  }

 private:
  explicit Chunks(const SliceChunks& chunks) : SliceChunks(chunks) {}
};

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

// Of chunks at a time, by any rank: from all others of its copy, and over all from one of the copy before.
int SliceSum::most_received(Over over) const {
  return ranks_.copy().count - (ranks_.copy().count == ranks_of(over).count ? 1 : 0);
}

void SliceSum::reduce_scatter(const Tensor& flat, const Tensor& own, Over over, Reduction reduction) {
  if (ranks_of(over).count == 1) {
    const Tensor from = ranks_.own_slice(flat);
    if (from.const_data_ptr() != own.const_data_ptr()) own.copy_(from);
    return;
  }
  if (!ranks_.in_any_order(flat.device())) return add_all(flat, own, over, reduction);
  ranks_.run(kReduceScatter, flat, [&](Works& works) {
    receive_and_add(
        flat, own, over, reduction, [](std::int64_t) {}, works);
  });
}

void SliceSum::all_reduce(const Tensor& flat, Reduction reduction) {
  if (ranks_.all().count == 1) return;
  const Tensor own = ranks_.own_slice(flat);
  if (ranks_.in_any_order(flat.device())) {
    ranks_.run(kAllReduce, flat, [&](Works& works) { add_and_spread(flat, own, reduction, works); });
  } else {
    add_all(flat, own, Over::kAll, reduction);
    ranks_.all_gather(kAllReduce, flat, ranks_.copy());
  }
}

// What is added up goes back to all at once: in larger messages, for which no memory is needed, as each costs
// two small ones of gloo's. Where it is received, what was there has been sent: it is part of it.
void SliceSum::add_and_spread(const Tensor& flat, const Tensor& own, Reduction reduction, Works& works) {
  const RanksAmong& copy = ranks_.copy();
  const int tag = ranks_.next_tag();
  const Chunks added(own, SliceChunks::kReceivedBytes / most_received(Over::kAll));
  const std::int64_t together = most_received(Over::kAll);
  const Chunks spread = added.together(together);
  receive_and_add(
      flat, own, Over::kAll, reduction,
      [&](std::int64_t chunk) {
        if ((chunk + 1) % together != 0 && chunk + 1 < added.count()) return;
        const Tensor sum = spread.of(own, chunk / together);
        for (int step = 1; step < copy.count; ++step) {
          const int number = copy.number_behind(step);
          const Tensor to = spread.of(SliceExchange::slice(flat, number, copy.count), chunk / together);
          works.push_back(ranks_.receive(to, copy.at(number), tag));
          works.push_back(ranks_.send(sum, copy.at(number), tag));
        }
      },
      works);
  ranks_.count_sent((copy.count - 1) * static_cast<std::int64_t>(own.nbytes()));
}

// The slice of each of these ranks by one all-to-all, each copy's from all.
void SliceSum::add_all(const Tensor& flat, const Tensor& own, Over over, Reduction reduction) {
  const RanksAmong& among = ranks_of(over);
  const int copies = among.count / ranks_.copy().count;
  Tensor from = copies == 1 ? flat : flat.repeat({copies});
  Tensor received = at::empty_like(from);
  std::vector<std::int64_t> elements;  // none: alike for all ranks
  if (among.count < ranks_.all().count) elements = ranks_.elements_for(among, own.numel());
  ranks_.run(kReduceScatter, flat, [&](Works& works) {
    works.push_back({compat::all_to_all(*ranks_.group(), received, from, elements)});
  });
  std::vector<Tensor> parts;
  for (int number = 0; number < among.count; ++number) {
    parts.push_back(SliceExchange::slice(received, number, among.count));
  }
  ordered_sum(parts, own, reduction == Reduction::kMean ? among.count : 1);
  ranks_.count_sent((among.count - 1) * static_cast<std::int64_t>(own.nbytes()));
}

// That of the bucket before, if it is large enough: a thread's own heap keeps several times what comes and
// goes.
Tensor SliceSum::receive_buffer(std::int64_t elements, const at::TensorOptions& options) {
  if (!received_.defined() || received_.numel() < elements || received_.dtype() != options.dtype()) {
    received_.reset();
    received_ = at::empty({elements}, options);
  }
  return received_;
}

// By messages of a chunk each. Over all, what the ranks before this copy have added up comes from the copy
// before, and goes on to the one behind; all of it comes back from there.
template <class Done>
void SliceSum::receive_and_add(const Tensor& flat, const Tensor& own, Over over, Reduction reduction,
                               const Done& done, Works& works) {
  const RanksAmong& copy = ranks_.copy();
  const RanksAmong copies = ranks_.copies();
  const int tag = ranks_.next_tag();
  const Chunks chunks(own, SliceChunks::kReceivedBytes / most_received(over));
  const bool goes_on = over == Over::kAll;
  const int before = goes_on && copies.place > 0 ? copies.at(copies.place - 1) : -1;
  const int behind = goes_on && copies.place + 1 < copies.count ? copies.at(copies.place + 1) : -1;
  std::vector<int> sources;  // in the order of the sum
  if (before >= 0) sources.push_back(before);
  for (int number = 0; number < copy.count; ++number) sources.push_back(copy.at(number));

  const int own_rank = copy.at(copy.place);
  const auto others = static_cast<std::int64_t>(sources.size()) - 1;
  const Tensor received =
      receive_buffer(std::min(kChunksAhead, chunks.count()) * others * chunks.largest(), flat.options());
  const auto parts_of = [&](std::int64_t chunk) {
    std::vector<Tensor> parts;
    std::int64_t slot = chunk % kChunksAhead * others;
    for (const int source : sources) {
      parts.push_back(source == own_rank
                          ? chunks.of(ranks_.own_slice(flat), chunk)
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
      if (sources[i] != own_rank) of_chunk.push_back(ranks_.receive(parts[i], sources[i], tag));
    }
  };
  const auto send_to = [&](int rank, const Tensor& from) { works.push_back(ranks_.send(from, rank, tag)); };
  for (std::int64_t chunk = 0; chunk < kChunksAhead; ++chunk) receive_all(chunk);
  for (std::int64_t chunk = 0; chunk < chunks.count(); ++chunk) {
    for (int step = 1; step < copy.count; ++step) {  // not all to the first at first
      const int number = copy.number_behind(step);
      send_to(copy.at(number), chunks.of(SliceExchange::slice(flat, number, copy.count), chunk));
    }
  }
  const auto complete = [&](std::int64_t chunk) {
    if (before >= 0) send_to(before, chunks.of(own, chunk));
    done(chunk);
  };
  const int divisor = reduction == Reduction::kMean && behind < 0 ? ranks_of(over).count : 1;
  Works back;
  for (std::int64_t chunk = 0; chunk < chunks.count(); ++chunk) {
    ranks_.wait(coming[chunk % kChunksAhead]);
    const Tensor sum = chunks.of(own, chunk);
    ordered_sum(parts_of(chunk), sum, divisor);
    receive_all(chunk + kChunksAhead);
    if (behind >= 0) {
      send_to(behind, sum);
      back.push_back(ranks_.receive(sum, behind, tag));  // not before all of it is there
    } else {
      complete(chunk);
    }
  }
  for (std::size_t chunk = 0; chunk < back.size(); ++chunk) {
    ranks_.wait({back[chunk]});
    complete(static_cast<std::int64_t>(chunk));
  }
  const int neighbours = (before >= 0 ? 1 : 0) + (behind >= 0 ? 1 : 0);
  ranks_.count_sent((copy.count - 1 + neighbours) * static_cast<std::int64_t>(own.nbytes()));
}

}  // namespace reef
