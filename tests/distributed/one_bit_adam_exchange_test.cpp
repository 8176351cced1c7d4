// The exchange of 1-bit Adam: against one process that does what all ranks do; bytes; and what is held back
// and what has come against what there was.
#include <gtest/gtest.h>
#include <torch/torch.h>

#include <cmath>
#include <limits>
#include <string>
#include <vector>

#include "exchanges.h"
#include "kernels/packed_levels.h"
#include "one_bit_adam_alone.h"
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

constexpr double kBeta1 = 0.8;
constexpr int kWarmUp = 2;

struct Row {
  bool messages;
  Stage stage;
  int degree;

  ShardOptions options() const {
    ShardOptions all{.stage = stage, .compression = Compression::kOneBitAdam};
    all.compression_options = {.warmup_steps = kWarmUp, .beta1 = kBeta1};
    return all;
  }
  bool divided() const { return stage != Stage::kReplicate; }
  int copies() const { return divided() ? size() / degree : 1; }
  std::string text() const {
    return std::string(messages ? "" : "without messages, ") + text_of(stage, degree) + " on rank " +
           std::to_string(rank());
  }
};

std::vector<Row> rows() {
  std::vector<Row> all;
  for (const bool messages : {true, false}) {
    for (const Stage stage : {Stage::kReplicate, Stage::kOptimizer, Stage::kParameters}) {
      for (const int degree : degrees(stage)) {
        all.push_back({messages, stage, degree});
      }
    }
  }
  return all;
}

/// Of a rank in a step, of any magnitude: every rank can make every rank's.
Tensor gradient(int of, int step, std::int64_t elements) {
  torch::manual_seed(static_cast<std::uint64_t>(100 * step + of));
  return torch::randn({elements}).mul(torch::randn({elements}).mul(2).exp2());
}

// Bit for bit, and bytes exactly. In the warm-up both are those without compression. Steps 1, 3 and 5 are
// abandoned, the second of them the first after the warm-up: what comes after is as if they had not been.
TEST(OneBitAdamExchange, IsWhatOneProcessDoes) {
  for (const Row& row : rows()) {
    const ProcessGroupPtr& of = row.messages ? group() : group_without_messages();
    const auto exchange = make_gradient_exchange(of, next_number(), row.degree, row.options());
    const auto exact = make_gradient_exchange(of, next_number(), row.degree, {.stage = row.stage});
    const SliceExchange& ranks = exchange->ranks();
    const std::int64_t slice = 256 * 3, elements = slice * row.degree;
    OneBitAdamAlone oracle{size(), row.degree, row.divided(), kWarmUp, kBeta1};
    int used_steps = 0;
    for (int step = 0; step < 8; ++step) {
      const bool used = step % 2 == 0 || step == 7;
      std::vector<Tensor> gradients;
      for (int each = 0; each < size(); ++each) gradients.push_back(gradient(each, step, elements));
      OneBitAdamAlone next = oracle;
      Tensor expected = next.step(gradients, used_steps);
      const Tensor flat = gradients[static_cast<std::size_t>(rank())].clone(), plain = flat.clone();
      Tensor own = row.divided() ? ranks.own_slice(flat) : flat;
      if (row.stage >= Stage::kGradients) own = torch::full_like(own, std::nan(""));
      const std::int64_t sent_before = ranks.sent_bytes(), exact_before = exact->ranks().sent_bytes();
      exchange->begin_step(step + 1);
      EXPECT_EQ(exchange->gives_momentum(), used_steps >= kWarmUp) << row.text();
      const std::vector<GradientBucket::Place> one_parameter = {{0, {elements}, {1}}};
      exchange->exchange({0, flat, own, one_parameter});
      if (row.divided()) expected = ranks.own_slice(expected);
      EXPECT_TRUE(torch::equal(own, expected)) << row.text() << ", step " << step;

      std::int64_t bytes = 0;
      if (used_steps < kWarmUp) {
        const Tensor own_plain = row.divided() ? exact->ranks().own_slice(plain) : plain;
        exact->exchange({0, plain, own_plain, one_parameter});
        EXPECT_TRUE(torch::equal(own, own_plain)) << row.text() << ", step " << step;
        bytes = exact->ranks().sent_bytes() - exact_before;
      } else if (row.copies() > 1) {
        bytes = (row.degree - 1) * 4 * slice + (row.copies() - 1) * kernels::packed_bytes(slice, 1);
      } else {
        const bool begins = used_steps == kWarmUp;  // and has been tried before, perhaps
        bytes = (size() - 1) * (2 * kernels::packed_bytes(slice, 1) + (begins ? 4 * slice : 0));
        if (size() == 1) bytes = 0;
      }
      EXPECT_EQ(ranks.sent_bytes() - sent_before, bytes) << row.text() << ", step " << step;
      exchange->end_step(used);
      if (used) oracle = next;
      used_steps += used ? 1 : 0;
    }
    if (size() == 1) continue;
    const auto of_rank = [&](const Tensor& whole) {
      return row.copies() > 1 ? ranks.own_slice(whole) : whole;
    };
    const auto place = static_cast<std::size_t>(row.copies() > 1 ? rank() / row.degree : rank());
    ExchangeMemory& memory = exchange->memory();
    EXPECT_TRUE(torch::equal(memory.tensor(0, "momentum"), of_rank(oracle.momentum))) << row.text();
    EXPECT_TRUE(torch::equal(memory.tensor(0, "residual"), of_rank(oracle.residuals[place]))) << row.text();
    EXPECT_FALSE(memory.tensor(0, "momentum_of_slice").defined()) << row.text();
    EXPECT_EQ(memory.number("steps"), used_steps);
    if (row.copies() > 1) continue;
    EXPECT_TRUE(torch::equal(memory.tensor(0, "residual_of_sum"), ranks.own_slice(oracle.residual_of_sum)))
        << row.text();
  }
}

