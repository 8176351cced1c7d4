// Deep Gradient Compression: against one process that keeps all ranks' momenta and residuals, bit for bit;
// bytes; and what is applied, held back and masked against all gradients there were.
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

struct Row {
  bool messages;
  Stage stage;
  int degree;
  Reduction reduction;
  CompressionOptions given;

  ShardOptions options() const {
    return {.stage = stage,
            .reduction = reduction,
            .compression = Compression::kDgc,
            .compression_options = given};
  }
  bool divided() const { return stage != Stage::kReplicate; }
  bool has_copies() const { return divided() && degree < size(); }
  /// That exchange what they have taken, and the place of this one; into how many slices they divide.
  int among() const { return has_copies() ? size() / degree : size(); }
  int place() const { return has_copies() ? rank() / degree : rank(); }
  int slices() const { return has_copies() ? degree : 1; }
  std::string text() const {
    return compression_text(Compression::kDgc, given) + (messages ? "" : " without messages") + ", " +
           text_of(stage, degree) + (reduction == Reduction::kMean ? ", mean" : ", sum") + " on rank " +
           std::to_string(rank());
  }
};

std::vector<Row> rows(const std::vector<CompressionOptions>& given) {
  std::vector<Row> all;
  for (const bool messages : {true, false}) {
    for (const Stage stage : {Stage::kReplicate, Stage::kOptimizer, Stage::kParameters}) {
      for (const int degree : degrees(stage)) {
        for (const Reduction reduction : {Reduction::kSum, Reduction::kMean}) {
          for (const CompressionOptions& each : given)
            all.push_back({messages, stage, degree, reduction, each});
        }
      }
    }
  }
  return all;
}

/// Whole numbers of all magnitudes, few of them alike. Every rank can make every rank's.
Tensor gradient(int of, int step, std::int64_t elements, double most = 4000) {
  torch::manual_seed(static_cast<std::uint64_t>(100 * step + of));
  return torch::randn({elements})
      .mul(torch::randn({elements}).mul(2).exp2())
      .mul(8)
      .round()
      .clamp(-most, most);
}

/// Of all that exchange, by place: what each has added up within a copy.
std::vector<Tensor> addends(const Row& row, int step, std::int64_t elements, double most = 4000) {
  std::vector<Tensor> all;
  const int each = size() / row.among();
  for (int of = 0; of < size(); ++of) {
    if (of % each == 0) all.push_back(torch::zeros({elements}));
    all.back() += gradient(of, step, elements, most);
  }
  return all;
}

/// Computes in one process what all ranks should have, with dense vectors over whole buckets.
class Oracle {
 public:
  Oracle(const Row& row, std::int64_t elements) : row_(row) {
    for (int of = 0; of < row.among(); ++of) {
      momenta.push_back(torch::zeros({elements}));
      residuals.push_back(torch::zeros({elements}));
    }
  }

  /// Of a step that is number `used` of those that ranks have used.
  Tensor step(const std::vector<Tensor>& gradients, int used) {
    const auto momentum = static_cast<float>(row_.given.momentum.at(used, 0.9));
    Tensor sum;
    for (std::size_t of = 0; of < gradients.size(); ++of) {
      const Tensor clipped = gradients[of] * clipping(gradients[of], used);
      momenta[of] = momenta[of] * momentum + clipped;
      residuals[of] = residuals[of] + momenta[of];
      const Tensor is_sent = size() == 1 ? torch::ones_like(clipped).to(at::kBool) : largest(of, used);
      const Tensor sent = torch::where(is_sent, residuals[of], torch::zeros_like(clipped));
      residuals[of] = torch::where(is_sent, torch::zeros_like(clipped), residuals[of]);
      if (size() > 1) momenta[of] = torch::where(is_sent, torch::zeros_like(clipped), momenta[of]);
      sum = of == 0 ? sent : sum + sent;
    }
    return row_.reduction == Reduction::kMean ? sum / torch::full_like(sum, size()) : sum;
  }
  std::vector<Tensor> momenta, residuals;

