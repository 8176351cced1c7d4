// Ok-Topk: what is applied and held back against one process that sorts all sums, bit for bit; bytes against
// the regions and the evening out of a second implementation, and against the paper's bound.
#include <gtest/gtest.h>
#include <torch/torch.h>

#include <algorithm>
#include <cmath>
#include <string>
#include <tuple>
#include <vector>

#include "exchanges.h"
#include "shard/gradient_exchange.h"

namespace reef {
namespace {

using at::Tensor;
using exchanges::degrees;
using exchanges::group;
using exchanges::group_without_messages;
using exchanges::next_number;
using exchanges::rank;
using exchanges::size;
using exchanges::text_of;

/// Where the large elements are.
enum class Large {
  kAnywhere,
  kInFront,  ///< the further in front, the larger: the same ones of all ranks
  kNowhere,  ///< all magnitudes are alike, and many sums zero
  kApart,    ///< of each rank in another part
};

struct Row {
  Large large;
  bool messages;
  Stage stage;
  int degree;
  double density;

  ShardOptions options() const {
    return {.stage = stage,
            .reduction = Reduction::kSum,
            .compression = Compression::kOkTopK,
            .compression_options = {.density = density}};
  }
  bool divided() const { return stage != Stage::kReplicate; }
  bool has_copies() const { return divided() && degree < size(); }
  /// That exchange what they have taken, and the place of this one.
  int among() const { return has_copies() ? size() / degree : size(); }
  int place() const { return has_copies() ? rank() / degree : rank(); }
  std::string text() const {
    return std::string(messages ? "" : "without messages, ") + "large elements " +
           std::to_string(static_cast<int>(large)) + ", " + text_of(stage, degree) + ", density " +
           std::to_string(density) + " on rank " + std::to_string(rank());
  }
};

std::vector<Row> rows() {
  std::vector<Row> all;
  for (const Large large : {Large::kAnywhere, Large::kInFront, Large::kNowhere, Large::kApart}) {
    for (const bool messages : {true, false}) {
      for (const Stage stage : {Stage::kReplicate, Stage::kOptimizer, Stage::kParameters}) {
        for (const int degree : degrees(stage)) {
          for (const double density : {0.001, 0.05, 0.3, 1.0})
            all.push_back({large, messages, stage, degree, density});
        }
      }
    }
  }
  return all;
}

/// Whole numbers. Every rank can make every rank's.
Tensor gradient(Large large, int of, int step, std::int64_t elements) {
  torch::manual_seed(static_cast<std::uint64_t>(100 * step + of));
  const Tensor any =
      torch::randn({elements}).mul(torch::randn({elements}).mul(2).exp2()).mul(8).round().clamp(-4000, 4000);
  if (large == Large::kInFront)
    return any.sign() * torch::arange(elements, 0, -1).to(at::kFloat) * 8 + any.sign();
  if (large == Large::kNowhere) return torch::randint(0, 2, {elements}).mul(2).sub(1).to(at::kFloat);
  if (large == Large::kApart) {
    const std::int64_t part = elements / size();
    any.narrow(0, of * part, part).mul_(64);
  }
  return any;
}

std::vector<std::int64_t> indices_of(const Tensor& mask) {
  const Tensor all = mask.nonzero().view({-1}).contiguous();
  return {all.const_data_ptr<std::int64_t>(), all.const_data_ptr<std::int64_t>() + all.numel()};
}

struct Entry {
  std::int64_t index;
  float value;
  /// The largest first, of equal magnitudes the lower index.
  bool operator<(const Entry& other) const {
    return std::tuple(-std::abs(value), index) < std::tuple(-std::abs(other.value), other.index);
  }
};

/// One process in the place of all that exchange a slice.
class Oracle {
 public:
  Oracle(int among, std::int64_t elements, std::int64_t k)
      : k_(k), left_(static_cast<std::size_t>(among), torch::zeros({elements})) {}

