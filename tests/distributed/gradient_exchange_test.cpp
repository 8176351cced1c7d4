// What becomes of a full bucket: every method, at every stage and degree, against sums that one process makes
// of all ranks' gradients; and that a method of one's own needs nothing but the interface.
#include "shard/gradient_exchange.h"

#include <gtest/gtest.h>
#include <torch/torch.h>

#include <algorithm>
#include <cmath>
#include <iterator>
#include <map>
#include <string>
#include <tuple>
#include <utility>
#include <vector>

#include "distributed/slice_sum.h"
#include "exchanges.h"

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

constexpr Stage kStages[] = {Stage::kReplicate, Stage::kOptimizer, Stage::kGradients, Stage::kParameters};

/// Numbers of any magnitude, whose sum depends on its order. Every rank can make every rank's.
Tensor gradients(int of, std::int64_t elements, at::ScalarType dtype, int step = 0) {
  static std::map<std::tuple<int, std::int64_t, int>, Tensor> known;
  Tensor& found = known[{of, elements, step}];
  if (!found.defined()) {
    torch::manual_seed(static_cast<std::uint64_t>(100 * step + of));
    found = torch::randn({elements}) * torch::randn({elements}).mul(6).exp2();
  }
  return found.to(dtype, /*non_blocking=*/false, /*copy=*/true);
}

/// Of ranks [first, first + count), in their order.
Tensor ordered(int first, int count, std::int64_t elements, at::ScalarType dtype, int step = 0) {
  Tensor sum = gradients(first, elements, dtype, step);
  for (int of = first + 1; of < first + count; ++of) sum += gradients(of, elements, dtype, step);
  return sum;
}

/// As the reducer makes it at this stage.
GradientBucket bucket_of(const Tensor& flat, Stage stage, const SliceExchange& ranks) {
  Tensor own = stage == Stage::kReplicate ? flat : ranks.own_slice(flat);
  if (stage >= Stage::kGradients) own = torch::full_like(own, std::nan(""));
  return {0, flat, own, {}};
}

struct Row {
  SumOrder sum_order;
  bool messages;
  Stage stage;
  int degree;
  Reduction reduction;
  at::ScalarType dtype;
  std::int64_t slice_elements;

  ShardOptions options() const { return {.stage = stage, .reduction = reduction, .sum_order = sum_order}; }
  std::string text() const {
    return std::string(sum_order == SumOrder::kNative ? "native" : "ordered") +
           (messages ? "" : " without messages") + ", " + text_of(stage, degree) +
           (reduction == Reduction::kMean ? ", mean of " : ", sum of ") + std::to_string(slice_elements) +
           " of " + c10::toString(dtype) + " on rank " + std::to_string(rank());
  }
  /// What this rank sends, in bytes of a slice.
  std::int64_t sent_slices() const {
    const std::int64_t others = size() - 1;
    if (stage == Stage::kReplicate || sum_order == SumOrder::kNative) return 2 * others;
    if (!messages) return others;
    const int copies = size() / degree, copy = rank() / degree;
    return degree - 1 + (copy > 0 ? 1 : 0) + (copy + 1 < copies ? 1 : 0);
  }
};

std::vector<Row> rows() {
  std::vector<Row> all;
  for (const SumOrder sum_order : {SumOrder::kRanks, SumOrder::kNative}) {
    for (const bool messages : {true, false}) {
      for (const Stage stage : kStages) {
        for (const int degree : degrees(stage)) {
          if (sum_order == SumOrder::kNative && degree != size()) continue;  // reef::shard refuses it
          for (const Reduction reduction : {Reduction::kSum, Reduction::kMean}) {
            for (const at::ScalarType dtype : {at::kFloat, at::kBFloat16}) {
              // One chunk, and several of which the last is not whole.
              for (const std::int64_t elements : {std::int64_t{256}, std::int64_t{256} * 1300})
                all.push_back({sum_order, messages, stage, degree, reduction, dtype, elements});
            }
          }
        }
      }
    }
  }
  return all;
}