 private:
  float clipping(const Tensor& gradient, int used) const {
    const double most = row_.given.max_norm.at(used, std::numeric_limits<double>::infinity());
    const double of_addend = row_.reduction == Reduction::kMean ? most * size() : most;
    const double limit = of_addend / std::sqrt(row_.among());
    const double norm = std::sqrt(gradient.to(at::kDouble).square().sum().item<double>());  // whole numbers
    return static_cast<float>(norm > limit ? limit / norm : 1);
  }
  /// Of each slice, magnitudes that are alike by index; zeros are no entries.
  Tensor largest(std::size_t of, int used) const {
    const std::int64_t each = residuals[of].numel() / row_.slices();
    const double density = row_.given.density.at(used, 0.001);
    const auto k = static_cast<std::int64_t>(std::ceil(density * static_cast<double>(each)));
    Tensor chosen = torch::zeros({row_.slices(), each}, at::kBool);
    for (int slice = 0; slice < row_.slices(); ++slice) {
      const Tensor magnitudes = residuals[of].narrow(0, slice * each, each).abs();
      const Tensor order = std::get<1>(magnitudes.sort(/*stable=*/true, 0, /*descending=*/true));
      chosen[slice].index_put_({order.slice(0, 0, k)}, true);
      chosen[slice].logical_and_(magnitudes != 0);
    }
    return chosen.view({-1});
  }
  Row row_;
};

/// An exchange of this row, whose buckets are one.
class Exchanged {
 public:
  Exchanged(const Row& row, int number, const ProcessGroupPtr& over)
      : row_(row), exchange_(make_gradient_exchange(over, number, row.degree, row.options())) {
    exchange_->begin_step(++step_);
  }
  /// This rank's part of what comes of this gradient.
  Tensor step(const Tensor& of_rank, bool used = true) {
    const Tensor flat = of_rank.clone();
    Tensor own = own_of(flat);
    if (row_.stage >= Stage::kGradients) own = torch::full_like(own, std::nan(""));
    exchange_->exchange({0, flat, own, {}});
    exchange_->end_step(used);
    exchange_->begin_step(++step_);
    return own;
  }
  Tensor own_of(const Tensor& flat) const {
    return row_.divided() ? exchange_->ranks().own_slice(flat) : flat;
  }
  /// The part of a gradient that this rank exchanges.
  Tensor exchanged(const Tensor& flat) const {
    return row_.has_copies() ? exchange_->ranks().own_slice(flat) : flat;
  }
  /// What is remembered; zeros, where nothing is.
  Tensor remembered(const char* name, std::int64_t elements) const {
    const Tensor found = exchange_->memory().tensor(0, name);
    return found.defined() ? found : exchanged(torch::zeros({elements}));
  }
  /// Of all ranks, over the whole bucket.
  Tensor over_ranks(const Tensor& of_this, std::int64_t elements) const {
    Tensor all = torch::zeros({elements});
    exchanged(all).copy_(of_this);
    all_reduce({all}, group());
    return all;
  }
  std::int64_t sent_bytes() const { return exchange_->ranks().sent_bytes(); }

 private:
  Row row_;
  std::unique_ptr<GradientExchange> exchange_;
  int step_ = 0;
};

// Steps 1 and 3 are abandoned: what comes after them is as if they had not been.
TEST(DgcExchange, IsWhatOneProcessDoes) {
  const std::vector<CompressionOptions> given = {
      {.density = 0.02},
      {.density = {{0, 1}, {1, 0.05}, {2, 0.001}}, .momentum = {{0, 0.75}, {2, 0.5}}},
      {.density = 0.05, .max_norm = {{0, 1500}, {2, 1}}},
      {.density = 0.05, .momentum = 0, .max_norm = 1e30}};
  for (const Row& row : rows(given)) {
    Exchanged exchange(row, next_number(), row.messages ? group() : group_without_messages());
    const std::int64_t elements = std::int64_t{256} * row.degree * 3;
    Oracle oracle(row, elements);
    std::int64_t bytes = 0;
    int used_steps = 0;
    for (int step = 0; step < 5; ++step) {
      const bool used = step != 1 && step != 3;
      Oracle next = oracle;
      const Tensor expected = next.step(addends(row, step, elements), used_steps);
      const Tensor own = exchange.step(gradient(rank(), step, elements), used);
      EXPECT_TRUE(torch::equal(own, exchange.own_of(expected))) << row.text() << ", step " << step;

      const double of_slice = static_cast<double>(elements / row.slices());
      const auto k = static_cast<std::int64_t>(std::ceil(row.given.density.at(used_steps, 0.001) * of_slice));
      if (size() > 1) bytes += 8 * k * (row.among() - 1);
      if (row.has_copies()) bytes += (row.degree - 1) * 4 * (elements / row.degree);
      if (row.has_copies() && row.given.max_norm.has_value()) bytes += (row.degree - 1) * 552;
      EXPECT_EQ(exchange.sent_bytes(), bytes) << row.text();
      if (used) {
        oracle = next;
        ++used_steps;
      }
      const auto place = static_cast<std::size_t>(row.place());
      EXPECT_TRUE(torch::equal(exchange.remembered("momentum_of_rank", elements),
                               exchange.exchanged(oracle.momenta[place])))
          << row.text() << ", step " << step;
      EXPECT_TRUE(torch::equal(exchange.remembered("residual", elements),
                               exchange.exchanged(oracle.residuals[place])))
          << row.text() << ", step " << step;
    }
  }
}