  Tensor step(const std::vector<Tensor>& gradients) {
    taken_.clear();
    sum_ = torch::zeros_like(left_[0]);
    present_ = sum_ != 0;
    for (std::size_t of = 0; of < left_.size(); ++of) {
      const Tensor all = left_[of] + gradients[of];
      taken_.push_back(all.masked_fill(first(all.abs()).logical_not(), 0));
      left_[of] = all - taken_[of];
      sum_ = sum_ + taken_[of];
      present_ = present_ | (taken_[of] != 0);
    }
    const Tensor chosen = first(sum_.abs().masked_fill(present_.logical_not(), -1)) & present_;
    for (std::size_t of = 0; of < left_.size(); ++of)
      left_[of] = left_[of] + taken_[of].masked_fill(chosen, 0);
    return sum_.masked_fill(chosen.logical_not(), 0);
  }
  const std::vector<Tensor>& left() const { return left_; }

  /// What the rank at this place has sent in the last step; `beside`, of what is no entry of a gradient.
  std::int64_t sent_bytes(int place, std::int64_t& beside) const {
    const auto ranks = static_cast<std::int64_t>(taken_.size());
    const std::int64_t others = ranks - 1;
    std::vector<std::int64_t> sums(static_cast<std::size_t>(others)), proposals = sums;
    for (const Tensor& each : taken_) {
      const std::vector<std::int64_t> entries = indices_of(each != 0);
      for (std::size_t i = 0; i < sums.size() && !entries.empty(); ++i) {
        sums[i] += entries[(i + 1) * entries.size() / taken_.size()];
        ++proposals[i];
      }
    }
    const auto region_of = [&](std::int64_t index) {
      std::size_t region = 0;
      for (std::size_t i = 0; i < sums.size(); ++i)
        region += proposals[i] > 0 && index >= sums[i] / proposals[i] ? 1U : 0U;
      return region;
    };
    std::int64_t bytes = 0;
    const auto own = static_cast<std::size_t>(place);
    for (const std::int64_t index : indices_of(taken_[own] != 0)) bytes += region_of(index) != own ? 8 : 0;

    const std::int64_t stride = (k_ + 4 * ranks - 1) / (4 * ranks), needed = (k_ + stride - 1) / stride;
    std::vector<std::vector<Entry>> regions(taken_.size());
    for (const std::int64_t index : indices_of(present_))
      regions[region_of(index)].push_back({index, sum_.const_data_ptr<float>()[index]});
    std::vector<Entry> told;
    for (std::vector<Entry> region : regions) {
      std::sort(region.begin(), region.end());
      for (std::int64_t at = 1; at <= needed && at * stride <= static_cast<std::int64_t>(region.size()); ++at)
        told.push_back(region[static_cast<std::size_t>(at * stride - 1)]);
    }
    std::sort(told.begin(), told.end());
    const bool all = static_cast<std::int64_t>(told.size()) < needed;
    std::vector<std::int64_t> owner;  // of each sum that is gathered, in order
    for (std::size_t region = 0; region < regions.size(); ++region) {
      for (const Entry& each : regions[region]) {
        if (all || !(told[static_cast<std::size_t>(needed - 1)] < each))
          owner.push_back(static_cast<std::int64_t>(region));
      }
    }
    const auto total = static_cast<std::int64_t>(owner.size());
    EXPECT_LE(total, 5 * k_ / 4 + stride + 1);
    const std::int64_t share = (total + ranks - 1) / ranks;
    for (std::int64_t i = 0; i < total; ++i)
      bytes += owner[static_cast<std::size_t>(i)] == place && i / share != place ? 8 : 0;
    beside = others * (4 * others + 4 + 8 * needed + 4);
    return bytes + 8 * share * others + beside;
  }

 private:
  /// Which are the k first of these in descending order.
  Tensor first(const Tensor& values) const {
    const Tensor order = std::get<1>(values.sort(/*stable=*/true, 0, /*descending=*/true));
    return torch::zeros_like(values).to(at::kBool).index_put_({order.slice(0, 0, k_)}, true);
  }
  std::int64_t k_;
  std::vector<Tensor> left_, taken_;
  Tensor sum_, present_;
};

/// An exchange of this row, and what one process makes of the same gradients.
class Exchanged {
 public:
  Exchanged(const Row& row, int number, const ProcessGroupPtr& over, std::int64_t elements)
      : row_(row),
        exchange_(make_gradient_exchange(over, number, row.degree, row.options())),
        elements_(elements),
        oracle(row.among(), exchanged_elements(), entries()) {
    exchange_->begin_step(++step_);
  }
  std::int64_t exchanged_elements() const { return row_.has_copies() ? elements_ / row_.degree : elements_; }
  std::int64_t entries() const {
    return static_cast<std::int64_t>(std::ceil(row_.density * static_cast<double>(exchanged_elements())));
  }

