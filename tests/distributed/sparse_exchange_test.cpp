// Exchanges of the largest elements, against what one process does with all ranks' gradients: what is
// applied, what is held back and where, and bytes. Whole numbers are added up exactly, so nothing may be lost
// at all.
#include <gtest/gtest.h>
#include <torch/torch.h>

#include <bit>
#include <cmath>
#include <limits>
#include <map>
#include <string>
#include <vector>

#include "exchanges.h"
#include "shard/gradient_exchange.h"
#include "shard/sparse_gradient.h"
#include "shard/sparse_values.h"

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

struct Row {
  Compression method;
  bool messages;
  Stage stage;
  int degree;
  Reduction reduction;
  double density;

  ShardOptions options() const {
    return {.stage = stage,
            .reduction = reduction,
            .compression = method,
            .compression_options = {.density = density}};
  }
  bool divided() const { return stage != Stage::kReplicate; }
  bool has_copies() const { return divided() && degree < size(); }
  /// That exchange what they have taken, and the place of this one.
  int among() const { return has_copies() ? size() / degree : size(); }
  int place() const { return has_copies() ? rank() / degree : rank(); }
  std::string text() const {
    return std::string(name_of(method)) + (messages ? "" : " without messages") + ", " +
           text_of(stage, degree) + ", density " + std::to_string(density) + " on rank " +
           std::to_string(rank());
  }
};

std::vector<Row> rows() {
  std::vector<Row> all;
  for (const Compression method :
       {Compression::kTopK, Compression::kGTopK, Compression::kGTopKTree, Compression::kOkTopK}) {
    for (const bool messages : {true, false}) {
      for (const Stage stage : {Stage::kReplicate, Stage::kOptimizer, Stage::kParameters}) {
        for (const int degree : degrees(stage)) {
          for (const double density : {0.001, 0.02, 1.0})
            all.push_back({method, messages, stage, degree, Reduction::kSum, density});
        }
      }
    }
  }
  return all;
}

/// Whole numbers of all magnitudes, few of them alike.
Tensor gradient(int of, int step, std::int64_t elements) {
  torch::manual_seed(static_cast<std::uint64_t>(100 * step + of));
  return torch::randn({elements})
      .mul(torch::randn({elements}).mul(2).exp2())
      .mul(8)
      .round()
      .clamp(-4000, 4000);
}

/// One process in the place of all that exchange a slice. Dense: by index.
class Oracle {
 public:
  Oracle(Compression method, int among, std::int64_t elements, std::int64_t k)
      : method_(method), k_(k), left_(static_cast<std::size_t>(among), torch::zeros({elements})) {}

  Tensor step(const std::vector<Tensor>& gradients) {
    std::vector<Tensor> taken;
    for (std::size_t i = 0; i < left_.size(); ++i)
      taken.push_back(largest(left_[i] + gradients[i], left_[i]));
    if (method_ == Compression::kTopK) {
      Tensor sum = taken[0].clone();
      for (std::size_t i = 1; i < taken.size(); ++i) sum += taken[i];
      return sum;
    }
    return merged(taken);
  }
  const std::vector<Tensor>& left() const { return left_; }
  /// The partial sums that merges dropped in the last step, of elements in its result: by kGTopK some rank
  /// holds each of them back.
  const Tensor& dropped() const { return dropped_; }
  const Tensor& in_result() const { return in_result_; }

 private:
  /// A sparse vector as a dense one. `present` says which elements it has, since a sum may be zero.
  struct Elements {
    Tensor values, present;
  };

  /// The k largest of `values`; `rest`, what they leave. Magnitudes that are alike: the lower index.
  Tensor largest(const Tensor& values, Tensor& rest) const {
    const Tensor order = std::get<1>(values.abs().sort(/*stable=*/true, 0, /*descending=*/true));
    const Tensor first = order.slice(0, 0, k_);
    Tensor kept = torch::zeros_like(values);
    kept.index_put_({first}, values.index({first}));
    rest = values - kept;
    return kept;
  }

  void merge(Elements& a, const Elements& b) {
    const Tensor sum = a.values + b.values, either = a.present | b.present;
    const Tensor order = sum.abs().masked_fill(either.logical_not(), -1).argsort(true, 0, true);
    a.present = torch::zeros_like(either).index_put_({order.slice(0, 0, k_)}, true) & either;
    a.values = sum.masked_fill(a.present.logical_not(), 0);
    dropped_ += sum - a.values;
  }