TEST(GradientExchange, EveryMethodIsTheSumOfAllRanks) {
  for (const Row& row : rows()) {
    const auto exchange = make_gradient_exchange(row.messages ? group() : group_without_messages(),
                                                 next_number(), row.degree, row.options());
    const SliceExchange& ranks = exchange->ranks();
    if (size() > 1) {
      EXPECT_EQ(exchange->in_any_order(at::kCPU), row.messages && row.sum_order == SumOrder::kRanks);
    }
    const std::int64_t elements = row.degree * row.slice_elements;
    for (int step = 0; step < (row.slice_elements > 256 ? 1 : 3); ++step) {
      exchange->begin_step(step + 1);
      const GradientBucket bucket = bucket_of(gradients(rank(), elements, row.dtype, step), row.stage, ranks);
      exchange->exchange(bucket);
      Tensor expected = ordered(0, size(), elements, row.dtype, step);
      if (row.reduction == Reduction::kMean) expected.div_(size());
      if (row.stage != Stage::kReplicate) expected = ranks.own_slice(expected);
      if (row.sum_order == SumOrder::kRanks) {
        EXPECT_TRUE(torch::equal(bucket.own, expected)) << row.text();
        continue;
      }
      // Cancellation may leave any part of the largest addend, so the bound is one of absolute errors.
      Tensor magnitude = torch::zeros_like(expected, at::kDouble);
      for (int of = 0; of < size(); ++of) {
        const Tensor one = gradients(of, elements, row.dtype, step).abs().to(at::kDouble);
        magnitude += row.stage == Stage::kReplicate ? one : ranks.own_slice(one);
      }
      const double rounding = row.dtype == at::kBFloat16 ? 1.0 / 64 : 1e-5;
      const Tensor wrong = (bucket.own.to(at::kDouble) - expected.to(at::kDouble)).abs();
      EXPECT_TRUE((wrong <= rounding * magnitude).all().item<bool>()) << row.text();
    }
    const std::int64_t steps = row.slice_elements > 256 ? 1 : 3;
    const auto slice_bytes = row.slice_elements * static_cast<std::int64_t>(c10::elementSize(row.dtype));
    EXPECT_EQ(ranks.sent_bytes(), steps * row.sent_slices() * slice_bytes) << row.text();
  }
}

// The level within a copy alone: nothing leaves it.
TEST(GradientExchange, WithinACopySumsAreThoseOfItsRanks) {
  for (const bool messages : {true, false}) {
    for (const int degree : degrees(Stage::kGradients)) {
      for (const Reduction reduction : {Reduction::kSum, Reduction::kMean}) {
        for (const bool in_place : {true, false}) {
          SliceExchange ranks(messages ? group() : group_without_messages(), next_number(), degree);
          SliceSum sum(ranks);
          const std::int64_t elements = std::int64_t{degree} * 256 * 1031;
          const Tensor flat = gradients(rank(), elements, at::kFloat);
          const Tensor own = in_place ? ranks.own_slice(flat) : torch::empty({elements / degree});
          sum.reduce_scatter(flat, own, SliceSum::Over::kCopy, reduction);
          Tensor expected = ranks.own_slice(ordered(rank() / degree * degree, degree, elements, at::kFloat));
          if (reduction == Reduction::kMean) expected.div_(degree);
          EXPECT_TRUE(torch::equal(own, expected)) << degree << (messages ? "" : ", without messages");
          EXPECT_EQ(ranks.sent_bytes(), (degree - 1) * static_cast<std::int64_t>(own.nbytes()));
        }
      }
    }
  }
}

/// A method of its own: within a copy the dense sum; between copies matrices go in 8 bits with a scale for
/// each, and what rounding has lost is kept and added in the next step; vectors go as they are.
class RoundedExchange final : public GradientExchange {
 public:
  RoundedExchange(const ProcessGroupPtr& group, int number, int slices, const ShardOptions& options)
      : GradientExchange(group, number, slices, options, {"rounded", {{"lost"}}}) {}

