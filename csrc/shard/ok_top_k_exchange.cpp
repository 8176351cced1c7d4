#include "shard/ok_top_k_exchange.h"

#include <ATen/ops/empty.h>
#include <ATen/ops/empty_like.h>

#include <algorithm>
#include <limits>

namespace reef {
namespace {

using at::Tensor;

// How many of its sums a rank tells at most, for each rank: every s-th largest. Each stands for s sums that
// are as large or larger, so ranks miss less than s sums of each other, k / 4 altogether.
constexpr std::size_t kToldForEachRank = 4;
constexpr std::uint32_t kNoBoundary = std::numeric_limits<std::uint32_t>::max();

// Proposes boundaries between which this rank has equally many entries, or none if it has no entries.
std::vector<std::uint32_t> proposed_boundaries(const SparseGradient& own, std::size_t ranks) {
  std::vector<std::uint32_t> proposed;
  for (std::size_t number = 1; number < ranks; ++number)
    proposed.push_back(own.empty() ? kNoBoundary : own[number * own.size() / ranks].index);
  return proposed;
}

// Averages the boundaries that all ranks have proposed, which are given one rank after another.
std::vector<std::uint32_t> agreed_boundaries(const std::vector<std::uint32_t>& proposed, std::size_t ranks) {
  std::vector<std::uint32_t> agreed;
  for (std::size_t number = 0; number + 1 < ranks; ++number) {
    std::uint64_t sum = 0, proposals = 0;
    for (std::size_t of = number; of < proposed.size(); of += ranks - 1) {
      if (proposed[of] == kNoBoundary) continue;
      sum += proposed[of];
      ++proposals;
    }
    agreed.push_back(proposals == 0 ? kNoBoundary : static_cast<std::uint32_t>(sum / proposals));
  }
  return agreed;
}

std::vector<SparseGradient> regions_of(const SparseGradient& own,
                                       const std::vector<std::uint32_t>& boundaries) {
  std::vector<SparseGradient> regions;
  auto first = own.begin();
  for (const std::uint32_t boundary : boundaries) {
    const auto last =
        std::find_if(first, own.end(), [&](const auto& each) { return each.index >= boundary; });
    regions.emplace_back(first, last);
    first = last;
  }
  regions.emplace_back(first, own.end());
  return regions;
}

// A range of places in the list of all ranks' entries, one rank after another.
struct Range {
  std::size_t first, last;
  Range common(const Range& other) const {
    const std::size_t begin = std::max(first, other.first);
    return {begin, std::max(begin, std::min(last, other.last))};
  }
  std::size_t size() const { return last - first; }
};

SparseGradient joined(const std::vector<SparseGradient>& parts) {
  SparseGradient all;
  for (const SparseGradient& part : parts) all.insert(all.end(), part.begin(), part.end());
  return all;
}

}  // namespace

SparseGradient OkTopKExchange::sum(const SparseGradient& own, std::size_t k, const RanksAmong& among,
                                   const Residual& residual) {
  const SparseGradient may_be = gathered_evenly(candidates(sums_of_region(own, among), k, among), among);
  SparseGradient all = merge_largest(may_be, {}, k).kept;
  residual.add(without(own, all));
  return all;
}

SparseGradient OkTopKExchange::sums_of_region(const SparseGradient& own, const RanksAmong& among) {
  const auto count = static_cast<std::size_t>(among.count);
  const std::vector<std::uint32_t> proposed =
      told("the exchange of regions' boundaries", proposed_boundaries(own, count), among);
  const std::vector<SparseGradient> regions = regions_of(own, agreed_boundaries(proposed, count));
  const Tensor sent = at::empty({among.count}, at::TensorOptions().dtype(at::kInt));
  const Tensor received = at::empty_like(sent);
  for (int number = 0; number < among.count; ++number) {
    sent.mutable_data_ptr<std::int32_t>()[number] =
        static_cast<std::int32_t>(regions[static_cast<std::size_t>(number)].size());
  }
  ranks().all_to_all("the exchange of regions' sizes", sent, received, among);
  const auto* const sizes = received.const_data_ptr<std::int32_t>();
  return sum_of(exchange_parts("the exchange of regions", regions,
                               std::vector<std::size_t>(sizes, sizes + among.count), among));
}

SparseGradient OkTopKExchange::candidates(SparseGradient sums, std::size_t k, const RanksAmong& among) {
  const std::size_t most = kToldForEachRank * static_cast<std::size_t>(among.count);
  const std::size_t stride = (k + most - 1) / most;
  const std::size_t needed = (k + stride - 1) / stride;  // of which each stands for so many
  SparseGradient sorted = sums, own;
  std::sort(sorted.begin(), sorted.end(), kernels::is_larger);
  for (std::size_t at = stride; at <= sorted.size() && own.size() < needed; at += stride)
    own.push_back(sorted[at - 1]);
  SparseGradient of_all = joined(gather("the exchange of some of the sums", own, needed, among));
  if (of_all.size() < needed) return sums;  // there are hardly more than k
  const auto least = of_all.begin() + static_cast<std::ptrdiff_t>(needed - 1);
  std::nth_element(of_all.begin(), least, of_all.end(), kernels::is_larger);
  std::erase_if(sums, [&](const auto& each) { return kernels::is_larger(*least, each); });
  return sums;
}

SparseGradient OkTopKExchange::gathered_evenly(const SparseGradient& own, const RanksAmong& among) {
  const std::vector<std::uint32_t> counts =
      told("the exchange of sums' numbers", {static_cast<std::uint32_t>(own.size())}, among);
  std::vector<Range> had;
  std::size_t total = 0;
  for (const std::uint32_t count : counts) {
    had.push_back({total, total + count});
    total += count;
  }
  const std::size_t share = (total + counts.size() - 1) / counts.size();
  const auto place = static_cast<std::size_t>(among.place);
  const auto block = [&](std::size_t number) {
    return Range{std::min(number * share, total), std::min((number + 1) * share, total)};
  };
  std::vector<SparseGradient> parts;
  std::vector<std::size_t> sizes;
  for (std::size_t number = 0; number < counts.size(); ++number) {
    const Range part = had[place].common(block(number));
    const auto first =
        own.begin() + static_cast<std::ptrdiff_t>(part.size() == 0 ? 0 : part.first - had[place].first);
    parts.emplace_back(first, first + static_cast<std::ptrdiff_t>(part.size()));
    sizes.push_back(had[number].common(block(place)).size());
  }
  const SparseGradient even = joined(exchange_parts("the exchange that evens out sums", parts, sizes, among));
  return joined(gather("the exchange of the largest sums", even, share, among));
}

std::vector<std::uint32_t> OkTopKExchange::told(const char* name, const std::vector<std::uint32_t>& own,
                                                const RanksAmong& among) {
  const auto each = static_cast<std::int64_t>(own.size());
  const Tensor all = at::empty({among.count * each}, at::TensorOptions().dtype(at::kInt));
  auto* const numbers = static_cast<std::uint32_t*>(all.mutable_data_ptr());
  std::copy(own.begin(), own.end(), numbers + among.place * each);
  ranks().all_gather(name, all, among);
  return {numbers, numbers + all.numel()};
}

}  // namespace reef