  /// Merges as a butterfly's group and the first rank of a tree do. A rank keeps again what it took of
  /// elements that are not in the result.
  Tensor merged(const std::vector<Tensor>& taken) {
    std::vector<Elements> all;
    for (const Tensor& each : taken) all.push_back({each, each != 0});
    dropped_ = torch::zeros_like(taken[0]);
    if (method_ == Compression::kGTopK) {
      const std::size_t within = std::bit_floor(all.size());
      for (std::size_t i = within; i < all.size(); ++i) merge(all[i - within], all[i]);
      all.resize(within);
    }
    for (std::size_t distance = 1; distance < all.size(); distance *= 2) {
      for (std::size_t i = 0; i + distance < all.size(); i += 2 * distance) merge(all[i], all[i + distance]);
    }
    in_result_ = all[0].present;
    dropped_.masked_fill_(in_result_.logical_not(), 0);
    for (std::size_t i = 0; i < taken.size(); ++i) left_[i] = left_[i] + taken[i].masked_fill(in_result_, 0);
    return all[0].values;
  }

  Compression method_;
  std::int64_t k_;
  std::vector<Tensor> left_;
  Tensor dropped_, in_result_;
};

std::int64_t messages_sent(const Row& row) {
  const int among = row.among(), place = row.place();
  const auto within = static_cast<int>(std::bit_floor(static_cast<unsigned>(among)));
  switch (row.method) {
    case Compression::kTopK:
      return among - 1;
    case Compression::kGTopK:
      if (place >= within) return 1;
      return std::countr_zero(static_cast<unsigned>(within)) + (place + within < among ? 1 : 0);
    default:
      break;
  }
  std::int64_t sent = 0;
  for (int distance = 1; distance < among; distance *= 2) {
    if (place % (2 * distance) == distance) ++sent;                       // up
    if (place % (2 * distance) == 0 && place + distance < among) ++sent;  // and down
  }
  return sent;
}

Tensor summed_over_ranks(const Tensor& own) {
  Tensor sum = own.clone();
  all_reduce({sum}, group());
  return sum;
}

// Steps 1 and 3 are abandoned: what comes after them is as if they had not been. TopK's and the tree's
// residuals are each rank's own. By gTop-k any rank may hold back what merges have dropped of an element in
// the result, so the oracle knows the residuals of the first step only.
TEST(SparseExchange, IsWhatOneProcessDoes) {
  for (const Row& row : rows()) {
    if (row.method == Compression::kOkTopK) continue;  // ok_top_k_exchange_test.cpp
    const auto exchange = make_gradient_exchange(row.messages ? group() : group_without_messages(),
                                                 next_number(), row.degree, row.options());
    const SliceExchange& ranks = exchange->ranks();
    const std::int64_t elements = std::int64_t{256} * row.degree * 3;
    const std::int64_t exchanged = row.has_copies() ? elements / row.degree : elements;
    const auto k = static_cast<std::int64_t>(std::ceil(row.density * static_cast<double>(exchanged)));
    const auto exchanged_of = [&](const Tensor& flat) {
      return row.has_copies() ? ranks.own_slice(flat) : flat;
    };
    const auto own_of = [&](const Tensor& flat) { return row.divided() ? ranks.own_slice(flat) : flat; };
    Oracle oracle(row.method, row.among(), exchanged, k);
    Tensor had = torch::zeros({exchanged}),
           applied = torch::zeros({own_of(torch::empty({elements})).numel()});
    exchange->begin_step(1);
    std::int64_t bytes = 0;
    const int steps = row.method == Compression::kGTopK ? 1 : 5;
    for (int step = 0; step < steps; ++step) {
      const bool used = step != 1 && step != 3;
      std::vector<Tensor> of_ranks, of_copies;
      for (int of = 0; of < size(); ++of) of_ranks.push_back(gradient(of, step, elements));
      for (int of = 0; of < row.among(); ++of) {
        Tensor sum = torch::zeros({exchanged});
        const int each = size() / row.among();
        for (int i = 0; i < each; ++i) sum += exchanged_of(of_ranks[static_cast<std::size_t>(of * each + i)]);
        of_copies.push_back(sum);
      }
      Oracle next = oracle;
      Tensor expected = size() == 1 ? of_copies[0] : next.step(of_copies);
      if (used) oracle = next;
      if (row.divided() && !row.has_copies()) expected = ranks.own_slice(expected);
      const Tensor flat = of_ranks[static_cast<std::size_t>(rank())].clone();
      Tensor own = own_of(flat);
      if (row.stage >= Stage::kGradients) own = torch::full_like(own, std::nan(""));
      exchange->exchange({0, flat, own, {}});
      EXPECT_TRUE(torch::equal(own, expected)) << row.text() << ", step " << step;
      exchange->end_step(used);
      exchange->begin_step(step + 2);
      if (row.has_copies()) bytes += (row.degree - 1) * 4 * exchanged;
      if (row.messages && size() > 1) bytes += 8 * k * messages_sent(row);
      if (row.messages) {
        EXPECT_EQ(ranks.sent_bytes(), bytes) << row.text();
      }
    }
    const Tensor residual = exchange->memory().tensor(0, "residual");
    EXPECT_EQ(residual.defined(), size() > 1) << row.text();
    if (!residual.defined()) continue;
    const Tensor& left = oracle.left()[static_cast<std::size_t>(row.place())];
    if (row.method != Compression::kGTopK) {
      EXPECT_TRUE(torch::equal(residual, left)) << row.text();
    } else if (!row.has_copies()) {
      const Tensor of_merges = residual - left;
      EXPECT_EQ(of_merges.masked_fill(oracle.in_result(), 0).count_nonzero().item<int>(), 0) << row.text();
      EXPECT_TRUE(torch::equal(summed_over_ranks(of_merges), oracle.dropped())) << row.text();
    }
  }
}