  void step(int step, bool used) {
    const SliceExchange& ranks = exchange_->ranks();
    std::vector<Tensor> addends;
    Tensor flat;
    const int each = size() / row_.among();
    for (int of = 0; of < size(); ++of) {
      const Tensor all = gradient(row_.large, of, step, elements_);
      if (of == rank()) flat = all.clone();
      const Tensor part = row_.has_copies() ? ranks.own_slice(all) : all;
      if (of % each == 0) addends.push_back(torch::zeros_like(part));
      addends.back() += part;
    }
    Oracle next = oracle;
    Tensor expected = next.step(addends);
    if (row_.divided() && !row_.has_copies()) expected = ranks.own_slice(expected);
    Tensor own = row_.divided() ? ranks.own_slice(flat) : flat;
    if (row_.stage >= Stage::kGradients) own = torch::full_like(own, std::nan(""));
    exchange_->exchange({0, flat, own, {}});
    EXPECT_TRUE(torch::equal(own, expected)) << row_.text() << ", step " << step;
    exchange_->end_step(used);
    exchange_->begin_step(++step_);
    expected_bytes_ += next.sent_bytes(row_.place(), beside);
    if (row_.has_copies()) expected_bytes_ += (row_.degree - 1) * 4 * exchanged_elements();
    EXPECT_EQ(ranks.sent_bytes(), expected_bytes_) << row_.text() << ", step " << step;
    if (used) oracle = next;
    EXPECT_TRUE(!exchange_->memory().tensor(0, "residual").defined() ||
                torch::equal(exchange_->memory().tensor(0, "residual"),
                             oracle.left()[static_cast<std::size_t>(row_.place())]))
        << row_.text() << ", step " << step;
  }
  std::int64_t sent_bytes() const { return exchange_->ranks().sent_bytes(); }

 private:
  Row row_;
  std::unique_ptr<GradientExchange> exchange_;
  std::int64_t elements_;
  std::int64_t expected_bytes_ = 0;
  int step_ = 0;

 public:
  Oracle oracle;
  std::int64_t beside = 0;  ///< bytes of the last step that are no entries
};

// Steps 1 and 3 are abandoned: what comes after them is as if they had not been.
TEST(OkTopKExchange, IsWhatOneProcessDoes) {
  if (size() == 1) return;
  for (const Row& row : rows()) {
    Exchanged exchange(row, next_number(), row.messages ? group() : group_without_messages(),
                       std::int64_t{256} * row.degree);
    for (int step = 0; step < 4; ++step) exchange.step(step, step != 1 && step != 3);
  }
}

// Less than 6 k (P - 1) / P words on each rank, where ranks' entries lie alike, and where they are the same.
TEST(OkTopKExchange, SendsLessThanThePapersBound) {
  if (size() == 1) return;
  for (const Large large : {Large::kAnywhere, Large::kInFront}) {
    const Row row{large, true, Stage::kReplicate, size(), 0.1};
    Exchanged exchange(row, next_number(), group(), std::int64_t{256} * 20 * size());
    std::int64_t before = 0;
    for (int step = 0; step < 3; ++step) {
      exchange.step(step, /*used=*/true);
      const std::int64_t entries = exchange.sent_bytes() - before - exchange.beside;
      before = exchange.sent_bytes();
      EXPECT_LT(entries, 24 * exchange.entries() * (size() - 1) / size()) << row.text();
      EXPECT_LE(exchange.beside, (36 * size() + 4) * (size() - 1)) << row.text();
    }
  }
}

}  // namespace
}  // namespace reef
