// Gradients that travel as factors of a low rank: against what there was, and against what the singular
// values say.
#include <gtest/gtest.h>
#include <torch/torch.h>

#include <cmath>
#include <limits>
#include <memory>
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
using Place = GradientBucket::Place;

constexpr std::int64_t kElements = std::int64_t{256} * 12 * 4;  // slices of 1 to 4 ranks
constexpr std::int64_t kWanted = 2;

/// A matrix, a vector, one whose memory is in columns, one of four dimensions, and one that is too small.
const std::vector<Place>& places() {
  static const std::vector<Place> all = {{0, {40, 30}, {30, 1}},
                                         {1280, {70}, {1}},
                                         {1536, {25, 33}, {1, 25}},
                                         {2560, {8, 3, 7, 5}, {105, 35, 5, 1}},
                                         {3584, {3, 4}, {4, 1}}};
  return all;
}
bool is_vector(std::size_t number) { return number == 1 || number == 4; }

struct Row {
  Compression method;
  bool messages;
  Stage stage;
  int degree;
  Reduction reduction = Reduction::kSum;

  ShardOptions options() const {
    return {.stage = stage,
            .reduction = reduction,
            .compression = method,
            .compression_options = {.rank = static_cast<double>(kWanted), .seed = 5}};
  }
  bool alternating() const { return method == Compression::kPowerSgdAlternating; }
  bool divided() const { return stage != Stage::kReplicate; }
  bool has_copies() const { return divided() && degree < size(); }
  int between() const { return has_copies() ? size() / degree : size(); }
  std::string text() const {
    return std::string(name_of(method)) + (messages ? "" : " without messages") + ", " +
           text_of(stage, degree) + " on rank " + std::to_string(rank());
  }
};

std::vector<Row> rows() {
  std::vector<Row> all;
  for (const Compression method : {Compression::kPowerSgd, Compression::kPowerSgdAlternating}) {
    for (const bool messages : {true, false}) {
      for (const Stage stage : {Stage::kReplicate, Stage::kOptimizer, Stage::kParameters}) {
        for (const int degree : degrees(stage)) {
          all.push_back({method, messages, stage, degree});
        }
      }
    }
  }
  return all;
}

/// Of a rank in a step: every rank can make every rank's. Zero between parameters.
Tensor gradient(int of, int step) {
  torch::manual_seed(static_cast<std::uint64_t>(100 * step + of));
  const Tensor all = torch::randn({kElements}).mul(torch::randn({kElements}).exp2());
  Tensor flat = torch::zeros({kElements});
  for (const Place& place : places()) place.of(flat).copy_(place.of(all));
  return flat;
}

Tensor matrix_of(const Tensor& flat, std::size_t number) {
  const Tensor values = places()[number].of(flat);
  return values.reshape({values.size(0), -1});
}

/// An exchange of this row, whose buckets are one.
class Exchanged {
 public:
  Exchanged(const Row& row, ShardOptions options, int number, const ProcessGroupPtr& over)
      : row_(row), exchange_(make_gradient_exchange(over, number, row.degree, options)) {
    exchange_->begin_step(++step_);
  }
  Exchanged(const Row& row, int number, const ProcessGroupPtr& over)
      : Exchanged(row, row.options(), number, over) {}

  /// What comes of this rank's gradient: all of it, of all ranks together where they have parts.
  Tensor step(const Tensor& of_rank, bool used = true) {
    const Tensor flat = of_rank.clone();
    own_ = own_of(flat);
    if (row_.stage >= Stage::kGradients) own_ = torch::full_like(own_, std::nan(""));
    exchange_->exchange({0, flat, own_, places()});
    exchange_->end_step(used);
    exchange_->begin_step(++step_);
    Tensor all = torch::zeros({kElements});
    if (row_.has_copies() && rank() >= row_.degree) {
      all_reduce({all}, group());
      return all;
    }
    if (!row_.divided()) return own_;
    own_of(all).copy_(own_);
    all_reduce({all}, group());
    return all;
  }
  const Tensor& own() const { return own_; }  ///< of the last step
  Tensor own_of(const Tensor& flat) const {
    return row_.divided() ? exchange_->ranks().own_slice(flat) : flat;
  }
  /// What all ranks hold back.
  Tensor held_back() const {
    Tensor all = torch::zeros({kElements});
    const Tensor residual = exchange_->memory().tensor(0, "residual");
    if (residual.defined()) (row_.has_copies() ? own_of(all) : all).copy_(residual);
    all_reduce({all}, group());
    return all;
  }
  Tensor of_this_rank(const char* name, std::int64_t first = 0) const {
    return exchange_->memory().tensor(0, name, first);
  }
  std::int64_t sent_bytes() const { return exchange_->ranks().sent_bytes(); }

