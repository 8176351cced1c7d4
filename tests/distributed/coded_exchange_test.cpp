// Gradients that travel in few bits: against one process that encodes, holds back and adds up as all ranks
// do; bytes; and what is held back and what has been applied against what there was.
#include <gtest/gtest.h>
#include <torch/torch.h>

#include <algorithm>
#include <cmath>
#include <limits>
#include <string>
#include <vector>

#include "exchanges.h"
#include "kernels/level_code.h"
#include "kernels/packed_levels.h"
#include "kernels/random_key.h"
#include "reef/error.h"
#include "shard/entropy_coded_messages.h"
#include "shard/gradient_exchange.h"
#include "shard/packed_code.h"

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
  int bits;
  bool messages;
  Stage stage;
  int degree;
  Reduction reduction;
  bool entropy_coded = false;

  ShardOptions options() const {
    ShardOptions all{.stage = stage, .reduction = reduction, .compression = method};
    if (method == Compression::kQsgd) all.compression_options = {.bits = bits, .seed = 3};
    if (entropy_coded) all.compression_options.entropy_coded = true;
    return all;
  }
  bool divided() const { return stage != Stage::kReplicate; }
  int copies() const { return divided() ? size() / degree : 1; }
  bool holds_back() const { return method == Compression::kSign; }
  std::string text() const {
    return std::string(name_of(method)) + " of " + std::to_string(bits) + " bits, " +
           (entropy_coded ? "in an entropy code, " : "") + (messages ? "" : "without messages, ") +
           text_of(stage, degree) + " on rank " + std::to_string(rank());
  }
};