/// The sum over ranks of what an exchange holds back by this name, of which a rank has all of the bucket or
/// its slice.
Tensor held_back(GradientExchange& exchange, const char* name, std::int64_t elements) {
  Tensor all = torch::zeros({elements});
  if (const Tensor own = exchange.memory().tensor(0, name); own.defined())
    (own.numel() == elements ? all : exchange.ranks().own_slice(all)).add_(own);
  all_reduce({all}, group());
  return all;
}

// Nothing is lost on the way to the owners or back: in each step P times what arrives, plus what ranks and
// owners hold back afterwards, is all ranks' momentum plus what they held back before. What lies between
// parameters stays zero.
TEST(OneBitAdamExchange, HoldsBackWhatSignsLoseOnBothWays) {
  if (size() == 1) return;
  for (const Row& row : rows()) {
    if (!row.messages) continue;
    const auto exchange = make_gradient_exchange(group(), next_number(), row.degree, row.options());
    const std::int64_t elements = std::int64_t{256} * row.degree * 5;
    const std::vector<GradientBucket::Place> places = {{0, {100}, {1}}, {256, {elements - 300}, {1}}};
    Tensor parameters = torch::zeros({elements});
    for (const auto& place : places) place.of(parameters).fill_(1);
    const auto own_of = [&](const Tensor& flat) {
      return row.divided() ? exchange->ranks().own_slice(flat) : flat;
    };
    Tensor momentum = torch::zeros({elements});
    for (int step = 0; step < kWarmUp + 5; ++step) {
      exchange->begin_step(step + 1);
      const Tensor before =
          held_back(*exchange, "residual", elements) + held_back(*exchange, "residual_of_sum", elements);
      Tensor all = torch::zeros({elements});
      for (int of = 0; of < size(); ++of) all += gradient(of, step, elements) * parameters;
      all = all * (1 - kBeta1) + momentum * (kBeta1 * size());
      const Tensor flat = gradient(rank(), step, elements) * parameters, own = own_of(flat);
      exchange->exchange({0, flat, own, places});
      exchange->end_step(/*used=*/true);
      if (step < kWarmUp) {
        momentum = all / size();
        continue;
      }
      EXPECT_EQ(own.masked_select(own_of(parameters) == 0).abs().sum().item<float>(), 0) << row.text();
      const Tensor after =
          held_back(*exchange, "residual", elements) + held_back(*exchange, "residual_of_sum", elements);
      EXPECT_EQ(after.masked_select(parameters == 0).abs().sum().item<float>(), 0) << row.text();
      const Tensor wrong = own * size() + own_of(after) - own_of(all) - own_of(before);
      EXPECT_LE(wrong.abs().max().item<float>(), 2e-6 * all.abs().max().item<float>()) << row.text();
      EXPECT_GT(after.abs().max().item<float>(), 0) << row.text();
      Tensor arrived = torch::zeros({elements});
      if (exchange->ranks().copies().place == 0 || !row.divided()) own_of(arrived).copy_(own);
      all_reduce({arrived}, group());
      momentum = row.divided() ? arrived : arrived / size();
    }
  }
}

// A step that is not finite says so on all ranks that have the element, in both phases; neither momentum nor
// what is held back has anything of it, and the next step is finite.
TEST(OneBitAdamExchange, WhatIsNotFiniteIsToldAndNotKept) {
  for (const Row& row : rows()) {
    if (!row.messages) continue;
    const auto exchange = make_gradient_exchange(group(), next_number(), row.degree, row.options());
    const std::int64_t elements = std::int64_t{1024} * row.degree;
    const std::vector<GradientBucket::Place> places = {{0, {elements}, {1}}};
    for (int step = 0; step < 8; ++step) {
      const bool is_wrong = step % 2 == 0;
      exchange->begin_step(step + 1);
      const Tensor flat = gradient(rank(), step, elements);
      if (is_wrong && rank() == size() - 1)
        flat[3] = step % 4 == 0 ? std::nanf("") : std::numeric_limits<float>::infinity();
      const Tensor own = row.divided() ? exchange->ranks().own_slice(flat) : flat;
      exchange->exchange({0, flat, own, places});
      exchange->end_step(/*used=*/true);
      const bool has_it = !row.divided() || exchange->ranks().copy().place == 0;
      EXPECT_EQ(own[3].isfinite().item<bool>(), !(is_wrong && has_it)) << row.text() << ", step " << step;
      if (!is_wrong) {
        EXPECT_TRUE(own.isfinite().all().item<bool>()) << row.text() << ", step " << step;
      }
      for (const RememberedTensor& what : exchange->memory().tensors()) {
        const Tensor kept = exchange->memory().tensor(0, what.name);
        EXPECT_TRUE(!kept.defined() || kept.isfinite().all().item<bool>()) << row.text() << ", " << what.name;
      }
    }
  }
}

}  // namespace
}  // namespace reef
