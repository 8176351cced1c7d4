// Compression's names, options and schedules.
#include "reef/compression.h"

#include <gtest/gtest.h>

#include <functional>
#include <limits>
#include <string>

#include "reef/error.h"

namespace reef {
namespace {

std::string refusal(const std::function<void()>& call) {
  try {
    call();
  } catch (const ConfigError& error) {
    return error.what();
  }
  return "nothing was thrown";
}

TEST(Compression, NamesAreThoseOfOneMethodEach) {
  for (const Compression compression :
       {Compression::kNone, Compression::kBFloat16, Compression::kFloat16, Compression::kQsgd,
        Compression::kSign, Compression::kPowerSgd, Compression::kPowerSgdAlternating, Compression::kTopK,
        Compression::kGTopK, Compression::kGTopKTree, Compression::kOkTopK, Compression::kDgc,
        Compression::kOneBitAdam}) {
    EXPECT_EQ(compression_named(name_of(compression)), compression);
  }
  const std::string told = refusal([] { compression_named("top-k"); });
  for (const char* const part : {"'top-k' is none of", "\"none\"", "\"topk\"", "\"gtopk\""})
    EXPECT_NE(told.find(part), std::string::npos) << told;
}

TEST(Compression, OnDevicesThereAreSixteenBitsAndSomeElements) {
  for (const Compression method :
       {Compression::kBFloat16, Compression::kFloat16, Compression::kTopK, Compression::kGTopK,
        Compression::kGTopKTree, Compression::kOkTopK, Compression::kDgc})
    EXPECT_TRUE(compresses_on_devices(method)) << name_of(method);
  for (const Compression method :
       {Compression::kNone, Compression::kAuto, Compression::kQsgd, Compression::kSign,
        Compression::kPowerSgd, Compression::kPowerSgdAlternating, Compression::kOneBitAdam})
    EXPECT_FALSE(compresses_on_devices(method)) << name_of(method);
}

TEST(Compression, OneMethodHasAMomentum) {
  EXPECT_TRUE(has_momentum(Compression::kDgc));
  EXPECT_FALSE(has_momentum(Compression::kTopK) || has_momentum(Compression::kNone));
}

TEST(Compression, AScheduleHasTheValueOfTheLastEntryThatHasBegun) {
  const StepSchedule schedule = {{0, 0.25}, {100, 0.0625}, {101, 0.001}};
  EXPECT_EQ(schedule.at(0, 1), 0.25);
  EXPECT_EQ(schedule.at(99, 1), 0.25);
  EXPECT_EQ(schedule.at(100, 1), 0.0625);
  EXPECT_EQ(schedule.at(1000000, 1), 0.001);
  EXPECT_EQ(StepSchedule(0.5).at(7, 1), 0.5);
  EXPECT_EQ(StepSchedule().at(7, 1), 1);
  using Entries = std::vector<StepSchedule::Entry>;
  for (const Entries& wrong :
       {Entries{}, Entries{{1, 0.5}}, Entries{{0, 0.5}, {0, 0.1}}, Entries{{0, 1}, {5, 1}, {4, 1}}})
    EXPECT_NE(refusal([&] { StepSchedule{Entries(wrong)}; }).find("pairs of a step and a value"),
              std::string::npos);
}

TEST(Compression, WhatAMethodDoesNotTakeIsRefused) {
  const struct {
    Compression compression;
    CompressionOptions options;
    const char* told;  // nullptr: it takes it
  } rows[] = {
      {Compression::kNone, {}, nullptr},
      {Compression::kGTopK, {.density = 1}, nullptr},
      {Compression::kGTopK, {.density = {{0, 0.25}, {10, 0.001}}}, nullptr},
      {Compression::kNone, {.density = 0.5}, "density, which compression none does not take"},
      {Compression::kBFloat16, {.density = 0.5}, "density, which compression bfloat16 does not take"},
      {Compression::kTopK, {.density = 0}, "density 0: give a number above 0, at most 1"},
      {Compression::kTopK, {.density = -0.1}, "density -0.1: give"},
      {Compression::kTopK, {.density = {{0, 0.5}, {10, 1.5}}}, "density 1.5: give"},
      {Compression::kQsgd, {.bits = {{0, 8}, {10, 2}}, .seed = 4503599627370497.0}, nullptr},
      {Compression::kQsgd, {.bits = 4, .entropy_coded = true, .seed = 1}, nullptr},
      {Compression::kQsgd, {.entropy_coded = false}, nullptr},
      {Compression::kQsgd, {.entropy_coded = 2}, "entropy_coded 2: give a whole number from 0 to 1"},
      {Compression::kQsgd, {.entropy_coded = {{0, 0}, {5, 1}}}, "entropy_coded with a schedule: give one"},
      {Compression::kSign, {.entropy_coded = true}, "entropy_coded, which compression sign does not take"},
      {Compression::kAuto, {.entropy_coded = true}, "entropy_coded, which compression auto does not take"},
      {Compression::kSign, {.bits = 8}, "bits, which compression sign does not take"},
      {Compression::kQsgd, {.bits = 1}, "bits 1: give a whole number from 2 to 8"},
      {Compression::kQsgd, {.bits = 9}, "bits 9: give"},
      {Compression::kQsgd, {.bits = 2.5}, "bits 2.5: give a whole number"},
      {Compression::kQsgd, {.seed = -1}, "seed -1: give a whole number from 0"},
      {Compression::kQsgd, {.seed = {{0, 1}, {5, 2}}}, "seed with a schedule: give one number"},
      {Compression::kPowerSgdAlternating, {.rank = {{0, 8}, {10, 2}}, .seed = 7}, nullptr},
      {Compression::kPowerSgd, {.rank = 0}, "rank 0: give a whole number from 1"},
      {Compression::kPowerSgd, {.bits = 8}, "bits, which compression powersgd does not take"},
      {Compression::kDgc, {.density = {{0, 0.25}, {10, 0.001}}, .momentum = 0, .max_norm = 5}, nullptr},
      {Compression::kDgc,
       {.momentum = {{0, 0.9}, {10, 1}}},
       "momentum 1: give a number from 0 to less than 1."},
      {Compression::kDgc, {.momentum = -0.5}, "momentum -0.5: give"},
      {Compression::kDgc, {.max_norm = 0}, "max_norm 0: give a number above 0, at most 3.4"},
      {Compression::kDgc, {.max_norm = std::numeric_limits<double>::infinity()}, "max_norm inf: give"},
      {Compression::kTopK, {.momentum = 0.9}, "momentum, which compression topk does not take"},
      {Compression::kAuto, {.momentum = 0.9}, "momentum, which compression auto does not take"},
      {Compression::kAuto, {.max_norm = 1}, "max_norm, which compression auto does not take"},
      {Compression::kOneBitAdam, {.warmup_steps = 1, .beta1 = 0}, nullptr},
      {Compression::kOneBitAdam, {.beta1 = 0.9}, "without warmup_steps"},
      {Compression::kOneBitAdam, {.warmup_steps = 0}, "warmup_steps 0: give a whole number from 1"},
      {Compression::kOneBitAdam, {.warmup_steps = {{0, 1}, {5, 2}}}, "warmup_steps with a schedule"},
      {Compression::kOneBitAdam, {.warmup_steps = 1, .beta1 = 1}, "beta1 1: give a number from 0"},
      {Compression::kAuto, {.warmup_steps = 1}, "warmup_steps, which compression auto does not take"},
      {Compression::kTopK, {.density = std::numeric_limits<double>::quiet_NaN()}, "density nan: give"},
  };
  for (const auto& row : rows) {
    const std::string told = refusal([&] { check_compression(row.compression, row.options); });
    EXPECT_NE(told.find(row.told == nullptr ? "nothing was thrown" : row.told), std::string::npos) << told;
  }
}

TEST(Compression, OptionsAreSetByNameAndSaidAlike) {
  CompressionOptions options;
  set_compression_option(options, "density", {{0, 0.25}, {100, 0.001}});
  EXPECT_EQ(compression_text(Compression::kGTopK, options),
            "gtopk with density 0.25, from step 100 on 0.001");
  EXPECT_EQ(compression_text(Compression::kGTopK, {}), "gtopk");
  EXPECT_EQ(compression_text(Compression::kQsgd, {.bits = 4, .seed = 123456789}),
            "qsgd with bits 4 with seed 123456789");
  EXPECT_EQ(compression_text(Compression::kQsgd, {.bits = 4, .entropy_coded = true}),
            "qsgd with bits 4 with entropy_coded 1");
  EXPECT_NE(
      refusal([&] { set_compression_option(options, "densty", 1); }).find("'densty', which there is not"),
      std::string::npos);
}

}  // namespace
}  // namespace reef