  void exchange(const GradientBucket& bucket) override {
    const Tensor& own = bucket.own;
    if (divided()) sum_.reduce_scatter(bucket.flat, own, SliceSum::Over::kCopy, Reduction::kSum);
    if (const Tensor before = lost(bucket.number); before.defined()) own.add_(before);
    const std::vector<Piece> pieces = pieces_of(bucket);
    const RanksAmong between = between_copies();

    // The largest of each matrix, as a power of two, so that only levels are rounded.
    const Tensor scales = torch::zeros({between.count, static_cast<std::int64_t>(pieces.size())});
    for (std::size_t i = 0; i < pieces.size(); ++i) {
      if (!pieces[i].matrix) continue;
      const auto most = pieces[i].of(own).abs().max().item<double>();
      scales[between.place][static_cast<std::int64_t>(i)] = std::exp2(std::ceil(std::log2(most / 127)));
    }
    ranks().all_gather("the exchange of scales", scales.view({-1}), between);
    const Tensor scale = scales.amax(0);

    std::vector<Tensor> levels = {torch::empty({0}, at::kChar)}, vectors = {torch::empty({0})};
    for (std::size_t i = 0; i < pieces.size(); ++i) {
      const Tensor from = pieces[i].of(own);
      if (!pieces[i].matrix) {
        vectors.push_back(from);
      } else {
        levels.push_back((from / scale[static_cast<std::int64_t>(i)]).round().clamp(-127, 127).to(at::kChar));
      }
    }
    const Tensor all_levels = gathered(torch::cat(levels), between);
    const Tensor all_vectors = gathered(torch::cat(vectors), between);
    const Tensor lost = torch::zeros_like(own);
    std::int64_t level = 0, vector = 0;
    for (std::size_t i = 0; i < pieces.size(); ++i) {
      const Tensor to = pieces[i].of(own);
      const Tensor before = to.clone();
      to.zero_();
      for (int number = 0; number < between.count; ++number) {
        const Tensor one = pieces[i].matrix ? all_levels[number].narrow(0, level, to.numel()).to(at::kFloat) *
                                                  scale[static_cast<std::int64_t>(i)]
                                            : all_vectors[number].narrow(0, vector, to.numel());
        to.add_(one);
        if (number == between.place) pieces[i].of(lost).copy_(before - one);
      }
      (pieces[i].matrix ? level : vector) += to.numel();
    }
    memory().remember(bucket.number, "lost", lost);
    if (reduction() == Reduction::kMean) own.div_(ranks().all().count);
  }

  struct Piece {
    std::int64_t offset, elements;  ///< of what is exchanged between copies
    bool matrix;
    Tensor of(const Tensor& own) const { return own.narrow(0, offset, elements); }
  };
  std::vector<Piece> pieces_of(const GradientBucket& bucket) const {
    const std::int64_t slice = bucket.own.numel();
    const std::int64_t begin = divided() ? ranks().copy().place * slice : 0;
    std::vector<Piece> pieces;
    for (const GradientBucket::Place& place : bucket.places) {
      const std::int64_t first = std::max(place.offset, begin);
      const std::int64_t last = std::min(place.offset + c10::multiply_integers(place.shape), begin + slice);
      if (first < last) pieces.push_back({first - begin, last - first, place.shape.size() > 1});
    }
    return pieces;
  }
  Tensor lost(std::size_t bucket) const { return memory().tensor(bucket, "lost"); }

 private:
  Tensor gathered(const Tensor& own, const RanksAmong& between) {
    const Tensor all = torch::zeros({between.count, own.numel()}, own.options());
    all[between.place].copy_(own);
    ranks().all_gather("the exchange of gradients", all.view({-1}), between);
    return all;
  }

  SliceSum sum_{ranks()};
};