// What is applied and what is held back is what there was, bit for bit, in every step; the ranks apply the
// same. The published rule fails this wherever merges are made of merges.
TEST(SparseExchange, NothingIsLostButByThePublishedRule) {
  for (const Row& row : rows()) {
    if (row.density > 0.5 || size() == 1) continue;
    const auto exchange = make_gradient_exchange(group(), next_number(), row.degree, row.options());
    const SliceExchange& ranks = exchange->ranks();
    const std::int64_t elements = std::int64_t{256} * row.degree * 8;
    Tensor had = torch::zeros({elements}), applied = torch::zeros({elements});
    bool lost = false;
    for (int step = 0; step < 6; ++step) {
      exchange->begin_step(step + 1);
      for (int of = 0; of < size(); ++of) had += gradient(of, step, elements);
      const Tensor flat = gradient(rank(), step, elements);
      const Tensor own = row.divided() ? ranks.own_slice(flat) : flat;
      exchange->exchange({0, flat, own, {}});
      exchange->end_step(/*used=*/true);
      Tensor of_first = own.clone();
      if (!row.divided()) {
        broadcast({of_first}, group());
        EXPECT_TRUE(torch::equal(of_first, own)) << row.text();
      }
      (row.divided() ? ranks.own_slice(applied) : applied) += own;
      Tensor held_back = torch::zeros({elements});
      const Tensor residual = exchange->memory().tensor(0, "residual");
      (row.has_copies() ? ranks.own_slice(held_back) : held_back).copy_(residual);
      held_back = summed_over_ranks(held_back);
      const auto own_part = [&](const Tensor& all) { return row.divided() ? ranks.own_slice(all) : all; };
      const Tensor missing = own_part(had) - own_part(applied) - own_part(held_back);
      lost = lost || missing.abs().sum().item<float>() != 0;
    }
    const Tensor on_any = torch::tensor(lost ? 1 : 0);
    all_reduce({on_any}, group());
    const bool may_lose = row.method == Compression::kGTopKTree && row.among() >= 3;
    const bool has_lost = on_any.item<std::int64_t>() > 0;
    if (!may_lose) {
      EXPECT_FALSE(has_lost) << row.text();
    } else if (row.among() >= 4 && row.density > 0.01) {
      EXPECT_TRUE(has_lost) << row.text();
    }
  }
}

// What is done on a device, on the CPU: the same bits as by loops, whatever the numbers, those that are not
// normal among them.
TEST(SparseValues, OperatorsDoWhatLoopsDo) {
  torch::manual_seed(11);
  for (const std::int64_t elements : {1, 5, 300}) {
    for (const double density : {0.0, 0.1, 0.7, 1.0}) {
      const Tensor chosen = torch::rand({elements}).lt(density).nonzero().view({-1});
      SparseGradient entries;
      for (std::int64_t i = 0; i < chosen.numel(); ++i) {
        const float value = torch::randn({}).item<float>() * (i % 3 == 0 ? 1e-39F : 1.0F);
        entries.push_back({static_cast<std::uint32_t>(chosen[i].item<std::int64_t>()), value});
      }
      const Tensor before = torch::randn({elements});
      before.slice(0, 0, elements, 3).mul_(1e-39);
      const auto expect_same = [&](const auto& change) {
        const Tensor expected = before.clone(), found = before.clone();
        change(expected, false);
        change(found, true);
        const Tensor bits_differ = found.view(at::kInt).ne(expected.view(at::kInt));
        EXPECT_FALSE(bits_differ.any().item<bool>()) << elements << " elements, density " << density;
        if (entries.size() > 10) {
          EXPECT_FALSE(torch::equal(expected, before));
        }
      };
      namespace by_loops = sparse_values;
      namespace by_operators = sparse_values::by_operators;
      expect_same(
          [&](const Tensor& values, bool by) { (by ? by_operators::add : by_loops::add)(values, entries); });
      expect_same([&](const Tensor& values, bool by) {
        (by ? by_operators::clear : by_loops::clear)(values, entries);
      });
      for (const std::int64_t begin : {std::int64_t{0}, elements / 2, elements}) {
        expect_same([&](const Tensor& values, bool by) {
          (by ? by_operators::become : by_loops::become)(values, entries, begin, 3);
        });
      }
    }
  }
}

