#pragma once

#include <gtest/gtest.h>

#include <algorithm>
#include <cstdint>
#include <limits>
#include <random>
#include <string>

#include "reef/chain_profile.h"
#include "reef/chain_solver.h"
#include "reef/error.h"
#include "reef/schedule.h"

namespace reef {

/// "T1 T2 L ...", as Schedule::text() gives it.
inline Schedule schedule_of(std::uint32_t stages, const std::string& words) {
  std::string quoted;
  for (std::size_t at = 0; at < words.size();) {
    const std::size_t end = std::min(words.find(' ', at), words.size());
    quoted += (quoted.empty() ? "\"" : ", \"") + words.substr(at, end - at) + "\"";
    at = end + 1;
  }
  return schedule_from_json(R"({"stages": )" + std::to_string(stages) + R"(, "operations": [)" + quoted +
                            "]}");
}

/// Of a budget for which a solver finds nothing.
inline constexpr double kNever = std::numeric_limits<double>::infinity();

/// Of what the solver finds, which keeps to the budget.
inline double seconds_of(const ChainProfile& profile, std::uint64_t budget_bytes, ChainSolver solver) {
  try {
    const ScheduleCost cost = simulate(profile, plan_chain(profile, budget_bytes, {.solver = solver}));
    EXPECT_LE(cost.peak_bytes, budget_bytes) << name(solver);
    return cost.seconds;
  } catch (const BudgetError& error) {
    EXPECT_GT(error.smallest_budget_bytes(), budget_bytes) << name(solver);
    return kNever;
  }
}

/// A sound profile of small whole numbers, so that costs add up without rounding.
inline ChainProfile random_chain(std::mt19937_64& random, std::uint32_t stages) {
  const auto below = [&](std::uint64_t n) { return random() % n; };
  ChainProfile profile;
  for (std::uint32_t i = 0; i < stages; ++i) {
    StageProfile stage;
    stage.name = "stage" + std::to_string(i + 1);
    stage.output_bytes = 1 + below(5);
    stage.tape_has_input = below(3) > 0;
    stage.tape_has_output = below(2) == 0;
    stage.tape_bytes = below(7) + (stage.tape_has_output ? stage.output_bytes : 0);
    stage.forward_bytes = stage.output_bytes + below(3);
    stage.taped_bytes = stage.tape_bytes + (stage.tape_has_output ? 0 : stage.output_bytes) + below(3);
    stage.retape_bytes = stage.tape_bytes + below(2);
    stage.gradient_bytes = below(3);
    const std::uint64_t left = stage.gradient_bytes + (i > 0 ? profile.stages.back().output_bytes : 0);
    const std::uint64_t gone = stage.tape_bytes + stage.output_bytes;
    stage.backward_bytes = below(6) + (left > gone ? left - gone : 0);
    stage.forward_seconds = 1 + static_cast<double>(below(4));
    stage.retape_seconds = stage.forward_seconds - static_cast<double>(below(2)) / 2;
    stage.backward_seconds = 1 + static_cast<double>(below(6));
    profile.stages.push_back(stage);
  }
  return profile;
}

/// From too little to what nothing is recomputed with.
inline std::uint64_t random_chain_budget(std::mt19937_64& random, std::uint64_t least, std::uint64_t most) {
  const std::uint64_t low = least - least / 8;
  return low + random() % (most - low + 1);
}

}  // namespace reef
