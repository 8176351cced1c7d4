#include <gtest/gtest.h>

#include <algorithm>
#include <limits>

#include "reef/bytes.h"
#include "reef/chain_solver.h"
#include "reef/error.h"
#include "reef/schedule.h"
#include "support/chains.h"
#include "support/xml.h"

namespace reef {
namespace {

std::string text_of(const c10::Error& error) { return message_of(error); }

/// Three stages by which every term of a cost can be told.
ChainProfile three() {
  ChainProfile profile;
  for (std::uint64_t i = 1; i <= 3; ++i) {
    StageProfile stage{"s" + std::to_string(i)};
    stage.output_bytes = 10 * i;
    stage.tape_has_output = i == 2;
    stage.tape_bytes = 100 * i;
    stage.forward_bytes = 10 * i + 1;
    stage.taped_bytes = 100 * i + 10 * i + 2;
    stage.retape_bytes = 100 * i + 3;
    stage.backward_bytes = 50 * i;
    stage.gradient_bytes = 7 * i;
    stage.forward_seconds = static_cast<double>(i);
    stage.retape_seconds = static_cast<double>(i) / 2;
    stage.backward_seconds = 10 * static_cast<double>(i);
    profile.stages.push_back(stage);
  }
  return profile;
}

TEST(Schedule, CostsAreAddedUpByHand) {
  const ChainProfile profile = three();
  // Everything kept. At B3: outputs 1 and 2 (30), tapes 100 + 180 + 300, the gradient of output 3 (30), 150.
  const ScheduleCost all = simulate(profile, schedule_of(3, "T1 T2 T3 L -a3 B3 -a2 B2 -a1 B1"));
  EXPECT_EQ(all.peak_bytes, 30U + 580 + 30 + 150);
  EXPECT_EQ(all.peak_operation, 5U);
  EXPECT_EQ(all.seconds, 6 + 60);
  EXPECT_EQ(all.recomputed_seconds, 0);
  EXPECT_EQ(all.load[2].total(), 30U + 280 + 332);            // T3
  EXPECT_EQ(all.load[3].total(), 60U + 580 + 30);             // L: output 3, and its gradient
  EXPECT_EQ(all.load[7].total(), 30U + 280 + 20 + 21 + 100);  // B2: output 2 is on its tape
  EXPECT_EQ(all.load[9].total(), 100U + 10 + 21 + 14 + 50);   // B1

  const ScheduleCost one =
      simulate(profile, schedule_of(3, "F1 F2 F3 -a2 L -a3 F2 R3 -a2 B3 R2 B2 -a1 R1 B1"));
  EXPECT_EQ(one.seconds, 6 + 60 + 2 + 1.5 + 1 + 0.5);
  EXPECT_EQ(one.recomputed_seconds, 5);
  EXPECT_EQ(one.load[1].total(), 10U + 21);              // F2
  EXPECT_EQ(one.load[7].total(), 30U + 30 + 303);        // R3
  EXPECT_EQ(one.load[9].total(), 30U + 300 + 30 + 150);  // B3: its tape holds output 2
  EXPECT_EQ(one.peak_bytes, 510U);
}

TEST(Schedule, WhatIsNotLegalIsRefusedByName) {
  const ChainProfile profile = three();
  const struct {
    const char* words;
    const char* why;
  } rows[] = {
      {"F1 F3", "operation 2 (F3) does not find its input"},
      {"F1 F1", "operation 2 (F1) makes an output that is there"},
      {"R1", "operation 1 (R1) is before the loss"},
      {"T1 -a1 F2", "operation 3 (F2) does not find its input"},
      {"F1 F2 -a2 -a1 F1", "operation 5 (F1) is before the loss"},
      {"F1 F2 L", "operation 3 (L) does not find the last output"},
      {"T1 T2 T3 B3", "operation 4 (B3) is not of the stage that backward has reached"},
      {"T1 T2 T3 L B3", "operation 5 (B3) finds its output kept"},
      {"T1 T2 F3 L -a3 B3", "operation 6 (B3) does not find its tape"},
      {"T1 T2 T3 L -a3 B3 F3", "operation 7 (F3) runs a stage that backward has left behind"},
      {"T1 T2 T3 L -a3 -a3", "operation 6 (-a3) drops an output that is not there"},
      {"T1 T2 T3 L -a3 -t3 -t3", "operation 7 (-t3) drops a tape that is not there"},
      {"T1 T2 T3 L -a3 B3 -a2 B2", "it ends before backward has reached the first stage"},
      {"T1 T2 T3 L -a3 B3 -a2 B2 B1", "operation 9 (B1) finds its output kept"},
      {"T4", "operation 1 (T4) is of a stage that the chain does not have"},
      {"T1 T2 T3 L -a3 R3", "operation 6 (R3) makes a tape that is there"},
  };
  for (const auto& row : rows) {
    try {
      simulate(profile, schedule_of(3, row.words));
      FAIL() << row.words;
    } catch (const ConfigError& error) {
      EXPECT_EQ(text_of(error).find(std::string("Schedule: ") + row.why), 0U) << text_of(error);
    }
  }
  EXPECT_THROW(simulate(profile, {2, {}}), ConfigError);
}

TEST(Schedule, EverySchedulesTextAndJsonComeBack) {
  std::mt19937_64 random(1);
  for (int row = 0; row < 200; ++row) {
    const ChainProfile profile = random_chain(random, 1 + row % 9);
    const ChainProfile again = chain_profile_from_json(profile.json());
    EXPECT_EQ(again.json(), profile.json());
    EXPECT_EQ(again.stages.size(), profile.stages.size());
    const Schedule schedule = plan_chain(profile, minimum_bytes(profile));
    const Schedule back = schedule_from_json(schedule.json());
    EXPECT_EQ(back.operations, schedule.operations);
    EXPECT_EQ(back.stages, schedule.stages);
    EXPECT_EQ(simulate(again, back).seconds, simulate(profile, schedule).seconds);
  }
}

TEST(Schedule, OtherTextsAreRefused) {
  for (const char* text :
       {"", "[]", "{", R"({"stages": 1})", R"({"stages": -1, "operations": []})",
        R"({"stages": 1, "operations": ["X1"]})", R"({"stages": 1, "operations": ["F"]})",
        R"({"stages": 1, "operations": ["L1"]})", R"({"stages": 1, "operations": ["F1x"]})",
        R"({"stages": 1, "operations": [1]})"}) {
    EXPECT_THROW(schedule_from_json(text), ConfigError) << text;
  }
  for (const char* text :
       {"", "{}", R"({"stages": [{}]})", R"({"stages": [{"name": "a"}]})", R"({"stages": []})"}) {
    EXPECT_THROW(chain_profile_from_json(text), ConfigError) << text;
  }
}

TEST(ChainProfile, WhatIsNotSoundIsRefusedByName) {
  const auto refused = [](auto change) {
    ChainProfile profile = three();
    change(profile.stages[1]);
    try {
      check(profile);
      ADD_FAILURE();
    } catch (const ConfigError& error) {
      EXPECT_EQ(text_of(error).find("ChainProfile: stage 2 (s2) "), 0U) << text_of(error);
    }
  };
  check(three());
  refused([](StageProfile& stage) { stage.forward_seconds = -1; });
  refused([](StageProfile& stage) { stage.retape_seconds = std::numeric_limits<double>::quiet_NaN(); });
  refused([](StageProfile& stage) { stage.backward_seconds = std::numeric_limits<double>::infinity(); });
  refused([](StageProfile& stage) { stage.output_bytes = 300; });
  refused([](StageProfile& stage) { stage.forward_bytes = 19; });
  refused([](StageProfile& stage) { stage.taped_bytes = 199; });
  refused([](StageProfile& stage) { stage.retape_bytes = 199; });
  refused([](StageProfile& stage) { stage.gradient_bytes = 311; });
  EXPECT_THROW(check(ChainProfile{}), ConfigError);
}

TEST(ChainProfile, TheTableHasALineAStageAndTheirSums) {
  const std::string table = three().table();
  EXPECT_EQ(std::count(table.begin(), table.end(), '\n'), 5);
  EXPECT_NE(table.find("600 B"), std::string::npos);     // tapes
  EXPECT_NE(table.find("60000.00"), std::string::npos);  // backward, ms
}

TEST(Schedule, TheChartIsWellFormedAndSaysThePeak) {
  std::mt19937_64 random(2);
  for (const std::uint32_t stages : {1U, 2U, 9U, 120U}) {
    const ChainProfile profile = random_chain(random, stages);
    const std::uint64_t budget_bytes = (minimum_bytes(profile) + natural_peak_bytes(profile)) / 2;
    const Schedule schedule = plan_chain(profile, budget_bytes);
    const std::string chart = schedule_chart(profile, schedule, budget_bytes, "a < b & \"c\"");
    const std::vector<test::XmlElement> elements = test::XmlParser(chart).parse();
    EXPECT_GT(elements.size(), schedule.operations.size() / 2);
    EXPECT_NE(
        chart.find("peak " + format_bytes(static_cast<std::int64_t>(simulate(profile, schedule).peak_bytes))),
        std::string::npos);
  }
}

}  // namespace
}  // namespace reef
