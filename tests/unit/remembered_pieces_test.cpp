// What an exchange remembers, for other ranks, against one element after another; and steps that are used or
// not.
#include "shard/remembered_pieces.h"

#include <gtest/gtest.h>
#include <torch/torch.h>

#include <functional>
#include <iterator>
#include <map>
#include <random>
#include <string>
#include <vector>

#include "reef/error.h"
#include "shard/exchange_memory.h"

namespace reef {
namespace {

using at::Tensor;

constexpr std::int64_t kElements = 97;

/// Whole numbers, whose sums are exact.
Tensor whole_numbers(std::int64_t elements) { return torch::randint(-1000, 1000, {elements}).to(at::kFloat); }

/// Of elements [0, kElements) in so many slices.
RememberedRange slice(int number, int slices) {
  return {kElements * number / slices, kElements * (number + 1) / slices};
}

/// What so many ranks have, in copies of so many slices: pieces, by rank, or cut further at random.
std::vector<RememberedPiece> pieces_of(int ranks, int slices, std::mt19937& random) {
  std::vector<RememberedPiece> pieces;
  for (int rank = 0; rank < ranks; ++rank) {
    const RememberedRange own = slice(rank % slices, slices);
    const std::int64_t cut =
        own.first + static_cast<std::int64_t>(random() % static_cast<unsigned>(own.last - own.first));
    const Tensor values = whole_numbers(own.last - own.first);
    if (cut > own.first) pieces.push_back({rank, own.first, cut, values.slice(0, 0, cut - own.first)});
    pieces.push_back({rank, cut, own.last, values.slice(0, cut - own.first)});
  }
  std::shuffle(pieces.begin(), pieces.end(), random);
  return pieces;
}

/// By rank, what it has of an element.
std::map<std::int64_t, float> of_element(const std::vector<RememberedPiece>& pieces, std::int64_t element) {
  std::map<std::int64_t, float> found;
  for (const RememberedPiece& piece : pieces) {
    if (element >= piece.first && element < piece.last)
      found[piece.rank] = piece.values.const_data_ptr<float>()[element - piece.first];
  }
  return found;
}

// From so many ranks and slices to so many others: the sum of each element is what it was, and with as many
// that have it each share is.
TEST(RememberedPieces, SharesOfAnElementStayTogether) {
  std::mt19937 random(5);
  torch::manual_seed(5);
  for (int before = 1; before <= 4; ++before) {
    for (int slices_before = 1; slices_before <= before; ++slices_before) {
      if (before % slices_before != 0) continue;
      const std::vector<RememberedPiece> pieces = pieces_of(before, slices_before, random);
      for (int after = 1; after <= 5; ++after) {
        for (int slices = 1; slices <= after; ++slices) {
          if (after % slices != 0) continue;
          std::vector<float> sums(kElements, 0);
          for (int rank = 0; rank < after; ++rank) {
            const RememberedRange range = slice(rank % slices, slices);
            const Tensor share = share_of("w", pieces, range, rank / slices, after / slices);
            ASSERT_EQ(share.numel(), range.last - range.first);
            for (std::int64_t element = range.first; element < range.last; ++element) {
              const float found = share.const_data_ptr<float>()[element - range.first];
              sums[static_cast<std::size_t>(element)] += found;
              if (before / slices_before != after / slices) continue;
              const std::map<std::int64_t, float> had = of_element(pieces, element);
              EXPECT_EQ(found, std::next(had.begin(), rank / slices)->second);
            }
          }
          for (std::int64_t element = 0; element < kElements; ++element) {
            float expected = 0;
            for (const auto& [rank, value] : of_element(pieces, element)) expected += value;
            EXPECT_EQ(sums[static_cast<std::size_t>(element)], expected)
                << before << "/" << slices_before << " to " << after << "/" << slices << ", " << element;
          }
        }
      }
    }
  }
}

TEST(RememberedPieces, AddsUpInTheOrderOfRanks) {
  torch::manual_seed(6);
  std::vector<RememberedPiece> pieces;
  for (const int rank : {2, 0, 3, 1, 4})
    pieces.push_back({rank, 0, kElements, torch::randn({kElements}).mul(1e3)});
  const auto of = [&](int rank) {
    for (const RememberedPiece& piece : pieces) {
      if (piece.rank == rank) return piece.values;
    }
    return Tensor();
  };
  EXPECT_TRUE(torch::equal(share_of("w", pieces, {0, kElements}, 0, 2), of(0).add(of(2)).add(of(4))));
  EXPECT_TRUE(torch::equal(share_of("w", pieces, {0, kElements}, 1, 2), of(1).add(of(3))));
  EXPECT_TRUE(torch::equal(share_of("w", pieces, {5, 9}, 6, 7), torch::zeros({4})));
}

// Nothing, part of it, all of it, and twice.
TEST(RememberedPieces, WhatIsMissingIsZeroOrRefused) {
  const Tensor values = torch::arange(10, at::kFloat);
  EXPECT_FALSE(share_of("w", {}, {0, 10}, 0, 1).defined());
  EXPECT_FALSE(alike_of("w", {{0, 20, 30, values}}, {0, 20}).defined());
  const Tensor share = share_of("w", {{0, 5, 15, values}}, {0, 20}, 0, 1);
  EXPECT_TRUE(torch::equal(share.slice(0, 5, 15), values));
  EXPECT_EQ(share.abs().sum().item<float>(), values.sum().item<float>());

  const auto says = [](const std::function<void()>& what, const std::string& text) {
    try {
      what();
      ADD_FAILURE() << "nothing was thrown; expected: " << text;
    } catch (const ConfigError& error) {
      EXPECT_NE(message_of(error).find(text), std::string::npos) << message_of(error);
    }
  };
  says([&] { alike_of("w", {{0, 5, 15, values}}, {0, 15}); }, "w: elements from 0 on are in none");
  says(
      [&] {
        share_of("w", {{1, 0, 10, values}, {1, 5, 15, values}}, {0, 15}, 0, 2);
      },
      "w: elements from 5 on are given twice for rank 1");
  EXPECT_TRUE(torch::equal(alike_of("w", {{3, 0, 10, values + 1}, {1, 0, 10, values}}, {2, 6}),
                           values.slice(0, 2, 6)));

  EXPECT_TRUE(torch::equal(exactly("w", values, at::kDouble), values.to(at::kDouble)));
  EXPECT_TRUE(torch::equal(exactly("w", values, at::kBFloat16).to(at::kFloat), values));
  says([&] { exactly("w", values + 1e-3, at::kBFloat16); },
       "w is of Float in the state and of BFloat16 here");
  says([&] { exactly("w", torch::complex(values, values), at::kFloat); }, "w is of ComplexFloat");
}

TEST(ExchangeMemory, AStepCountsOnceItIsUsed) {
  ExchangeMemory memory("some method", {{"residual"}}, {"steps"});
  const auto is = [&](const Tensor& tensor, std::int64_t steps) {
    const Tensor found = memory.tensor(2, "residual");
    EXPECT_TRUE(found.is_same(tensor) || (!found.defined() && !tensor.defined()));
    EXPECT_EQ(memory.number("steps"), steps);
  };
  const auto step = [&](const Tensor& tensor) {
    memory.remember(2, "residual", tensor);
    memory.remember("steps", memory.number("steps") + 1);
  };
  const Tensor first = torch::ones({3}), second = torch::ones({3});
  is({}, 0);
  step(first);
  is({}, 0);
  memory.forget_step();
  memory.keep_step();
  is({}, 0);
  step(first);
  memory.keep_step();
  is(first, 1);
  step(second);
  step(second);  // another bucket of the same step
  is(first, 1);
  memory.forget_step();
  is(first, 1);
  step(second);
  memory.keep_step();
  is(second, 2);
  step({});
  memory.keep_step();
  is({}, 3);
  EXPECT_FALSE(memory.tensor(1, "residual").defined());
  step(first);
  memory.keep_step();
  memory.clear();
  is({}, 0);
}

// Of elements that no rank has used what there was stays, whether or not there was something before.
TEST(ExchangeMemory, WhatIsLeftOutOfAStepStays) {
  ExchangeMemory memory(
      "some method",
      {{"residual"}, {"of_sum", RememberedTensor::Ranks::kShares, RememberedTensor::Extent::kSlice}});
  const auto step = [&](float value) {
    memory.remember(0, "residual", torch::full({12}, value));
    memory.remember(0, "of_sum", torch::full({4}, value));
  };
  const auto is = [&](const std::vector<float>& residual, const std::vector<float>& of_sum) {
    EXPECT_TRUE(torch::equal(memory.tensor(0, "residual"), torch::tensor(residual)));
    EXPECT_TRUE(torch::equal(memory.tensor(0, "of_sum"), torch::tensor(of_sum)));
  };
  constexpr int kSlice = 1;  // elements 4 to 7
  step(1);
  memory.leave_out(0, 2, 3, kSlice);
  memory.keep_step();
  is({1, 1, 0, 0, 0, 1, 1, 1, 1, 1, 1, 1}, {0, 1, 1, 1});
  step(2);
  memory.leave_out(0, 7, 5, kSlice);
  memory.leave_out(1, 0, 12, kSlice);  // another bucket
  memory.keep_step();
  is({2, 2, 2, 2, 2, 2, 2, 1, 1, 1, 1, 1}, {2, 2, 2, 1});
  memory.remember(0, "residual", {});  // all of it has been taken
  memory.leave_out(0, 0, 3, kSlice);
  memory.keep_step();
  is({2, 2, 2, 0, 0, 0, 0, 0, 0, 0, 0, 0}, {2, 2, 2, 1});
}

// Factors are of parameters, each of its own shape.
TEST(ExchangeMemory, FactorsAreOfParameters) {
  using Remembered = RememberedTensor;
  ExchangeMemory memory(
      "some method",
      {{"residual"}, {"factor", Remembered::Ranks::kAlike, Remembered::Extent::kFactor, [](at::IntArrayRef) {
                        return std::vector<std::int64_t>{2, 2};
                      }}});
  const auto step = [&](float value) {
    for (const std::int64_t first : {0, 8})
      memory.remember(3, "factor", torch::full({2, 2}, value + static_cast<float>(first)), first);
  };
  const auto is = [&](float first, float second) {
    EXPECT_TRUE(torch::equal(memory.tensor(3, "factor"), torch::full({2, 2}, first)));
    EXPECT_TRUE(torch::equal(memory.tensor(3, "factor", 8), torch::full({2, 2}, second)));
  };
  step(1);
  EXPECT_FALSE(memory.tensor(3, "factor", 8).defined());
  memory.keep_step();
  is(1, 9);
  step(2);
  memory.leave_out(3, 8, 4, /*slice=*/0);
  memory.keep_step();
  is(2, 9);
  step(3);
  memory.forget_step();
  is(2, 9);
  memory.remember(3, "factor", {}, 0);
  memory.keep_step();
  EXPECT_FALSE(memory.tensor(3, "factor").defined());
  EXPECT_TRUE(memory.tensor(3, "factor", 8).defined());
  memory.clear();
  EXPECT_FALSE(memory.tensor(3, "factor", 8).defined());
}

}  // namespace
}  // namespace reef
