// Gradients that travel as bfloat16 or float16: against one process that rounds, holds back and adds up as
// all ranks do; and what is held back and what has been applied against what there was.
#include <gtest/gtest.h>
#include <torch/torch.h>

#include <cmath>
#include <limits>
#include <string>
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

/// Of a rank in a step, of any magnitude: every rank can make every rank's.
Tensor gradient(int of, int step, std::int64_t elements, at::ScalarType dtype) {
  torch::manual_seed(static_cast<std::uint64_t>(100 * step + of));
  return torch::randn({elements}, dtype).mul(torch::randn({elements}).mul(3).exp2()).to(dtype);
}

struct Row {
  Compression method;
  at::ScalarType sent;  ///< what it travels as
  bool messages;
  Stage stage;
  int degree;
  Reduction reduction;
  at::ScalarType dtype;
  ShardOptions options() const { return {.stage = stage, .reduction = reduction, .compression = method}; }
  bool divided() const { return stage != Stage::kReplicate; }
  int copies() const { return divided() ? size() / degree : 1; }
  std::string text() const {
    return std::string(name_of(method)) + ", " + (messages ? "" : "without messages, ") +
           text_of(stage, degree) + (reduction == Reduction::kMean ? ", mean of " : ", sum of ") +
           c10::toString(dtype) + " on rank " + std::to_string(rank());
  }
};

std::vector<Row> rows() {
  std::vector<Row> all;
  for (const Compression method : {Compression::kBFloat16, Compression::kFloat16}) {
    const at::ScalarType sent = method == Compression::kBFloat16 ? at::kBFloat16 : at::kHalf;
    for (const bool messages : {true, false}) {
      for (const Stage stage : {Stage::kReplicate, Stage::kOptimizer, Stage::kParameters}) {
        for (const int degree : degrees(stage)) {
          for (const Reduction reduction : {Reduction::kSum, Reduction::kMean}) {
            for (const at::ScalarType dtype : {at::kFloat, at::kDouble, sent, at::kComplexFloat}) {
              const bool known = messages || dtype != at::kComplexFloat;  // to gloo's all-to-all
              if (known) all.push_back({method, sent, messages, stage, degree, reduction, dtype});
            }
          }
        }
      }
    }
  }
  return all;
}

Tensor rounded(const Tensor& values, at::ScalarType to) {
  if (values.is_complex()) return torch::view_as_complex(rounded(torch::view_as_real(values), to));
  return values.to(to).to(values.scalar_type());
}

/// What all ranks do, in one process.
class Oracle {
 public:
  explicit Oracle(const Row& row) : row_(row) {}
  Tensor step(const std::vector<Tensor>& gradients) {
    std::vector<Tensor> addends;  // of ranks, or of copies
    for (int of = 0; of < size(); ++of) {
      const bool begins = row_.copies() == 1 || of % row_.degree == 0;
      if (begins) addends.push_back(gradients[static_cast<std::size_t>(of)].clone());
      if (!begins) addends.back().add_(gradients[static_cast<std::size_t>(of)]);
    }
    residuals_.resize(addends.size());
    Tensor sum;
    for (std::size_t i = 0; i < addends.size(); ++i) {
      const Tensor sent = size() == 1 ? addends[i] : held_back(addends[i], residuals_[i]);
      sum = sum.defined() ? sum.add(sent) : sent.clone();
    }
    if (!row_.divided() && size() > 1) sum = held_back(sum, residual_of_sum_);
    return row_.reduction == Reduction::kMean ? sum.div(size()) : sum;
  }

  std::vector<Tensor> residuals_;
  Tensor residual_of_sum_;

 private:
  Tensor held_back(const Tensor& values, Tensor& residual) const {
    if (residual.defined()) values.add_(residual);
    const Tensor sent = rounded(values, row_.sent);
    residual = values.sub(sent);
    return sent;
  }
  Row row_;
};