// A step that is not finite says so on all ranks, and leaves nothing behind.
TEST(SparseExchange, WhatIsNotFiniteIsToldAndNotKept) {
  if (size() == 1) return;
  for (const Row& row : rows()) {
    if (row.has_copies() || !row.messages || row.density > 0.5) continue;
    const auto exchange = make_gradient_exchange(group(), next_number(), row.degree, row.options());
    const std::int64_t elements = std::int64_t{256} * row.degree;
    for (int step = 0; step < 2; ++step) {
      exchange->begin_step(step + 1);
      const Tensor flat = gradient(rank(), step, elements);
      if (step == 0 && rank() == size() - 1) {
        flat[3] = std::nanf("");
        flat[elements - 2] = std::numeric_limits<float>::infinity();
        flat.slice(0, 10, 200).fill_(-std::numeric_limits<float>::infinity());
      }
      const Tensor own = row.divided() ? exchange->ranks().own_slice(flat) : flat;
      exchange->exchange({0, flat, own, {}});
      exchange->end_step(/*used=*/true);
      const Tensor wrong = torch::tensor(own.isfinite().all().item<bool>() ? 0 : 1);
      all_reduce({wrong}, group());
      EXPECT_EQ(wrong.item<std::int64_t>() > 0, step == 0) << row.text();
      EXPECT_TRUE(exchange->memory().tensor(0, "residual").isfinite().all().item<bool>()) << row.text();
    }
  }
}

// A density that changes with the steps does so by steps that ranks have used.
TEST(SparseExchange, DensityFollowsItsSchedule) {
  if (size() == 1) return;
  ShardOptions options{.reduction = Reduction::kSum, .compression = Compression::kTopK};
  options.compression_options.density = {{0, 0.5}, {1, 0.1}, {3, 0.01}};
  const auto exchange = make_gradient_exchange(group(), next_number(), size(), options);
  const std::int64_t elements = 1000 * size();
  std::int64_t before = 0;
  exchange->begin_step(1);
  const double expected[] = {0.5, 0.5, 0.1, 0.1, 0.01, 0.01};
  for (int call = 0; call < 6; ++call) {
    const Tensor flat = gradient(rank(), call, elements);
    exchange->exchange({0, flat, flat, {}});
    exchange->end_step(/*used=*/call != 0);
    exchange->begin_step(call + 2);
    const auto k = static_cast<std::int64_t>(std::ceil(expected[call] * static_cast<double>(elements)));
    EXPECT_EQ(exchange->ranks().sent_bytes() - before, 8 * k * (size() - 1)) << call;
    before = exchange->ranks().sent_bytes();
  }
}

// What cannot be compressed is added up as it is, and what was held back for it is not forgotten.
TEST(SparseExchange, OtherDtypesAreAddedUpAsTheyAre) {
  for (const Row& row : rows()) {
    if (row.density > 0.01) continue;
    const auto exchange = make_gradient_exchange(group(), next_number(), row.degree, row.options());
    exchange->begin_step(1);
    const std::int64_t elements = std::int64_t{256} * row.degree;
    Tensor expected = torch::zeros({elements}, at::kDouble);
    for (int of = 0; of < size(); ++of) expected += gradient(of, 0, elements);
    const Tensor flat = gradient(rank(), 0, elements).to(at::kDouble);
    const Tensor own = row.divided() ? exchange->ranks().own_slice(flat) : flat;
    exchange->exchange({0, flat, own, {}});
    EXPECT_TRUE(torch::equal(own, row.divided() ? exchange->ranks().own_slice(expected) : expected))
        << row.text();
  }
}

}  // namespace
}  // namespace reef
