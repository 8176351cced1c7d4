// Laws of every schedule in the table, for every small shape; and what is refused.
#include "reef/pipeline_schedule.h"

#include <gtest/gtest.h>

#include <map>
#include <set>
#include <string>
#include <vector>

#include "reef/pipeline_generator.h"
#include "support/config_error.h"

namespace reef {
namespace {

using test::config_error;
using Kind = PipelineAction::Kind;

std::string told(std::string_view name, const PipelineShape& shape) {
  std::string text = std::string(name) + ", ranks " + std::to_string(shape.ranks) + ", micro-batches " +
                     std::to_string(shape.micro_batches) + ", chunks " +
                     std::to_string(shape.chunks_per_rank) + ", hops";
  for (const std::uint32_t hop : shape.hops) text += " " + std::to_string(hop);
  return text;
}

/// Calls `visit` with each schedule that the generator makes for up to 8 ranks, 25 micro-batches, 3 chunks a
/// rank and hops up to 3. Those that it does not take have to be refused with what it takes.
template <class Visit>
void for_each_shape(const PipelineGenerator& generator, const Visit& visit) {
  const std::vector<std::vector<std::uint32_t>> every_hops{{1}, {2}, {3}};
  for (std::uint32_t ranks = 1; ranks <= 8; ++ranks) {
    for (std::uint32_t micro_batches = 1; micro_batches <= 25; ++micro_batches) {
      for (std::uint32_t chunks = 1; chunks <= 3; ++chunks) {
        for (const std::vector<std::uint32_t>& hops : every_hops) {
          const PipelineShape shape{ranks, micro_batches, chunks, hops};
          PipelineSchedule schedule;
          const std::string error =
              config_error([&] { schedule = pipeline_schedule(generator.name, shape); });
          if (error.empty()) {
            visit(shape, schedule);
          } else {
            const bool by_chunks = error.find("chunks of the model") != std::string::npos;
            const bool by_shape =
                !generator.takes.empty() && error.find(generator.takes) != std::string::npos;
            EXPECT_TRUE(by_chunks || by_shape) << error;
          }
        }
      }
    }
  }
}

TEST(PipelineSchedule, EveryScheduleOfTheTableRunsForEveryShapeThatItTakes) {
  for (const PipelineGenerator& generator : pipeline_generators()) {
    std::size_t made = 0;
    for_each_shape(generator, [&](const PipelineShape& shape, const PipelineSchedule& schedule) {
      ++made;
      EXPECT_EQ(config_error([&] { check(schedule); }), "") << told(generator.name, shape);
      EXPECT_TRUE(adds_in_order(schedule)) << told(generator.name, shape);
      EXPECT_EQ(schedule.ranks(), shape.ranks);
      EXPECT_EQ(schedule.micro_batches, shape.micro_batches);
      EXPECT_EQ(schedule.chunks(), shape.ranks * (schedule.rank_of.size() == 2 ? 1 : shape.chunks_per_rank));
      bool splits = false, updates = false;
      for (const std::vector<PipelineAction>& actions : schedule.actions) {
        for (const PipelineAction& action : actions) {
          splits = splits || action.kind == Kind::kInput;
          updates = updates || action.kind == Kind::kUpdate;
        }
      }
      EXPECT_EQ(splits, generator.splits) << told(generator.name, shape);
      EXPECT_TRUE(generator.synchronous ? !updates
                                        : schedule.versions.kind != PipelineVersionRule::Kind::kFlush);
    });
    EXPECT_GE(made, generator.takes.empty() ? 600U : 70U) << generator.name;
  }
}

TEST(PipelineSchedule, MessagesAreOneForEachCutBetweenRanksAndDirection) {
  for (const PipelineGenerator& generator : pipeline_generators()) {
    for_each_shape(generator, [&](const PipelineShape& shape, const PipelineSchedule& schedule) {
      std::size_t expected = 0;
      for (std::uint32_t m = 0; m < schedule.micro_batches; ++m) {
        for (std::uint32_t chunk = 0; chunk + 1 < schedule.chunks(); ++chunk)
          expected += schedule.rank(chunk, m) != schedule.rank(chunk + 1, m) ? 2 : 0;
      }
      const std::vector<PipelineMessage> messages = pipeline_messages(schedule);
      EXPECT_EQ(messages.size(), expected) << told(generator.name, shape);
      std::set<std::string> distinct;
      for (const PipelineMessage& message : messages) {
        EXPECT_NE(message.from, message.to);
        const bool output = message.kind == PipelineMessage::Kind::kOutput;
        EXPECT_EQ(message.from, schedule.rank(message.chunk, message.micro_batch));
        EXPECT_EQ(message.to,
                  schedule.rank(output ? message.chunk + 1 : message.chunk - 1, message.micro_batch));
        distinct.insert(std::to_string(message.chunk) + (output ? "o" : "g") +
                        std::to_string(message.micro_batch));
      }
      EXPECT_EQ(distinct.size(), expected);
    });
  }
}

/// Ranks as machines with blocking receives, and channels that hold `capacity` messages for each pair of
/// ranks: whether all of them end. A channel gives messages in the order in which they were sent.
bool runs_over_channels(const PipelineSchedule& schedule, std::size_t capacity) {
  struct Rank {
    std::size_t next = 0;
    std::vector<PipelineMessage> to_send;
  };
  std::vector<Rank> ranks(schedule.ranks());
  std::map<std::pair<std::uint32_t, std::uint32_t>, std::vector<PipelineMessage>> channels;
  std::map<std::uint32_t, std::vector<PipelineMessage>> sends;
  for (const PipelineMessage& message : pipeline_messages(schedule)) sends[message.from].push_back(message);
  const auto made_by = [](const PipelineAction& action, const PipelineMessage& message) {
    const bool output = message.kind == PipelineMessage::Kind::kOutput;
    const bool is_kind = output ? action.kind == Kind::kForward
                                : action.kind == Kind::kBackward || action.kind == Kind::kInput;
    return is_kind && action.chunk == message.chunk && action.micro_batch == message.micro_batch;
  };
  const auto needed_by = [](const PipelineAction& action, const PipelineMessage& message) {
    const bool output = message.kind == PipelineMessage::Kind::kOutput;
    const bool is_kind = output ? action.kind == Kind::kForward
                                : action.kind == Kind::kBackward || action.kind == Kind::kInput;
    return is_kind && action.chunk == (output ? message.chunk + 1 : message.chunk - 1) &&
           action.micro_batch == message.micro_batch;
  };
  for (bool moved = true; moved;) {
    moved = false;
    for (std::uint32_t rank = 0; rank < schedule.ranks(); ++rank) {
      Rank& of = ranks[rank];
      if (!of.to_send.empty()) {
        std::vector<PipelineMessage>& channel = channels[{rank, of.to_send.front().to}];
        if (channel.size() >= capacity) continue;
        channel.push_back(of.to_send.front());
        of.to_send.clear();
        moved = true;
      }
      if (of.next == schedule.actions[rank].size()) continue;
      const PipelineAction& action = schedule.actions[rank][of.next];
      bool may_run = true;
      for (std::uint32_t from = 0; from < schedule.ranks(); ++from) {
        for (const PipelineMessage& message : sends[from]) {
          if (message.to != rank || !needed_by(action, message)) continue;
          std::vector<PipelineMessage>& channel = channels[{from, rank}];
          may_run = !channel.empty() && channel.front() == message;
          if (may_run) channel.erase(channel.begin());
        }
      }
      if (!may_run) continue;
      for (const PipelineMessage& message : sends[rank]) {
        if (made_by(action, message)) of.to_send.push_back(message);
      }
      ++of.next;
      moved = true;
    }
  }
  for (std::uint32_t rank = 0; rank < schedule.ranks(); ++rank) {
    if (ranks[rank].next != schedule.actions[rank].size() || !ranks[rank].to_send.empty()) return false;
  }
  return true;
}

TEST(PipelineSchedule, WhatReceivesInOrderRunsOverChannelsWithoutTags) {
  std::map<bool, std::size_t> found;
  for (const PipelineGenerator& generator : pipeline_generators()) {
    for (const std::uint32_t ranks : {2U, 3U, 4U}) {
      for (const std::uint32_t micro_batches : {1U, 4U, 8U}) {
        for (const std::uint32_t chunks : {1U, 2U}) {
          PipelineSchedule schedule;
          const PipelineShape shape{ranks, micro_batches, chunks};
          if (!config_error([&] { schedule = pipeline_schedule(generator.name, shape); }).empty()) continue;
          ++found[receives_in_order(schedule)];
          EXPECT_EQ(runs_over_channels(schedule, 1000), receives_in_order(schedule))
              << told(generator.name, shape);
        }
      }
    }
  }
  EXPECT_GT(found[true], 80U);
  EXPECT_GT(found[false], 0U);
}

TEST(PipelineSchedule, JsonGivesTheSameScheduleBack) {
  for (const PipelineGenerator& generator : pipeline_generators()) {
    for_each_shape(generator, [&](const PipelineShape& shape, const PipelineSchedule& schedule) {
      if (shape.micro_batches % 8 != 0) return;
      EXPECT_EQ(pipeline_schedule_from_json(schedule.json()), schedule) << told(generator.name, shape);
    });
  }
}

TEST(PipelineSchedule, TextIsALineForEachRank) {
  EXPECT_EQ(pipeline_schedule("1f1b", {2, 2}).text(), "rank 0: 0F0 0F1 0B0 0B1\nrank 1: 1F0 1B0 1F1 1B1\n");
  EXPECT_EQ(pipeline_schedule("zero_bubble", {2, 2}).text(),
            "rank 0: 0F0 0F1 0I0 0W0 0I1 0W1\nrank 1: 1F0 1I0 1F1 1I1 1W0 1W1\n");
  EXPECT_EQ(pipeline_schedule("pipedream", {2, 2}).text(),
            "rank 0: 0F0 0F1 0B0 0U0 0B1 0U1\nrank 1: 1F0 1B0 1U0 1F1 1B1 1U1\n");
}

PipelineSchedule given(std::vector<std::vector<std::string>> lists, std::uint32_t micro_batches = 1) {
  std::string ranks, actions;
  for (std::size_t rank = 0; rank < lists.size(); ++rank) {
    ranks += (rank > 0 ? "," : "") + std::to_string(rank);
    actions += rank > 0 ? ",[" : "[";
    for (std::size_t i = 0; i < lists[rank].size(); ++i)
      actions += (i > 0 ? ",\"" : "\"") + lists[rank][i] + "\"";
    actions += "]";
  }
  return pipeline_schedule_from_json(R"({"name": "mine", "micro_batches": )" + std::to_string(micro_batches) +
                                     R"(, "rank_of": [[)" + ranks + R"(]], "actions": [)" + actions + "]}");
}

TEST(PipelineSchedule, AUsersOwnIsRead) {
  const PipelineSchedule mine =
      given({{"0F0", "0F1", "0B0", "0B1"}, {"1F0", "1I0", "1F1", "1I1", "1W0", "1W1"}}, 2);
  EXPECT_EQ(mine.name, "mine");
  EXPECT_EQ(mine.versions, PipelineVersionRule{});
  EXPECT_TRUE(receives_in_order(mine));
  const PipelineSchedule serves = given({{"0F1", "0F0"}, {"1F0", "1F1"}}, 2);
  EXPECT_FALSE(receives_in_order(serves));
  EXPECT_TRUE(adds_in_order(serves));
  EXPECT_FALSE(adds_in_order(given({{"0F0", "0F1", "0B1", "0B0"}}, 2)));
}

TEST(PipelineSchedule, WhatCannotRunIsRefusedAndSaysWhere) {
  const auto refused = [](std::vector<std::vector<std::string>> lists, std::uint32_t micro_batches = 1) {
    return config_error([&] { given(std::move(lists), micro_batches); });
  };
  const auto has = [](const std::string& text, const std::string& words) {
    EXPECT_NE(text.find(words), std::string::npos) << text << "\nhas not: " << words;
  };
  has(refused({{"0F0", "0B0", "0B0"}}), "chunk 0 runs 1 F, 2 B, 0 I, 0 W and 0 U for micro-batch 0");
  has(refused({{"0F0", "0I0"}}), "chunk 0 runs 1 F, 0 B, 1 I, 0 W");
  has(refused({{"0F0", "0B0"}}, 2), "chunk 0 runs 0 F, 0 B");
  has(refused({{"0F0", "0B0"}, {"1F0"}}), "chunk 1 runs 1 F, 0 B");
  has(refused({{"0F0", "0B0", "1F0"}, {"1B0"}}), "action 1F0 of rank 0 is of a chunk that is on rank 1");
  has(refused({{"0F0", "0B0", "0F1"}}), "action 0F1 of rank 0 is beyond its 1 chunks and 1 micro-batches");
  has(refused({{"0B0", "0F0"}}), "for ever, at action 0B0 of rank 0");
  has(refused({{"0F0", "0W0", "0I0"}}), "for ever, at action 0W0 of rank 0");
  has(refused({{"0F0", "0B0", "0F1", "0B1"}, {"1F1", "1F0", "1B0", "1B1"}}, 2),
      "for ever, at action 0B0 of rank 0, action 1F1 of rank 1");
  has(refused({}), "it has no rank");
  has(config_error([] {
        pipeline_schedule_from_json(
            R"({"name": "x", "micro_batches": 1, "rank_of": [[0], [0, 0]], "actions": [[]]})");
      }),
      "directions have 1 and 2 chunks");
  has(config_error([] {
        pipeline_schedule_from_json(
            R"({"name": "x", "micro_batches": 1, "rank_of": [[3]], "actions": [[]]})");
      }),
      "a chunk is on rank 3");
  for (const char* action : {"F0", "0X0", "0F", "0F-1", "0F99999999999", "", "0F0 "})
    has(refused({{action}}), "'" + std::string(action) + "' is no action");
  has(config_error([] { pipeline_schedule_from_json("[1"); }), "this is no JSON");
  has(config_error([] { pipeline_schedule_from_json("{}"); }), "'name' is missing");
}

TEST(PipelineSchedule, NamesAndShapesThatThereAreNotAreRefused) {
  const auto refused = [](std::string_view name, const PipelineShape& shape) {
    return config_error([&] { pipeline_schedule(name, shape); });
  };
  EXPECT_NE(refused("1F1B", {2, 2}).find("use one of gpipe, 1f1b, interleaved"), std::string::npos);
  EXPECT_NE(refused("1f1b", {0, 2}).find("no rank"), std::string::npos);
  EXPECT_NE(refused("1f1b", {2, 0}).find("no micro-batch"), std::string::npos);
  EXPECT_NE(refused("gpipe", {2, 1U << 31}).find("give fewer micro-batches"), std::string::npos);
  EXPECT_NE(refused("1f1b", {1U << 16, 1U << 16}).find("give fewer micro-batches"), std::string::npos);
  EXPECT_NE(refused("1f1b", {3, 2, 1, {1, 0}}).find("hops are whole numbers from 1"), std::string::npos);
  EXPECT_NE(refused("1f1b", {4, 2, 1, {1, 1}}).find("hops are whole numbers from 1"), std::string::npos);
  EXPECT_NE(refused("chimera", {3, 6}).find("an even number of ranks"), std::string::npos);
  EXPECT_NE(refused("pipedream_2bw", {4, 8, 1, {}, 2}).find("at least 3 micro-batches"), std::string::npos);
  EXPECT_NE(refused("hetpipe", {4, 8, 1, {}, 3}).find("at least 4 micro-batches"), std::string::npos);
}

TEST(PipelineSchedule, BlocksAreData) {
  // A rank alone: F, F, I, I and two free slots.
  const PipelineSchedule one = pipeline_from_block({6, {{0, 1, 2, 3}}}, 2);
  EXPECT_EQ(one.text(), "rank 0: 0F0 1F0 1I0 0I0 1W0 0W0 0F1 1F1 1I1 0I1 1W1 0W1\n");
  EXPECT_NE(config_error([] {
              pipeline_from_block({6, {{0, 6, 2, 3}}}, 2);
            }).find("are in the same slot 6"),
            std::string::npos);
  EXPECT_NE(config_error([] {
              pipeline_from_block({6, {{0, 1, 3, 2}}}, 1);
            }).find("for ever"),
            std::string::npos);
  EXPECT_NE(config_error([] { pipeline_from_block({6, {}}, 1); }).find("no rank"), std::string::npos);
}

TEST(PipelineSchedule, RepeatedNumbersItsMicroBatchesOn) {
  EXPECT_EQ(repeated(pipeline_schedule("gpipe", {1, 2}), 2).text(),
            "rank 0: 0F0 0F1 0B0 0B1 0F2 0F3 0B2 0B3\n");
  const PipelineSchedule odd = pipeline_schedule("chimera", {2, 3});
  EXPECT_NE(config_error([&] { repeated(odd, 2); }), "");
  EXPECT_NE(config_error([&] { repeated(odd, 0); }), "");
}

}  // namespace
}  // namespace reef
