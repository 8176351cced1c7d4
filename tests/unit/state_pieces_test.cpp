#include "shard/state_pieces.h"

#include <gtest/gtest.h>
#include <torch/torch.h>

#include <algorithm>
#include <cstdint>
#include <string>
#include <vector>

#include "reef/error.h"
#include "reef/optim.h"
#include "reef/optimizer_state.h"
#include "reef/part.h"
#include "reef/shard_layout.h"

namespace reef {
namespace {

using at::Tensor;

constexpr optim::StateFormat kFormats[] = {optim::StateFormat::kFloat32,
                                           optim::StateFormat::kBFloat16,
                                           optim::StateFormat::kInt8,
                                           optim::StateFormat::kInt4,
                                           optim::StateFormat::kCompanded8,
                                           optim::StateFormat::kInt8Compensated,
                                           optim::StateFormat::kInt4Compensated,
                                           optim::StateFormat::kCompanded8Compensated};

/// What AdamW keeps after two steps.
StateValues stepped(const Tensor& parameter, const std::vector<Tensor>& gradients,
                    optim::StateFormat format) {
  optim::AdamW optimizer({parameter}, optim::AdamWOptions().state(format).min_quantized_numel(0).master(
                                          optim::MasterWeights::kSplit));
  for (const Tensor& gradient : gradients) {
    parameter.mutable_grad() = gradient;
    optimizer.step();
  }
  return optimizer_state(optimizer).states.front().second;
}

void expect_same(const StateValues& found, const StateValues& expected, const std::string& where) {
  ASSERT_EQ(found.size(), expected.size()) << where;
  for (std::size_t i = 0; i < found.size(); ++i) {
    const auto& [key, value] = found[i];
    EXPECT_EQ(key, expected[i].first) << where;
    if (!value.isTensor()) {
      EXPECT_EQ(value.toInt(), expected[i].second.toInt()) << where << key;
      continue;
    }
    const Tensor a = value.toTensor(), b = expected[i].second.toTensor();
    EXPECT_EQ(a.dtype(), b.dtype()) << where << key;
    if (a.is_floating_point()) {
      EXPECT_EQ(a.sizes(), b.sizes()) << where << key;
      EXPECT_EQ(a.strides(), b.strides()) << where << key;
    }
    EXPECT_TRUE(torch::equal(a.view({-1}), b.reshape({-1}))) << where << key;
  }
}

/// Whole tiles from `first` on, and the rest with the last.
std::vector<std::int64_t> random_cuts(std::int64_t elements) {
  std::vector<std::int64_t> cuts = {0};
  while (cuts.back() < elements)
    cuts.push_back(std::min(elements, cuts.back() + kShardAlignment * (1 + std::rand() % 3)));
  return cuts;
}

// What a part's optimizer keeps is what is cut from that of the whole, and together they are the whole's.
TEST(StatePieces, AreWhatThePartsKeep) {
  torch::manual_seed(3);
  for (const std::int64_t elements :
       {1, 2, 128, 129, 255, 256, 257, 300, 384, 385, 511, 512, 513, 700, 1025, 1151, 1153, 2047, 3000}) {
    for (const optim::StateFormat format : kFormats) {
      const std::string where =
          std::to_string(elements) + " in format " + std::to_string(static_cast<int>(format)) + ": ";
      const Tensor start = torch::randn({elements}).to(torch::kBFloat16);
      std::vector<Tensor> gradients;
      for (int i = 0; i < 2; ++i) gradients.push_back(torch::randn({elements}).to(torch::kBFloat16));
      const StateSubject subject{"w", start};
      const StateValues whole = stepped(start.clone(), gradients, format);
      const std::vector<std::int64_t> cuts = random_cuts(elements);
      std::vector<StateValues> parts;
      for (std::size_t i = 1; i < cuts.size(); ++i) {
        const auto cut = [&](const Tensor& of) { return of.slice(0, cuts[i - 1], cuts[i]).clone(); };
        const Tensor part = cut(start);
        set_part(part, {cuts[i - 1], elements});
        std::vector<Tensor> of_part;
        for (const Tensor& gradient : gradients) of_part.push_back(cut(gradient));
        parts.push_back(stepped(part, of_part, format));
        expect_same(part_values(subject, cuts[i - 1], cuts[i], {{0, elements, &whole}}), parts.back(), where);
      }
      std::vector<StatePiece> pieces;
      for (std::size_t i = 1; i < cuts.size(); ++i) pieces.push_back({cuts[i - 1], cuts[i], &parts[i - 1]});
      std::reverse(pieces.begin(), pieces.end());
      expect_same(whole_values(subject, pieces), whole, where);
      const std::vector<std::int64_t> others = random_cuts(elements);
      for (std::size_t i = 1; i < others.size(); ++i) {
        expect_same(part_values(subject, others[i - 1], others[i], pieces),
                    part_values(subject, others[i - 1], others[i], {{0, elements, &whole}}), where);
      }
    }
  }
}

TEST(StatePieces, AreInTheOrderOfMemory) {
  const Tensor like = torch::empty({3, 20, 7, 5}).contiguous(torch::MemoryFormat::ChannelsLast);
  const StateSubject subject{"w", like};
  for (const Tensor& kept : {torch::randn_like(like), torch::randn_like(like).contiguous()}) {
    const StateValues whole = {{"exp_avg", kept}};
    const std::int64_t n = kept.numel();
    const StateValues first = part_values(subject, 0, 512, {{0, n, &whole}});
    const StateValues rest = part_values(subject, 512, n, {{0, n, &whole}});
    const Tensor flat = torch::cat({first[0].second.toTensor(), rest[0].second.toTensor()});
    EXPECT_TRUE(torch::equal(flat, kept.permute({0, 2, 3, 1}).reshape({-1})));
    const Tensor again = whole_values(subject, {{0, 512, &first}, {512, n, &rest}})[0].second.toTensor();
    EXPECT_TRUE(torch::equal(again, kept));
    EXPECT_EQ(again.strides(), like.strides());
  }
}

TEST(StatePieces, ThatDoNotFitAreRefused) {
  const StateSubject subject{"layer.w", torch::empty({1000})};
  const StateValues half = {{"sum", torch::ones({512})}};
  const StateValues other = {{"else", torch::ones({488})}};
  const StateValues rows = {{"row", torch::ones({10})}};
  const auto expect_error = [&](const std::vector<StatePiece>& pieces, const std::string& text) {
    try {
      part_values(subject, 256, 1000, pieces);
      FAIL() << text;
    } catch (const ConfigError& error) {
      EXPECT_NE(std::string(error.what()).find(text), std::string::npos) << error.what();
    }
  };
  expect_error({{0, 512, &half}}, "elements from 512 on of layer.w are in none of the pieces");
  expect_error({{512, 1000, &half}}, "elements from 256 on of layer.w are in none of the pieces");
  expect_error({{0, 512, &half}, {512, 1000, &other}}, "pieces of layer.w have not all a state sum");
  expect_error({{0, 1000, &rows}},
               "state row of layer.w has 10 entries for 1000 elements, and cannot be divided");
}

// Numbers have the shape of the part, codes and scales one dimension; a shape is kept for what is as many as
// elements, whatever its dtype.
TEST(StatePieces, AreShapedAsThePartsThatKeepThem) {
  for (const at::IntArrayRef sizes :
       std::vector<std::vector<std::int64_t>>{{1000}, {20, 50}, {5, 2, 10, 10}}) {
    const Tensor like = torch::randn(sizes);
    std::vector<std::int64_t> expected(sizes.size(), 1);
    expected.back() = 488;
    const StateSubject subject{"w", like};
    const StateValues whole = {{"exp_avg", torch::randn_like(like)},
                               {"wave", torch::randn(sizes, torch::kComplexFloat)},
                               {"split", torch::randint(256, sizes, torch::kByte)},
                               {"codes", torch::randint(256, {1000}, torch::kByte)},
                               {"codes_scale", torch::randn({4})},
                               {"step", torch::tensor(3.0)}};
    const StateValues first = kept_values(subject, 0, 512, {{0, 1000, &whole}});
    const StateValues rest = kept_values(subject, 512, 1000, {{0, 1000, &whole}});
    for (std::size_t i = 0; i < 3; ++i)
      EXPECT_EQ(rest[i].second.toTensor().sizes(), expected) << rest[i].first;
    EXPECT_EQ(rest[3].second.toTensor().sizes(), at::IntArrayRef({488}));
    EXPECT_EQ(rest[4].second.toTensor().sizes(), at::IntArrayRef({2}));
    for (const auto& [piece_first, piece_last, values] :
         std::vector<StatePiece>{{0, 512, &first}, {512, 1000, &rest}})
      EXPECT_NO_THROW(check_by_element(subject, {piece_first, piece_last, values}));
    const StateValues again = whole_values(subject, {{0, 512, &first}, {512, 1000, &rest}});
    for (std::size_t i = 0; i < whole.size(); ++i)
      EXPECT_TRUE(torch::equal(again[i].second.toTensor(), whole[i].second.toTensor())) << whole[i].first;
  }
  const Tensor none = torch::empty({0, 5});
  const StateValues kept = {{"exp_avg", none}, {"step", torch::tensor(1.0)}};
  EXPECT_EQ(whole_values({"w", none}, {{0, 0, &kept}})[0].second.toTensor().sizes(), none.sizes());
  const StateValues one = {{"exp_avg", torch::ones({})}};
  EXPECT_EQ(kept_values({"w", torch::ones({})}, 0, 1, {{0, 1, &one}})[0].second.toTensor().dim(), 0);
}

TEST(StatePieces, ThatAreNotByElementAreRefused) {
  const StateSubject subject{"w", torch::empty({20, 50})};
  const auto refused = [&](const c10::IValue& value, std::int64_t first, std::int64_t last) {
    const StateValues values = {{"kept", value}};
    try {
      check_by_element(subject, {first, last, &values});
      return false;
    } catch (const ConfigError& error) {
      EXPECT_NE(std::string(error.what()).find("state kept of w is a "), std::string::npos) << error.what();
      return true;
    }
  };
  const auto zeros = [](std::vector<std::int64_t> sizes) { return torch::zeros(sizes); };
  EXPECT_FALSE(refused(zeros({20, 50}), 0, 1000));
  EXPECT_FALSE(refused(zeros({1000}), 0, 1000));
  EXPECT_FALSE(refused(zeros({1, 488}), 512, 1000));
  EXPECT_FALSE(refused(zeros({488}), 512, 1000));
  EXPECT_FALSE(refused(zeros({}), 512, 1000));
  EXPECT_FALSE(refused(torch::zeros({488}, torch::kByte), 512, 1000));
  EXPECT_FALSE(refused(3, 512, 1000));
  EXPECT_TRUE(refused(zeros({1, 50}), 0, 1000));   // of rows
  EXPECT_TRUE(refused(zeros({20, 1}), 0, 1000));   // and columns
  EXPECT_TRUE(refused(zeros({4}), 0, 1000));       // as many as scales, and none
  EXPECT_TRUE(refused(zeros({50, 20}), 0, 1000));  // transposed
  EXPECT_TRUE(refused(zeros({1, 1}), 512, 1000));
  EXPECT_TRUE(refused(std::vector<Tensor>{zeros({488})}, 512, 1000));
}

TEST(StatePieces, HaveNames) {
  EXPECT_EQ(piece_name("a.b", 256, 700), "a.b[256:700]");
  for (const auto& [text, parameter, first, last] :
       std::vector<std::tuple<std::string, std::string, std::int64_t, std::int64_t>>{
           {"a.b[256:700]", "a.b", 256, 700},
           {"a.b", "a.b", 0, -1},
           {"a[0].b", "a[0].b", 0, -1},
           {"a[0][0:5]", "a[0]", 0, 5},
           {"a[3]", "a[3]", 0, -1},
           {"a[3:]", "a[3:]", 0, -1},
           {"a[:3]", "a[:3]", 0, -1},
           {"a[1:2:3]", "a[1:2:3]", 0, -1},
           {"", "", 0, -1}}) {
    const PieceName piece = parse_piece_name(text);
    EXPECT_EQ(piece.parameter, parameter);
    EXPECT_EQ(piece.first, first);
    EXPECT_EQ(piece.last, last);
  }
}

}  // namespace
}  // namespace reef