 private:
  Row row_;
  std::unique_ptr<GradientExchange> exchange_;
  Tensor own_;
  int step_ = 0;
};

/// Of one all-reduce over the ranks or copies: `elements`, and zeros to a multiple of its parts.
std::int64_t all_reduce_bytes(const Row& row, std::int64_t elements) {
  const std::int64_t between = row.between(), within = row.has_copies() ? row.degree : 1;
  const std::int64_t parts = between * within, each = (elements + parts - 1) / parts;
  return 4 * each * (2 * (between - 1) + between * (within - 1));
}

std::int64_t step_bytes(const Row& row, int step) {
  const std::int64_t vectors = 70 + 12;
  const std::int64_t left = kWanted * (40 + 25 + 8), right = kWanted * (30 + 33 + 105);
  const std::int64_t slice = kElements / row.degree;
  const std::int64_t of_copy = row.has_copies() ? 2 * (row.degree - 1) * 4 * slice : 0;
  if (row.alternating()) return of_copy + all_reduce_bytes(row, vectors + (step % 2 == 0 ? left : right));
  return of_copy + all_reduce_bytes(row, vectors + left) + all_reduce_bytes(row, right);
}

// In every step: the sum and what is held back is what there was; vectors are exact; ranks are alike; bytes.
// Steps 1 and 3 are abandoned, and are as if they had not been: a twin that never had them has the same bits.
TEST(PowerSgdExchange, NothingIsLost) {
  if (size() == 1) return;
  for (const Row& row : rows()) {
    const ProcessGroupPtr& over = row.messages ? group() : group_without_messages();
    Exchanged exchange(row, next_number(), over), twin(row, next_number(), over);
    Tensor had = torch::zeros({kElements}), magnitude = had.clone(), applied = had.clone();
    std::int64_t bytes = 0;
    int used_steps = 0;
    for (int step = 0; step < 6; ++step) {
      const bool used = step != 1 && step != 3;
      const Tensor found = exchange.step(gradient(rank(), step), used);
      bytes += step_bytes(row, used_steps);
      EXPECT_EQ(exchange.sent_bytes(), bytes) << row.text() << ", step " << step;
      if (!used) continue;
      ++used_steps;
      Tensor first = found.clone();
      broadcast({first}, group());
      EXPECT_TRUE(torch::equal(first, found)) << row.text();
      for (int root = 0; root < row.degree; ++root) {
        const Tensor of_first_copy = exchange.own().clone();
        broadcast({of_first_copy}, group(), root);
        EXPECT_TRUE(rank() % row.degree != root || torch::equal(of_first_copy, exchange.own())) << row.text();
      }
      const Tensor of_twin = twin.step(gradient(rank(), step));
      EXPECT_TRUE(torch::equal(twin.own(), exchange.own())) << row.text() << ", step " << step;
      Tensor sum = torch::zeros({kElements});
      for (int of = 0; of < size(); ++of) {
        sum += gradient(of, step);
        magnitude += gradient(of, step).abs();
      }
      had += sum;
      applied += found;
      const Tensor wrong = (applied + exchange.held_back() - had).abs().max();
      EXPECT_LE(wrong.item<float>(), 1e-6 * magnitude.max().item<float>()) << row.text() << ", step " << step;
      for (std::size_t i = 0; i < places().size(); ++i) {
        if (!is_vector(i)) {
          EXPECT_FALSE(torch::allclose(matrix_of(found, i), matrix_of(sum, i))) << "nothing was compressed";
          continue;
        }
        EXPECT_TRUE(torch::allclose(matrix_of(found, i), matrix_of(sum, i), 1e-6, 1e-6)) << row.text();
        EXPECT_EQ(matrix_of(exchange.held_back(), i).abs().max().item<float>(), 0) << row.text();
      }
    }
  }
}

/// What this rank adds to its next gradient: with copies, to its slice of its copy's sum.
Tensor held_back_of(const Exchanged& exchange) {
  Tensor all = torch::zeros({kElements});
  const Tensor residual = exchange.of_this_rank("residual");
  if (!residual.defined()) return all;
  (residual.numel() < kElements ? exchange.own_of(all) : all).copy_(residual);
  return all;
}

/// Of rank kWanted, and the same two factors on all ranks but for a scale.
Tensor low_rank_gradient(int of) {
  torch::manual_seed(11);
  Tensor flat = torch::zeros({kElements});
  for (std::size_t i = 0; i < places().size(); ++i) {
    const Tensor like = matrix_of(flat, i);
    const Tensor product =
        torch::mm(torch::randn({like.size(0), kWanted}), torch::randn({kWanted, like.size(1)}));
    places()[i].of(flat).copy_((product * (of + 1)).view(places()[i].shape));
  }
  return flat;
}