std::vector<Row> rows(bool all_bits = true) {
  std::vector<Row> all;
  for (const bool messages : {true, false}) {
    for (const Stage stage : {Stage::kReplicate, Stage::kOptimizer, Stage::kParameters}) {
      for (const int degree : degrees(stage)) {
        for (const Reduction reduction : {Reduction::kSum, Reduction::kMean}) {
          all.push_back({Compression::kSign, 1, messages, stage, degree, reduction});
          for (const int bits : {2, 5, 8}) {
            if (!all_bits && bits != 8) continue;
            for (const bool coded : {false, true})
              all.push_back({Compression::kQsgd, bits, messages, stage, degree, reduction, coded});
          }
        }
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

/// All of the bucket is one parameter.
std::vector<GradientBucket::Place> one_parameter(std::int64_t elements) { return {{0, {elements}, {1}}}; }

/// What all ranks do, in one process.
class Oracle {
 public:
  explicit Oracle(const Row& row) : row_(row) {}
  /// The `used`-th step that ranks have used.
  Tensor step(const std::vector<Tensor>& gradients, int used) {
    std::vector<Tensor> addends;  // of ranks, or of copies
    for (int of = 0; of < size(); ++of) {
      const bool begins = row_.copies() == 1 || of % row_.degree == 0;
      if (begins) addends.push_back(gradients[static_cast<std::size_t>(of)].clone());
      if (!begins) addends.back().add_(gradients[static_cast<std::size_t>(of)]);
    }
    residuals_.resize(addends.size());
    const int slices = row_.divided() ? row_.degree : size();
    Tensor sum;
    for (std::size_t i = 0; i < addends.size(); ++i) {
      std::vector<Tensor> said;
      if (row_.holds_back() && residuals_[i].defined()) addends[i].add_(residuals_[i]);
      for (int slice = 0; slice < slices; ++slice) {
        const auto own = static_cast<int>(i);
        const int by = row_.copies() > 1 ? own * row_.degree + slice : own;
        said.push_back(coded(SliceExchange::slice(addends[i], slice, slices), used, by,
                             row_.copies() > 1 ? 0 : slice, /*of_sum=*/false));
      }
      residuals_[i] = addends[i];
      sum = sum.defined() ? sum.add(torch::cat(said)) : torch::cat(said);
    }
    if (!row_.divided()) {
      if (row_.holds_back() && residual_of_sum_.defined()) sum.add_(residual_of_sum_);
      std::vector<Tensor> said;
      for (int slice = 0; slice < slices; ++slice)
        said.push_back(coded(SliceExchange::slice(sum, slice, slices), used, slice, 0, /*of_sum=*/true));
      residual_of_sum_ = sum;
      sum = torch::cat(said);
    }
    return row_.reduction == Reduction::kMean ? sum.div(size()) : sum;
  }

  std::vector<Tensor> residuals_;
  Tensor residual_of_sum_;
  std::int64_t sent_codes_ = 0;  ///< what of all codes this rank sends to others, in bytes

 private:
  /// What a code says; `values` become what it loses.
  Tensor coded(const Tensor& values, int used, int by, int slice, bool of_sum) {
    const Tensor code = empty_codes(1, values.numel(), row_.bits);
    Tensor said = torch::empty_like(values);
    if (row_.method == Compression::kSign) {
      kernels::encode_signs(values.mutable_data_ptr<float>(), values.numel(), code_of_slice(code, 0, 1));
    } else {
      const std::uint64_t key =
          kernels::random_key({3, static_cast<std::uint64_t>(used), static_cast<std::uint64_t>(by), 0,
                               of_sum ? 1U : 0U, static_cast<std::uint64_t>(slice)});
      kernels::encode_levels(values.const_data_ptr<float>(), values.numel(), row_.bits, key,
                             code_of_slice(code, 0, 1));
    }
    sum_of_codes(code, 1, row_.bits, said);
    if (by != rank()) return said;
    const bool to_one = row_.copies() == 1 && !of_sum;  // and not at all, if that is this rank
    const int messages = to_one ? (slice == by ? 0 : 1) : (row_.copies() > 1 ? row_.copies() : size()) - 1;
    sent_codes_ += messages * bytes_as_sent(code);
    return said;
  }
  /// 8 bytes say how many the others are.
  std::int64_t bytes_as_sent(const Tensor& code) const {
    if (!row_.entropy_coded) return code.numel();
    const std::int64_t blocks = code.numel() / (4 + 64 * row_.bits);
    std::vector<std::uint8_t> shorter(
        static_cast<std::size_t>(kernels::most_level_code_bytes(blocks, row_.bits)));
    const std::int64_t bytes =
        kernels::encode_level_code(code_of_slice(code, 0, 1), blocks, row_.bits, shorter.data());
    EXPECT_LT(bytes, code.numel()) << row_.text();
    return 8 + bytes;
  }
  Row row_;
};

// Bit for bit, and bytes exactly. Steps 1 and 3 are abandoned: what comes after them is as if they had not
// been.
TEST(CodedExchange, IsWhatOneProcessDoes) {
  for (const Row& row : rows()) {
    if (size() == 1) continue;
    const auto exchange = make_gradient_exchange(row.messages ? group() : group_without_messages(),
                                                 next_number(), row.degree, row.options());
    const SliceExchange& ranks = exchange->ranks();
    const std::int64_t slice = 256 * (row.entropy_coded ? 21 : 3), elements = slice * row.degree;
    Oracle oracle(row);
    std::int64_t bytes = 0;
    int used_steps = 0;
    exchange->begin_step(1);
    for (int step = 0; step < 5; ++step) {
      const bool used = step != 1 && step != 3;
      std::vector<Tensor> gradients;
      for (int of = 0; of < size(); ++of) gradients.push_back(gradient(of, step, elements));
      Oracle next(row);
      for (const Tensor& each : oracle.residuals_) next.residuals_.push_back(each.clone());
      if (oracle.residual_of_sum_.defined()) next.residual_of_sum_ = oracle.residual_of_sum_.clone();
      Tensor expected = next.step(gradients, used_steps);
      if (used) oracle = next;
      used_steps += used ? 1 : 0;
      const Tensor flat = gradients[static_cast<std::size_t>(rank())].clone();
      Tensor own = row.divided() ? ranks.own_slice(flat) : flat;
      if (row.stage >= Stage::kGradients) own = torch::full_like(own, std::nan(""));
      exchange->exchange({0, flat, own, one_parameter(elements)});
      if (row.divided()) expected = ranks.own_slice(expected);
      EXPECT_TRUE(torch::equal(own, expected)) << row.text() << ", step " << step;
      exchange->end_step(used);
      exchange->begin_step(step + 2);

      const std::int64_t code = (slice + 511) / 512 * (4 + 64 * row.bits);
      const int messages = row.copies() > 1 ? row.copies() - 1 : (size() - 1) * (row.divided() ? 1 : 2);
      if (row.entropy_coded) {
        EXPECT_LT(next.sent_codes_, messages * code) << row.text();
      } else {
        EXPECT_EQ(next.sent_codes_, messages * code) << row.text();
      }
      bytes += (row.copies() > 1 ? (row.degree - 1) * 4 * slice : 0) + next.sent_codes_;
      EXPECT_EQ(ranks.sent_bytes(), bytes) << row.text();
    }
    const Tensor residual = exchange->memory().tensor(0, "residual");
    EXPECT_EQ(residual.defined(), row.holds_back()) << row.text();
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

// What is applied and what is held back is what there was, within float32's rounding; nothing is held back
// between parameters.
TEST(CodedExchange, SignsHoldBackWhatTheyLose) {
  if (size() == 1) return;
  for (const Row& row : rows()) {
    if (!row.holds_back() || row.reduction != Reduction::kSum || !row.messages) continue;
    const auto exchange = make_gradient_exchange(group(), next_number(), row.degree, row.options());
    const std::int64_t elements = std::int64_t{256} * row.degree * 5;
    const std::vector<GradientBucket::Place> places = {{0, {100}, {1}}, {256, {elements - 300}, {1}}};
    const auto own_of = [&](const Tensor& flat) {
      return row.divided() ? exchange->ranks().own_slice(flat) : flat;
    };
    Tensor parameters = torch::zeros({elements});
    for (const auto& place : places) place.of(parameters).fill_(1);
    Tensor had = torch::zeros({elements}), applied = torch::zeros_like(own_of(had)), magnitude = had.clone();
    for (int step = 0; step < 6; ++step) {
      exchange->begin_step(step + 1);
      for (int of = 0; of < size(); ++of) {
        had += gradient(of, step, elements) * parameters;
        magnitude += gradient(of, step, elements).abs() * parameters;
      }
      const Tensor flat = gradient(rank(), step, elements) * parameters;
      exchange->exchange({0, flat, own_of(flat), places});
      applied += own_of(flat);
      EXPECT_EQ(own_of(flat).masked_select(own_of(parameters) == 0).abs().sum().item<float>(), 0)
          << row.text();
      exchange->end_step(/*used=*/true);
    }
    Tensor held_back = torch::zeros({elements});
    (row.copies() > 1 ? own_of(held_back) : held_back).add_(exchange->memory().tensor(0, "residual"));
    if (const Tensor of_sum = exchange->memory().tensor(0, "residual_of_sum"); of_sum.defined())
      exchange->ranks().own_slice(held_back).add_(of_sum);
    all_reduce({held_back}, group());
    EXPECT_EQ(((1 - parameters) * held_back).abs().sum().item<float>(), 0) << row.text();
    const Tensor wrong = ((applied + own_of(held_back) - own_of(had)) * own_of(parameters)).abs();
    EXPECT_LE(wrong.max().item<float>(), 1e-6 * magnitude.max().item<float>()) << row.text();
  }
}

// Ranks with the same gradient make errors of their own: in the sum they are as those of independent draws.
TEST(CodedExchange, ErrorsOfRanksAreTheirOwn) {
  if (size() == 1) return;
  const std::int64_t elements = std::int64_t{512} * 200 * size();
  const Tensor same = gradient(0, 0, elements);
  const auto squares = [&](int ranks_that_have_any) {
    const auto exchange = make_gradient_exchange(
        group(), next_number(), size(),
        {.stage = Stage::kOptimizer, .reduction = Reduction::kSum, .compression = Compression::kQsgd});
    const Tensor flat = rank() < ranks_that_have_any ? same.clone() : torch::zeros_like(same);
    const Tensor own = exchange->ranks().own_slice(flat);
    exchange->begin_step(1);
    exchange->exchange({0, flat, own, one_parameter(elements)});
    const Tensor error = own.sub(exchange->ranks().own_slice(same), ranks_that_have_any);
    Tensor sum = error.to(at::kDouble).square().sum().view({1});
    all_reduce({sum}, group());
    return sum.item<double>();
  };
  const double of_one = squares(1), of_all = squares(size());
  EXPECT_GT(of_one, 0);
  EXPECT_NEAR(of_all / of_one, size(), 0.1 * size());
}

// A step that is not finite says so on all ranks that have the element, and leaves nothing behind.
TEST(CodedExchange, WhatIsNotFiniteIsToldAndNotKept) {
  if (size() == 1) return;
  for (const Row& row : rows(/*all_bits=*/false)) {
    if (!row.messages || row.reduction != Reduction::kSum) continue;
    const auto exchange = make_gradient_exchange(group(), next_number(), row.degree, row.options());
    const std::int64_t elements = std::int64_t{1024} * row.degree;
    const std::vector<GradientBucket::Place> places = {{0, {100}, {1}}, {256, {elements - 256}, {1}}};
    for (const float wrong : {std::nanf(""), std::numeric_limits<float>::infinity()}) {
      for (int step = 0; step < 2; ++step) {
        exchange->begin_step(step + 1);
        const Tensor flat = gradient(rank(), step, elements);
        if (step == 0 && rank() == size() - 1) flat[3] = wrong;
        flat.slice(0, 100, 256).zero_();
        const Tensor own = row.divided() ? exchange->ranks().own_slice(flat) : flat;
        exchange->exchange({0, flat, own, places});
        exchange->end_step(/*used=*/true);
        const bool has_it = !row.divided() || exchange->ranks().copy().place == 0;
        EXPECT_EQ(own[3].isfinite().item<bool>(), !(step == 0 && has_it)) << row.text();
        if (has_it) {
          EXPECT_EQ(own.slice(0, 100, 256).abs().sum().item<float>(), 0) << row.text();
        }
        EXPECT_TRUE(own.slice(0, 512).isfinite().all().item<bool>()) << row.text();
        if (!row.holds_back()) continue;
        EXPECT_TRUE(exchange->memory().tensor(0, "residual").isfinite().all().item<bool>()) << row.text();
      }
    }
  }
}

// Bits that change with the steps do so by steps that ranks have used.
TEST(CodedExchange, BitsFollowTheirSchedule) {
  if (size() == 1) return;
  ShardOptions options{.compression = Compression::kQsgd};
  options.compression_options.bits = {{0, 8}, {1, 4}, {3, 2}};
  const auto exchange = make_gradient_exchange(group(), next_number(), size(), options);
  const std::int64_t elements = 512 * size();
  std::int64_t before = 0;
  exchange->begin_step(1);
  const int expected[] = {8, 8, 4, 4, 2, 2};
  for (int call = 0; call < 6; ++call) {
    const Tensor flat = gradient(rank(), call, elements);
    exchange->exchange({0, flat, flat, one_parameter(elements)});
    exchange->end_step(/*used=*/call != 0);
    exchange->begin_step(call + 2);
    EXPECT_EQ(exchange->ranks().sent_bytes() - before, 2 * (size() - 1) * (4 + 64 * expected[call])) << call;
    before = exchange->ranks().sent_bytes();
  }
}

/// What others send rank 0 in the place of a code of one slice: a length, and bytes.
struct Nonsense {
  std::int64_t length;
  std::vector<std::uint8_t> bytes;
  const char* told;  ///< nullptr: it is a code
};

// A message that is no code names the rank that has sent it, and nothing is read beyond its end.
TEST(CodedExchange, WhatIsNoEntropyCodeNamesItsRank) {
  if (size() == 1) return;
  constexpr int kBits = 4;
  const std::int64_t slice = kernels::packed_bytes(512 * 8, kBits);
  const std::int64_t most = kernels::most_level_code_bytes(8, kBits);
  const Tensor codes = torch::full({slice * size()}, 17, at::kByte);
  std::vector<std::uint8_t> whole(static_cast<std::size_t>(most), 17), chance(100, 3), table(176, 17);
  std::fill_n(whole.begin(), 4, std::uint8_t{0});  // its one body is as it is packed
  std::fill_n(table.begin(), 4, std::uint8_t{0});
  table.front() = 172;  // 8 steps, and more codes of one bit than there can be
  const Nonsense rows[] = {
      {most, whole, nullptr},
      {0, {}, "has sent 0 for the length of a code of levels"},
      {-5, {}, "has sent -5 for the length"},
      {most + 1, {}, " for the length of a code of levels, which has 1 to "},
      {std::numeric_limits<std::int64_t>::max(), {}, " for the length of a code of levels"},
      {most - 1,
       {whole.begin(), whole.end() - 1},
       "no code of levels of 4 bits (its bodies have another size"},
      {3, {0, 0, 0}, "it ends within the sizes of its bodies"},
      {100, chance, "its bodies have another size than it"},
      {176, table, "no code of levels of 4 bits (the lengths of its codes are not those of any code)"}};
  for (const bool messages : {true, false}) {
    for (const Nonsense& row : rows) {
      SliceExchange ranks(messages ? group() : group_without_messages(), next_number(), size());
      ranks.begin_step(7);
      const Tensor received = torch::zeros_like(codes);
      if (rank() > 0) {
        // Goes the way of the exchange, with bytes of its own.
        const Tensor lengths = torch::full({size()}, row.length, at::kLong);
        ranks.all_to_all("the exchange of lengths of codes", lengths, torch::zeros_like(lengths),
                         ranks.all());
        if (row.bytes.empty()) continue;  // rank 0 waits for nothing more
        std::vector<SliceExchange::Transfer> sent, from;
        const std::int64_t of_rank_0 =
            kernels::encode_level_code(codes.const_data_ptr<std::uint8_t>(), 8, kBits,
                                       torch::empty({most}, at::kByte).mutable_data_ptr<std::uint8_t>());
        sent.push_back({0, torch::tensor(row.bytes, at::kByte)});
        from.push_back({0, torch::empty({of_rank_0}, at::kByte)});
        ranks.transfer("codes", sent, from, at::TensorOptions().dtype(at::kByte));
        continue;
      }
      std::string told;
      try {
        all_to_all_entropy_coded(ranks, "codes", codes, received, ranks.all(), kBits);
      } catch (const RankFailed& error) {
        told = error.what();
        EXPECT_EQ(error.failed_rank(), size() - 1);  // from which it hears first
      }
      if (row.told == nullptr) {
        EXPECT_EQ(told, "");
        EXPECT_TRUE(torch::equal(received, codes));
        continue;
      }
      EXPECT_NE(told.find(row.told), std::string::npos) << told;
      const std::string who = "codes in step 7 failed: rank " + std::to_string(size() - 1);
      EXPECT_NE(told.find(who), std::string::npos) << told;
    }
  }
}

// What has no code is added up as it is.
TEST(CodedExchange, OtherDtypesAreAddedUpAsTheyAre) {
  for (const Row& row : rows(/*all_bits=*/false)) {
    if (row.reduction != Reduction::kSum) continue;
    const auto exchange = make_gradient_exchange(group(), next_number(), row.degree, row.options());
    exchange->begin_step(1);
    const std::int64_t elements = std::int64_t{256} * row.degree;
    Tensor expected = torch::zeros({elements}, at::kDouble);
    for (int of = 0; of < size(); ++of) expected += gradient(of, 0, elements);
    const Tensor flat = gradient(rank(), 0, elements).to(at::kDouble);
    const Tensor own = row.divided() ? exchange->ranks().own_slice(flat) : flat;
    exchange->exchange({0, flat, own, one_parameter(elements)});
    EXPECT_TRUE(torch::equal(own, row.divided() ? exchange->ranks().own_slice(expected) : expected))
        << row.text();
  }
}

}  // namespace
}  // namespace reef