// Nothing is lost: what has been applied in all steps and what is kept for the next is what all ranks had,
// bit for bit where numbers are whole, and of abandoned steps neither. Vectors are exact in each step, ranks
// are alike, and bytes are those of levels, scales and vectors.
TEST(GradientExchange, AMethodOfItsOwnHasLevelsRoundsShapesAndMemory) {
  const std::vector<GradientBucket::Place> places = {
      {0, {40, 13}, {13, 1}}, {768, {70}, {1}}, {1024, {3, 7, 11}, {77, 11, 1}}};
  const std::int64_t elements = 256 * 4 * 3;  // slices of 1 to 4 ranks
  const auto whole_numbers = [&](int of, int step) {
    const Tensor all = gradients(of, elements, at::kFloat, step).mul(8).round().clamp(-4000, 4000);
    Tensor flat = torch::zeros({elements});
    for (const auto& place : places) place.of(flat).copy_(place.of(all));
    return flat;
  };
  for (const bool messages : {true, false}) {
    for (const Stage stage : kStages) {
      for (const int degree : degrees(stage)) {
        const std::string text = text_of(stage, degree) + (messages ? "" : ", without messages");
        RoundedExchange exchange(messages ? group() : group_without_messages(), next_number(), degree,
                                 {.stage = stage, .reduction = Reduction::kSum});
        const bool divided = stage != Stage::kReplicate;
        const int copies = divided ? size() / degree : size();
        const auto own_of = [&](const Tensor& flat) {
          return divided ? exchange.ranks().own_slice(flat) : flat;
        };
        std::vector<Tensor> had(2), applied(2);
        std::int64_t bytes = 0;
        constexpr int kAbandoned[] = {1, 3};
        exchange.begin_step(1);
        for (int step = 0; step < 5; ++step) {
          const bool used = std::count(std::begin(kAbandoned), std::end(kAbandoned), step) == 0;
          for (std::size_t bucket = 0; bucket < 2; ++bucket) {  // each has a memory of its own
            const int seed = 10 * step + static_cast<int>(bucket);
            GradientBucket full = bucket_of(whole_numbers(rank(), seed), stage, exchange.ranks());
            full.number = bucket;
            full.places = places;
            exchange.exchange(full);
            Tensor all = whole_numbers(0, seed);
            for (int of = 1; of < size(); ++of) all += whole_numbers(of, seed);
            const Tensor expected = own_of(all);
            if (used) {
              had[bucket] = step == 0 ? expected.clone() : had[bucket] + expected;
              applied[bucket] = step == 0 ? full.own.clone() : applied[bucket] + full.own;
            }
            Tensor of_first_copy = full.own.clone();
            if (!divided || degree == 1) {
              broadcast({of_first_copy}, group());
              EXPECT_TRUE(torch::equal(of_first_copy, full.own)) << text;
            }
            bytes += divided ? (degree - 1) * 4 * full.own.numel() : 0;
            for (const auto& piece : exchange.pieces_of(full)) {
              bytes += (copies - 1) * (4 + piece.elements * (piece.matrix ? 1 : 4));
              if (piece.matrix) continue;
              EXPECT_TRUE(torch::equal(piece.of(full.own), piece.of(expected))) << text;
            }
          }
          exchange.end_step(used);
          exchange.begin_step(step + 2);
        }
        EXPECT_EQ(exchange.ranks().sent_bytes(), bytes) << text;
        for (std::size_t bucket = 0; bucket < 2; ++bucket) {
          // Each copy's part of what is kept, added up over copies.
          Tensor kept = torch::zeros({elements});
          (divided ? exchange.ranks().own_slice(kept) : kept).copy_(exchange.lost(bucket));
          all_reduce({kept}, group());
          EXPECT_GT(kept.abs().max().item<float>(), 0) << text << ": nothing was rounded";
          const Tensor own = own_of(kept);
          EXPECT_TRUE(torch::equal(applied[bucket] + own, had[bucket])) << text;
        }
      }
    }
  }
}

}  // namespace
}  // namespace reef