// What has that rank is exact after two steps; after gradients of zeros, which are no NaN, too.
TEST(PowerSgdExchange, WhatHasTheRankIsExact) {
  if (size() == 1) return;
  for (const Row& row : rows()) {
    if (!row.messages) continue;
    Exchanged exchange(row, next_number(), group());
    Tensor sum = torch::zeros({kElements});
    for (int of = 0; of < size(); ++of) sum += low_rank_gradient(of);
    for (const bool zeros_first : {true, false, true}) {
      if (zeros_first) {
        // What is held back is applied, and then there is nothing but zeros.
        for (int step = 0; step < 3; ++step) exchange.step(torch::zeros({kElements}));
        EXPECT_LE(exchange.step(torch::zeros({kElements})).abs().max().item<float>(), 1e-4) << row.text();
      }
      Tensor found;
      for (int step = 0; step < 2; ++step)
        found = exchange.step(low_rank_gradient(rank()) - held_back_of(exchange));
      EXPECT_TRUE(torch::allclose(found, sum, 1e-4, 1e-4)) << row.text() << ", " << zeros_first;
    }
  }
}

// On one matrix, again and again, what is left tends to what the singular values beyond the rank say.
TEST(PowerSgdExchange, WhatIsLeftTendsToTheSingularTail) {
  if (size() == 1) return;
  for (const Row& row : rows()) {
    if (!row.messages || row.stage == Stage::kParameters) continue;
    Exchanged exchange(row, next_number(), group());
    Tensor sum = torch::zeros({kElements});
    for (int of = 0; of < size(); ++of) sum += gradient(of, 0);
    Tensor found;
    for (int step = 0; step < 60; ++step) found = exchange.step(gradient(rank(), 0) - held_back_of(exchange));
    for (std::size_t i = 0; i < places().size(); ++i) {
      if (is_vector(i)) continue;
      const Tensor singular = torch::linalg_svdvals(matrix_of(sum, i).to(at::kDouble));
      const double tail = singular.slice(0, kWanted).square().sum().sqrt().item<double>();
      const double left = (matrix_of(sum, i) - matrix_of(found, i)).to(at::kDouble).norm().item<double>();
      EXPECT_GE(left, tail * (1 - 1e-5)) << row.text();
      EXPECT_LE(left, tail * 1.01) << row.text() << ", matrix " << i;
    }
  }
}

// A step that is not finite says so, of that matrix alone, and leaves nothing behind.
TEST(PowerSgdExchange, WhatIsNotFiniteIsToldAndNotKept) {
  if (size() == 1) return;
  for (const Row& row : rows()) {
    if (!row.messages) continue;
    for (const float wrong : {std::nanf(""), std::numeric_limits<float>::infinity()}) {
      Exchanged exchange(row, next_number(), group());
      for (int step = 0; step < 3; ++step) {
        const Tensor flat = gradient(rank(), step);
        if (step == 1 && rank() == size() - 1) flat[3] = wrong;
        const Tensor found = exchange.step(flat);
        EXPECT_EQ(found[3].isfinite().item<bool>(), step != 1) << row.text();
        EXPECT_EQ(found.slice(0, 0, 1280).isfinite().all().item<bool>(), step != 1)
            << row.text() << ", " << step;
        EXPECT_TRUE(found.slice(0, 1280, kElements).isfinite().all().item<bool>()) << row.text();
        EXPECT_TRUE(exchange.held_back().isfinite().all().item<bool>()) << row.text();
      }
    }
  }
}

// A rank that changes with the steps does so by steps that ranks have used, and goes on from what is known.
TEST(PowerSgdExchange, RankFollowsItsSchedule) {
  if (size() == 1) return;
  const Row row{Compression::kPowerSgd, true, Stage::kReplicate, size()};
  ShardOptions options = row.options();
  options.compression_options.rank = {{0, 1}, {2, 4}, {4, 2}};
  Exchanged exchange(row, options, 1, group());
  std::int64_t before = 0;
  const std::int64_t expected[] = {1, 1, 4, 4, 2, 2};
  for (int step = 0; step < 6; ++step) {
    exchange.step(gradient(rank(), step));
    // Rank 4 is not worth it for the matrix of 8 x 105.
    const std::int64_t r = expected[step], vectors = 82;
    const bool fits = 2 * (8 + 105) * r < 8 * 105;
    const std::int64_t left = r * (40 + 25 + (fits ? 8 : 0)), right = r * (30 + 33 + (fits ? 105 : 0));
    const std::int64_t bytes =
        all_reduce_bytes(row, vectors + (fits ? 0 : 840) + left) + all_reduce_bytes(row, right);
    EXPECT_EQ(exchange.sent_bytes() - before, bytes) << step;
    before = exchange.sent_bytes();
    EXPECT_EQ(exchange.of_this_rank("right", 0).size(0), 4);
  }
}

}  // namespace
}  // namespace reef