// Bit for bit, and bytes exactly. Steps 1 and 3 are abandoned: what comes after them is as if they had not
// been.
TEST(SixteenBitExchange, IsWhatOneProcessRoundsAndHoldsBack) {
  for (const Row& row : rows()) {
    const auto exchange = make_gradient_exchange(row.messages ? group() : group_without_messages(),
                                                 next_number(), row.degree, row.options());
    const SliceExchange& ranks = exchange->ranks();
    const std::int64_t elements = std::int64_t{256} * row.degree * 3;
    const auto bytes_of_16_bits = [&](std::int64_t count) {
      return count * 2 * (c10::isComplexType(row.dtype) ? 2 : 1);
    };
    Oracle oracle(row);
    std::int64_t bytes = 0;
    exchange->begin_step(1);
    for (int step = 0; step < 5; ++step) {
      const bool used = step != 1 && step != 3;
      std::vector<Tensor> gradients;
      for (int of = 0; of < size(); ++of) gradients.push_back(gradient(of, step, elements, row.dtype));
      Oracle next = oracle;
      Tensor expected = next.step(gradients);
      if (used) oracle = next;
      const Tensor flat = gradients[static_cast<std::size_t>(rank())].clone();
      Tensor own = row.divided() ? ranks.own_slice(flat) : flat;
      if (row.stage >= Stage::kGradients) own = torch::full_like(own, std::nan(""));
      exchange->exchange({0, flat, own, {}});
      if (row.divided()) expected = ranks.own_slice(expected);
      EXPECT_TRUE(torch::equal(own, expected)) << row.text() << ", step " << step;
      exchange->end_step(used);
      exchange->begin_step(step + 2);

      const std::int64_t slice = elements / row.degree;
      const auto copies = row.copies();
      if (copies > 1) {
        const auto of_copy = static_cast<std::int64_t>(c10::elementSize(row.dtype)) * slice;
        bytes += (row.degree - 1) * of_copy + (copies - 1) * bytes_of_16_bits(slice);
      } else {
        bytes += (size() - 1) * bytes_of_16_bits(slice) * (row.divided() ? 1 : 2);
      }
      EXPECT_EQ(ranks.sent_bytes(), bytes) << row.text();
    }
    const Tensor residual = exchange->memory().tensor(0, "residual");
    EXPECT_EQ(residual.defined(), size() > 1 && row.dtype != row.sent) << row.text();
    if (!residual.defined()) continue;
    const auto place = static_cast<std::size_t>(row.copies() > 1 ? rank() / row.degree : rank());
    const Tensor all = oracle.residuals_[place];
    EXPECT_TRUE(torch::equal(residual, row.copies() > 1 ? ranks.own_slice(all) : all)) << row.text();
    if (row.divided()) continue;
    EXPECT_TRUE(torch::equal(exchange->memory().tensor(0, "residual_of_sum"),
                             ranks.own_slice(oracle.residual_of_sum_)))
        << row.text();
  }
}

// Of whole numbers with 14 bits nothing is lost: what is applied and what is held back is what there was.
TEST(SixteenBitExchange, WhatIsAppliedAndHeldBackIsWhatThereWas) {
  for (const Row& row : rows()) {
    if (row.dtype != at::kFloat || row.reduction != Reduction::kSum || !row.messages) continue;
    const auto exchange = make_gradient_exchange(group(), next_number(), row.degree, row.options());
    const std::int64_t elements = std::int64_t{256} * row.degree;
    const auto own_of = [&](const Tensor& flat) {
      return row.divided() ? exchange->ranks().own_slice(flat) : flat;
    };
    Tensor had = torch::zeros({elements}), applied = torch::zeros_like(own_of(had));
    for (int step = 0; step < 4; ++step) {
      exchange->begin_step(step + 1);
      std::vector<Tensor> gradients;
      for (int of = 0; of < size(); ++of) {
        torch::manual_seed(static_cast<std::uint64_t>(100 * step + of));
        gradients.push_back(torch::randint(-8000, 8000, {elements}).to(at::kFloat));
        had += gradients.back();
      }
      const Tensor flat = gradients[static_cast<std::size_t>(rank())];
      exchange->exchange({0, flat, own_of(flat), {}});
      applied += own_of(flat);
      exchange->end_step(/*used=*/true);
    }
    Tensor held_back = torch::zeros({elements});
    const Tensor residual = exchange->memory().tensor(0, "residual");
    if (residual.defined()) (row.copies() > 1 ? own_of(held_back) : held_back).add_(residual);
    if (const Tensor of_sum = exchange->memory().tensor(0, "residual_of_sum"); of_sum.defined())
      exchange->ranks().own_slice(held_back).add_(of_sum);
    all_reduce({held_back}, group());
    EXPECT_TRUE(size() == 1 || held_back.abs().sum().item<float>() > 0) << row.text();
    EXPECT_TRUE(torch::equal(applied + own_of(held_back), own_of(had))) << row.text();
  }
}

// What is not finite arrives, and is not held back; neither is what was held back for it.
TEST(SixteenBitExchange, WhatIsNotFiniteIsToldAndNotKept) {
  if (size() == 1) return;
  for (const Row& row : rows()) {
    if (row.dtype != at::kFloat || row.reduction != Reduction::kSum || !row.messages) continue;
    const auto exchange = make_gradient_exchange(group(), next_number(), row.degree, row.options());
    const std::int64_t elements = std::int64_t{256} * row.degree;
    const std::vector<float> wrong = {std::nanf(""), std::numeric_limits<float>::infinity(),
                                      std::numeric_limits<float>::max()};
    for (int step = 0; step < 2; ++step) {
      exchange->begin_step(step + 1);
      Tensor flat = torch::full({elements}, 1 + std::ldexp(1.0F, -9));
      for (std::size_t i = 0; i < wrong.size() && step == 0 && rank() == 0; ++i)
        flat.slice(0, static_cast<std::int64_t>(i), elements, 4).fill_(wrong[i]);
      const Tensor own = row.divided() ? exchange->ranks().own_slice(flat) : flat;
      exchange->exchange({0, flat, own, {}});
      exchange->end_step(/*used=*/true);
      for (std::int64_t i = 0; i < 4; ++i) EXPECT_EQ(std::isfinite(own[i].item<float>()), step > 0 || i == 3);
    }
    EXPECT_TRUE(exchange->memory().tensor(0, "residual").isfinite().all().item<bool>()) << row.text();
  }
}

}  // namespace
}  // namespace reef