// With u for a momentum before it is masked: what is applied and all residuals are the sum of all u; and by
// u = mu u' + g, all gradients are 1 - mu of that, and mu of the momenta that were masked or are left. Bit
// for bit: numbers are whole, and mu is a half.
TEST(DgcExchange, NothingIsLost) {
  if (size() == 1) return;
  for (const Row& row : rows({{.density = 0.03, .momentum = 0.5}})) {
    if (!row.messages || row.reduction != Reduction::kSum) continue;
    Exchanged exchange(row, next_number(), group());
    const std::int64_t elements = std::int64_t{256} * row.degree * 3;
    Tensor gradients = torch::zeros({elements}), momenta = gradients.clone(), masked = gradients.clone();
    Tensor applied = exchange.own_of(torch::zeros({elements})).clone();
    for (int step = 0; step < 6; ++step) {
      const Tensor own = exchange.exchanged(
          addends(row, step, elements, /*most=*/500)[static_cast<std::size_t>(row.place())]);
      const Tensor momentum = exchange.remembered("momentum_of_rank", elements) * 0.5 + own;
      applied += exchange.step(gradient(rank(), step, elements, /*most=*/500));
      const Tensor left = exchange.remembered("momentum_of_rank", elements);
      gradients += exchange.over_ranks(own, elements);
      momenta += exchange.over_ranks(momentum, elements);
      masked += exchange.over_ranks(momentum - left, elements);
      const Tensor held_back = exchange.over_ranks(exchange.remembered("residual", elements), elements);
      EXPECT_TRUE(torch::equal(applied + exchange.own_of(held_back), exchange.own_of(momenta)))
          << row.text() << ", step " << step;
      const Tensor of_momenta = exchange.own_of(masked + exchange.over_ranks(left, elements));
      EXPECT_TRUE(torch::equal((applied + exchange.own_of(held_back)) * 0.5 + of_momenta * 0.5,
                               exchange.own_of(gradients)))
          << row.text() << ", step " << step;
    }
    EXPECT_GT(masked.abs().sum().item<float>(), 0) << row.text();
  }
}

// Everything is sent and masked at once, so nothing is left of a momentum: the sum in the order of ranks.
TEST(DgcExchange, WithDensityOneItIsThePlainSum) {
  if (size() == 1) return;
  for (const Row& row : rows({{.density = 1, .momentum = 0.9}})) {
    if (!row.messages || row.has_copies()) continue;  // within a copy the sum has another order
    Exchanged exchange(row, next_number(), group());
    const std::int64_t elements = std::int64_t{256} * row.degree;
    const auto of_rank = [&](int of, int step) { return gradient(of, step, elements) / 7; };
    for (int step = 0; step < 3; ++step) {
      Tensor sum = of_rank(0, step);
      for (int of = 1; of < size(); ++of) sum += of_rank(of, step);
      if (row.reduction == Reduction::kMean) sum = sum / torch::full_like(sum, size());
      EXPECT_TRUE(torch::equal(exchange.step(of_rank(rank(), step)), exchange.own_of(sum))) << row.text();
    }
  }
}

// A step that is not finite says so, and leaves nothing behind, in residuals and momenta, however many.
TEST(DgcExchange, WhatIsNotFiniteIsToldAndNotKept) {
  for (const Row& row : rows({{.density = 0.02, .max_norm = 100}})) {
    if (!row.messages) continue;
    Exchanged exchange(row, next_number(), group());
    const std::int64_t elements = std::int64_t{256} * row.degree;
    for (int step = 0; step < 3; ++step) {
      const Tensor flat = gradient(rank(), step, elements);
      if (step == 1 && rank() == size() - 1) {
        flat[3] = std::nanf("");
        flat.slice(0, 10, 200).fill_(-std::numeric_limits<float>::infinity());
      }
      const Tensor own = exchange.step(flat);
      const Tensor wrong = torch::tensor(own.isfinite().all().item<bool>() ? 0 : 1);
      all_reduce({wrong}, group());
      EXPECT_EQ(wrong.item<std::int64_t>() > 0, step == 1) << row.text() << ", step " << step;
      for (const char* const name : {"momentum_of_rank", "residual"})
        EXPECT_TRUE(exchange.remembered(name, elements).isfinite().all().item<bool>()) << row.text();
    }
  }
}

}  // namespace
}  // namespace reef
