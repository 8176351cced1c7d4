// Run as several ranks by tests/support/ranks.py.
#include "reef/point_to_point.h"

#include <functional>
#include <optional>

#include "messages.h"
#include "reef/collectives.h"
#include "reef/subgroup.h"

namespace reef {
namespace {

using messages::config_error;
using messages::expect_words;
using messages::Held;
using messages::rank;
using messages::same;
using messages::size;
using messages::value;
using messages::world;

const std::vector<at::ScalarType> kDtypes = {at::kFloat,
                                             at::kDouble,
                                             at::kHalf,
                                             at::kBFloat16,
                                             at::kByte,
                                             at::kChar,
                                             at::kShort,
                                             at::kInt,
                                             at::kLong,
                                             at::kBool,
                                             at::kUInt16,
                                             at::kUInt32,
                                             at::kUInt64,
                                             at::kComplexHalf,
                                             at::kComplexFloat,
                                             at::kComplexDouble,
                                             at::kFloat8_e4m3fn,
                                             at::kFloat8_e5m2,
                                             at::kFloat8_e4m3fnuz,
                                             at::kFloat8_e5m2fnuz};
const std::vector<std::vector<std::int64_t>> kShapes = {
    {}, {0}, {1}, {3}, {2, 0, 5}, {7, 3}, {2, 3, 4, 1, 5}};

/// Calls `body` for every pair of ranks, on both of them: with whether this one sends, and the other.
void for_every_pair(const std::function<void(bool sends, int other)>& body) {
  for (int from = 0; from < size(); ++from) {
    for (int to = 0; to < size(); ++to) {
      if (from != to && rank() == from) body(true, to);
      if (from != to && rank() == to) body(false, from);
    }
  }
}

TEST(PointToPoint, EveryDtypeAndShape) {
  for_every_pair([](bool sends, int other) {
    std::int64_t seed = 0;
    for (const auto dtype : kDtypes) {
      for (const auto& shape : kShapes) {
        const at::Tensor expected = value(++seed, shape, dtype);
        if (sends) {
          send(expected, other, world(), seed);
          send(expected, other, world(), seed);
          continue;
        }
        const at::Tensor came = receive(other, world(), seed);
        EXPECT_TRUE(same(came, expected)) << dtype << shape;
        EXPECT_TRUE(came.is_contiguous() && !came.requires_grad());
        const at::Tensor into = at::empty(shape, dtype);
        receive_into(into, other, world(), seed);
        EXPECT_TRUE(same(into, expected)) << dtype << shape;
      }
    }
  });
}

TEST(PointToPoint, LayoutsAreSentAsValues) {
  const at::Tensor flat = value(1, {4, 6}, at::kFloat);
  const at::Tensor complex = value(2, {3, 2}, at::kComplexFloat);
  const std::vector<at::Tensor> layouts = {
      flat.t(),
      flat.slice(1, 1, 6, 2),
      flat.select(0, 2),
      flat[0].expand({3, 6}),
      at::ones({1}).expand({2, 2}),
      complex.conj(),
      at::imag(complex.conj()),  // negated
      complex.t(),
      flat.clone().requires_grad_(),
      flat.clone().requires_grad_() * 2,
      value(3, {2, 3, 4, 5}, at::kFloat).contiguous(at::MemoryFormat::ChannelsLast),
      flat.slice(0, 2),  // in order, from the middle of its memory
      flat.permute({1, 0}).slice(0, 3, 3),
  };
  for_every_pair([&](bool sends, int other) {
    for (std::size_t i = 0; i < layouts.size(); ++i) {
      if (sends) {
        send(layouts[i], other, world());
        send(layouts[i], other, world());
      } else {
        EXPECT_TRUE(same(receive(other, world()), layouts[i])) << i;
        const auto sizes = layouts[i].sizes();
        // Every second element of larger memory, which keeps the others.
        const at::Tensor memory =
            at::zeros({layouts[i].numel() * 2}, layouts[i].options().requires_grad(false));
        const at::Tensor into = memory.slice(0, 1, memory.numel(), 2).view(sizes);
        receive_into(into, other, world());
        EXPECT_TRUE(same(into, layouts[i])) << i;
        EXPECT_EQ(memory.slice(0, 0, memory.numel(), 2).count_nonzero().item<std::int64_t>(), 0) << i;
      }
    }
  });
}

TEST(PointToPoint, IntoParametersConjugatesAndMemoryThatAutogradWatches) {
  for_every_pair([](bool sends, int other) {
    const at::Tensor numbers = value(4, {5}, at::kFloat);
    const at::Tensor complex = value(5, {5}, at::kComplexFloat);
    if (sends) {
      for (int i = 0; i < 2; ++i) send(numbers, other, world());
      send(complex, other, world());
      return;
    }
    const at::Tensor leaf = at::zeros({5}).requires_grad_();
    const auto version = leaf._version();
    receive_into(leaf, other, world());
    EXPECT_TRUE(same(leaf, numbers) && leaf.is_leaf() && leaf.requires_grad());
    EXPECT_GT(leaf._version(), version) << "autograd must see the change";
    {
      const c10::InferenceMode inference;
      const at::Tensor into = at::zeros({5});
      receive_into(into, other, world());
      EXPECT_TRUE(same(into, numbers));
    }
    const at::Tensor memory = at::zeros({5}, at::kComplexFloat);
    receive_into(memory.conj(), other, world());
    EXPECT_TRUE(same(memory, complex.conj()));
  });
}

TEST(PointToPoint, LargerThanOneChunk) {
  const std::int64_t elements = (std::int64_t{16} << 20) * 2 + 3;
  for_every_pair([&](bool sends, int other) {
    if (rank() > 1 || other > 1) return;
    const at::Tensor whole = value(6, {elements}, at::kByte);
    if (sends) {
      send(whole, other, world());
      expect_words(config_error([&] { send(whole, other, world()); }), {"33554435", "5"});
      send(whole, other, world());
    } else {
      EXPECT_TRUE(same(receive(other, world()), whole));
      EXPECT_NE(config_error([&] { receive_into(at::zeros({5}, at::kByte), other, world()); }), "");
      const at::Tensor into = at::zeros({elements}, at::kByte);
      receive_into(into, other, world());
      EXPECT_TRUE(same(into, whole));
    }
  });
}

struct Disagreement {
  at::Tensor sent;
  std::int64_t sent_tag;
  at::Tensor wanted;  ///< undefined: anything
  std::int64_t wanted_tag;
  std::vector<std::string> words;  ///< that both are told
};

std::vector<Disagreement> disagreements() {
  const auto zeros = [](std::vector<std::int64_t> sizes, at::ScalarType dtype = at::kFloat) {
    return at::zeros(sizes, dtype);
  };
  return {
      {zeros({2, 3}), 1, zeros({3, 2}), 1, {"Float [2, 3]", "Float [3, 2]"}},
      {zeros({6}), 1, zeros({3, 2}), 1, {"Float [6]", "Float [3, 2]"}},
      {zeros({}), 1, zeros({1}), 1, {"Float []", "Float [1]"}},
      {zeros({0}), 1, zeros({0, 1}), 1, {"Float [0]", "Float [0, 1]"}},
      {zeros({4}), 1, zeros({0}), 1, {"Float [4]", "Float [0]"}},
      {zeros({0}), 1, zeros({4}), 1, {"Float [0]", "Float [4]"}},
      {zeros({3}, at::kFloat), 1, zeros({3}, at::kInt), 1, {"Float [3]", "Int [3]"}},
      {zeros({3}, at::kHalf), 1, zeros({3}, at::kBFloat16), 1, {"Half [3]", "BFloat16 [3]"}},
      {zeros({3}, at::kByte), 1, zeros({3}, at::kBool), 1, {"Byte [3]", "Bool [3]"}},
      {zeros({3}), 1, zeros({3}), 2, {"tag 1", "tag 2", "Float [3]"}},
      {zeros({3}), -1, {}, 1, {"tag -1", "tag 1", "Float [3]", "anything"}},
      {zeros({3}),
       0,
       zeros({4}),
       std::int64_t{1} << 40,
       {"tag 0", "tag 1099511627776", "Float [3]", "Float [4]"}},
  };
}

TEST(PointToPoint, SidesThatDisagreeAreBothToldBothAndGoOn) {
  for_every_pair([](bool sends, int other) {
    std::int64_t seed = 0;
    for (const auto& row : disagreements()) {
      const at::Tensor good = value(++seed, {4}, at::kFloat);
      for (const bool waits : {true, false}) {
        if (sends) {
          const auto text = config_error([&] {
            if (waits) return send(row.sent, other, world(), row.sent_tag);
            isend(row.sent, other, world(), row.sent_tag).wait();
          });
          expect_words(text, row.words);
          expect_words(text, {"rank " + std::to_string(rank()), "rank " + std::to_string(other)});
          send(good, other, world(), seed);
          continue;
        }
        const at::Tensor into = row.wanted.defined() ? row.wanted.clone() : at::Tensor();
        const auto text = config_error([&] {
          if (into.defined()) {
            if (waits) return receive_into(into, other, world(), row.wanted_tag);
            ireceive_into(into, other, world(), row.wanted_tag).wait();
          } else {
            if (waits) {
              receive(other, world(), row.wanted_tag);
            } else {
              ireceive(other, world(), row.wanted_tag).wait();
            }
          }
        });
        expect_words(text, row.words);
        expect_words(text, {"rank " + std::to_string(rank()), "rank " + std::to_string(other)});
        if (into.defined()) {
          EXPECT_TRUE(same(into, row.wanted)) << "nothing may be written";
        }
        EXPECT_TRUE(same(receive(other, world(), seed), good));
      }
    }
  });
  barrier(world());
}

TEST(PointToPoint, TagsInAnotherOrderAreToldForEachMessage) {
  for_every_pair([](bool sends, int other) {
    const at::Tensor first = value(1, {2}, at::kFloat);
    const at::Tensor second = value(2, {3}, at::kDouble);
    if (sends) {
      expect_words(config_error([&] { send(first, other, world(), 1); }), {"Float [2]", "tag 1", "tag 2"});
      expect_words(config_error([&] { send(second, other, world(), 2); }), {"Double [3]", "tag 2", "tag 1"});
      send(first, other, world(), 3);
    } else {
      expect_words(config_error([&] { receive(other, world(), 2); }), {"Float [2]", "tag 1", "tag 2"});
      expect_words(config_error([&] { receive(other, world(), 1); }), {"Double [3]", "tag 2", "tag 1"});
      EXPECT_TRUE(same(receive(other, world(), 3), first));
    }
  });
}

TEST(PointToPoint, ManyUnderWayAtOnceAndWaitedForInAnyOrder) {
  if (size() == 1) GTEST_SKIP();
  barrier(world());
  const Held before;
  constexpr int kMessages = 60;
  std::vector<Message> sent;
  std::vector<std::vector<Message>> coming(static_cast<std::size_t>(size()));
  for (int i = 0; i < kMessages; ++i) {
    for (int other = 0; other < size(); ++other) {
      if (other == rank()) continue;
      sent.push_back(isend(value(rank() * 1000 + i, {i % 7, 3}, at::kFloat), other, world(), i));
      coming[static_cast<std::size_t>(other)].push_back(ireceive(other, world(), i));
    }
  }
  // One that waits has its turn behind those that do not.
  const int next = (rank() + 1) % size();
  const int last = (rank() + size() - 1) % size();
  const auto beside = ireceive(last, world(), 777);
  send(value(rank(), {9}, at::kInt), next, world(), 777);
  EXPECT_TRUE(same(beside.wait(), value(last, {9}, at::kInt)));
  EXPECT_TRUE(beside.is_through());
  for (int other = 0; other < size(); ++other) {
    auto& from_other = coming[static_cast<std::size_t>(other)];
    for (int i = static_cast<int>(from_other.size()) - 1; i >= 0; --i) {
      const auto& message = from_other[static_cast<std::size_t>(i)];
      EXPECT_TRUE(same(message.wait(), value(other * 1000 + i, {i % 7, 3}, at::kFloat)));
      EXPECT_TRUE(message.wait().is_same(message.wait()));
    }
  }
  for (const auto& message : sent) message.wait();
  sent.clear();
  coming.clear();
  EXPECT_TRUE(Held::becomes_at_most(before));  // a thread only while there is something to do
}

TEST(PointToPoint, WhatIsNotInOrderIsSentAsItWasAtTheCall) {
  for_every_pair([](bool sends, int other) {
    const at::Tensor memory = value(1, {4, 4}, at::kFloat);
    if (sends) {
      const at::Tensor changes = memory.clone();
      const auto message = isend(changes.t(), other, world());
      changes.zero_();
      message.wait();
    } else {
      EXPECT_TRUE(same(receive(other, world()), memory.t()));
    }
  });
}

TEST(PointToPoint, MessagesMayBeDroppedAndTheGroupWithThem) {
  if (size() == 1) GTEST_SKIP();
  const Held before;
  for (int round = 0; round < 5; ++round) {
    auto group = subgroup(world(), {0, 1});
    if (!group) continue;
    const int other = 1 - group->getRank();
    const at::Tensor into = at::zeros({3});
    isend(at::ones({3}), other, group);
    auto coming = ireceive_into(into, other, group);
    group.reset();
    coming.wait();
    EXPECT_TRUE(at::equal(into, at::ones({3})));
  }
  EXPECT_TRUE(Held::becomes_at_most(before));
  barrier(world());
}

TEST(PointToPoint, ThreadsWithPartnersOfTheirOwn) {
  if (size() == 1) GTEST_SKIP();
  std::vector<std::thread> threads;
  std::vector<int> right(static_cast<std::size_t>(size()), 0);
  for (int other = 0; other < size(); ++other) {
    if (other == rank()) continue;
    threads.emplace_back([&, other] {
      for (int i = 0; i < 30; ++i) {
        const at::Tensor own = value(rank() * 100 + i, {i}, at::kLong);
        const at::Tensor its = value(other * 100 + i, {i}, at::kLong);
        if (rank() < other) send(own, other, world(), i);
        right[static_cast<std::size_t>(other)] += same(receive(other, world(), i), its) ? 1 : 0;
        if (rank() > other) send(own, other, world(), i);
      }
    });
  }
  for (auto& thread : threads) thread.join();
  for (int other = 0; other < size(); ++other) {
    const int expected = other == rank() ? 0 : 30;
    EXPECT_EQ(right[static_cast<std::size_t>(other)], expected) << other;
  }
}

TEST(PointToPoint, WrongArgumentsAreRefusedBeforeAnythingIsSent) {
  const at::Tensor good = at::ones({2});
  const int other = (rank() + 1) % size();
  const auto group = world();
  const std::vector<std::pair<std::function<void()>, std::string>> rows = {
      {[&] { send(good, rank(), group); }, "another rank"},
      {[&] { receive(rank(), group); }, "another rank"},
      {[&] { send(good, -1, group); }, "rank -1"},
      {[&] { receive_into(good, size(), group); }, "of " + std::to_string(size())},
      {[&] { isend(good, size(), group); }, "reef::isend"},
      {[&] { send(good, other, {}); }, "init_process_group"},
      {[&] { send({}, other, group); }, "undefined"},
      {[&] { send(good.to_sparse(), other, group); }, "not dense"},
      {[&] { send(at::empty({2}, at::kMeta), other, group); }, "no values"},
      {[&] { receive_into(at::ones({1}).expand({3}), other, group); }, "share memory"},
      {[&] { receive_into(at::quantize_per_tensor(good, 1.0, 0, at::kQInt8), other, group); }, "not dense"},
      {[&] { send(at::ones(std::vector<std::int64_t>(65, 1)), other, group); }, "65 dimensions"},
  };
  for (const auto& [call, words] : rows) expect_words(config_error(call), {words});
  barrier(world());
}

}  // namespace
}  // namespace reef
