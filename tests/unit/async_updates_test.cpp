#include "reef/async_updates.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <limits>
#include <map>
#include <numeric>
#include <set>
#include <string>
#include <utility>
#include <vector>

#include "support/config_error.h"

namespace reef {
namespace {

using Kind = AsyncEvent::Kind;
using test::config_error;
using Vector = std::vector<float>;

constexpr std::int64_t kElements = 37;

/// Every worker has a valley of its own, which moves with its pushes.
float slope(int worker, std::int64_t clock, std::size_t i, float w) {
  const float curvature = 0.3F + 0.05F * static_cast<float>(i % 7);
  const float bottom =
      std::sin(static_cast<float>(i) + static_cast<float>(worker)) + 0.1F * static_cast<float>(clock % 5);
  return curvature * (w - bottom);
}
Vector gradient_at(int worker, std::int64_t clock, const Vector& w, std::size_t first = 0) {
  Vector g(w.size());
  for (std::size_t i = 0; i < w.size(); ++i) g[i] = slope(worker, clock, first + i, w[i]);
  return g;
}
Vector begin(std::int64_t elements = kElements) {
  Vector w(static_cast<std::size_t>(elements));
  for (std::size_t i = 0; i < w.size(); ++i) w[i] = std::cos(static_cast<float>(i));
  return w;
}

/// Of a server: SGD with momentum.
struct Momentum {
  float rate = 0.05F;
  float factor = 0.9F;
  Vector velocity = {};

  void step(Vector& w, const Vector& g, double times) {
    velocity.resize(w.size());
    const auto lr = static_cast<float>(rate * times);
    for (std::size_t i = 0; i < w.size(); ++i) {
      velocity[i] = factor * velocity[i] + g[i];
      w[i] -= lr * velocity[i];
    }
  }
};

AsyncModel model_of(std::map<int, Momentum>& steppers, AsyncRule rule) {
  AsyncModel model;
  model.push = [rule](int worker, std::int64_t clock, std::span<const float> given, std::span<float> pushed) {
    const Vector w(given.begin(), given.end());
    const Vector g = gradient_at(worker, clock, w);
    for (std::size_t i = 0; i < w.size(); ++i)
      pushed[i] = rule == AsyncRule::kElastic ? w[i] - 0.1F * g[i] : g[i];
  };
  model.step = [&steppers](int server, std::span<float> slice, std::span<const float> g, double rate) {
    Vector w(slice.begin(), slice.end());
    steppers[server].step(w, {g.begin(), g.end()}, rate);
    std::copy(w.begin(), w.end(), slice.begin());
  };
  return model;
}

Vector replayed(const AsyncLog& log) {
  std::map<int, Momentum> steppers;
  return replay_async({log}, {begin()}, model_of(steppers, log.options.rule)).front();
}

const std::vector<AsyncRule> kRules = {AsyncRule::kPlain, AsyncRule::kStalenessAware,
                                       AsyncRule::kDelayCompensated, AsyncRule::kElastic};
const std::vector<std::optional<std::int64_t>> kStalenesses = {0, 1, 2, 5, std::nullopt};

struct Random {
  std::uint64_t state;
  std::uint64_t below(std::uint64_t bound) {
    state = state * 6364136223846793005U + 1442695040888963407U;
    return (state >> 33U) % bound;
  }
};

struct Program {
  int workers;
  std::int64_t pushes;
  AsyncOptions options;
  AsyncDelays delays;

  explicit Program(std::uint64_t seed, bool with_absences = true) {
    Random random{seed * 2 + 1};
    workers = static_cast<int>(1 + random.below(5));
    pushes = static_cast<std::int64_t>(1 + random.below(9));
    options.rule = kRules[random.below(kRules.size())];
    options.staleness = kStalenesses[random.below(kStalenesses.size())];
    delays.compute.clear();
    for (int i = 0; i < workers; ++i) delays.compute.push_back(0.1 * static_cast<double>(random.below(30)));
    delays.message = 0.05 * static_cast<double>(random.below(4));
    delays.jitter = 0.25 * static_cast<double>(random.below(5));
    if (!with_absences) return;
    for (std::uint64_t i = random.below(4); i > 0; --i) {
      const double from = 0.3 * static_cast<double>(random.below(40));
      delays.absences.push_back({static_cast<int>(random.below(static_cast<std::uint64_t>(workers))), from,
                                 from + 0.2 * static_cast<double>(1 + random.below(30))});
    }
  }
  AsyncLog run(std::uint64_t seed) const { return simulate_async(workers, pushes, options, delays, seed); }
};

/// Goes through a log by itself: who is there, where each clock and how many steps there have been.
void expect_lawful(const AsyncLog& log, std::int64_t pushes) {
  const auto workers = static_cast<std::size_t>(log.workers);
  std::vector<std::int64_t> clock(workers, 0);
  std::vector<std::int64_t> pushed(workers, 0);
  std::vector<std::int64_t> read(workers, -1);
  std::vector<bool> here(workers, true);
  std::set<std::size_t> round;
  std::int64_t round_clock = 0;
  std::int64_t steps = 0;
  double seconds = 0.0;
  const auto slowest = [&] {
    std::int64_t least = std::numeric_limits<std::int64_t>::max();
    for (std::size_t i = 0; i < workers; ++i) least = here[i] ? std::min(least, clock[i]) : least;
    return least;
  };
  const bool synchronous = log.options.staleness == 0;
  for (const AsyncEvent& event : log.events) {
    const auto worker = static_cast<std::size_t>(event.worker);
    ASSERT_GE(event.seconds, seconds);
    seconds = event.seconds;
    switch (event.kind) {
      case Kind::kPull:
        ASSERT_TRUE(here[worker]);
        ASSERT_EQ(event.version, steps);
        ASSERT_EQ(event.clock, clock[worker]);
        if (log.options.staleness) {
          ASSERT_LE(clock[worker] - slowest(), *log.options.staleness) << "went on too early";
        }
        read[worker] = steps;
        break;
      case Kind::kPush:
        ASSERT_TRUE(here[worker]);
        ASSERT_EQ(event.version, read[worker]);
        ASSERT_EQ(event.staleness, steps - read[worker]);
        ASSERT_EQ(event.clock, clock[worker]);
        if (synchronous) {
          ASSERT_EQ(event.staleness, 0);
        }
        ++clock[worker];
        ++pushed[worker];
        read[worker] = -1;
        ASSERT_TRUE(round.insert(worker).second) << "two pushes of one worker in a round";
        round_clock = std::max(round_clock, clock[worker]);
        break;
      case Kind::kLeave:
        ASSERT_TRUE(here[worker]);
        here[worker] = false;
        break;
      case Kind::kJoin:
        ASSERT_FALSE(here[worker]);
        ASSERT_GE(event.clock, clock[worker]);
        clock[worker] = event.clock;
        here[worker] = true;
        if (event.clock > slowest()) {
          ASSERT_EQ(event.clock, clock[worker]);
        }
        break;
      case Kind::kClock:
        FAIL() << "one server sets no clocks";
    }
    if (!round.empty() && (!synchronous || slowest() >= round_clock)) {
      ++steps;
      round.clear();
    }
  }
  for (std::size_t i = 0; i < workers; ++i) {
    EXPECT_EQ(pushed[i], pushes);
    EXPECT_FALSE(here[i]) << "a worker is done at the end";
  }
  const auto histogram = log.staleness_histogram();
  EXPECT_EQ(std::accumulate(histogram.begin(), histogram.end(), std::int64_t{0}),
            pushes * static_cast<std::int64_t>(workers));
}

TEST(Async, NobodyEverGoesOnTooEarlyInTwentyThousandPrograms) {
  for (std::uint64_t seed = 0; seed < 20000 && !HasFailure(); ++seed) {
    const Program program(seed);
    SCOPED_TRACE("program " + std::to_string(seed));
    expect_lawful(program.run(seed), program.pushes);
  }
}

TEST(Async, StalenessIsBoundedByTheBoundOfClocks) {
  std::int64_t most_seen = 0;
  for (std::uint64_t seed = 0; seed < 3000; ++seed) {
    const Program program(seed, /*with_absences=*/false);
    if (!program.options.staleness) continue;
    const std::int64_t s = *program.options.staleness;
    // Between a worker's pull and its push another one comes from s pushes behind it to s + 1 before it.
    const std::int64_t bound = s == 0 ? 0 : (program.workers - 1) * (2 * s + 1);
    const auto late = static_cast<std::int64_t>(program.run(seed).staleness_histogram().size()) - 1;
    ASSERT_LE(late, bound) << "program " << seed;
    most_seen = std::max(most_seen, late);
  }
  EXPECT_GE(most_seen, 8);
}

TEST(Async, TheSameSeedGivesTheSameLogAndTheSameBits) {
  int differs = 0;
  for (std::uint64_t seed = 0; seed < 400; ++seed) {
    const Program program(seed);
    const AsyncLog log = program.run(seed);
    ASSERT_EQ(log.events, program.run(seed).events);
    ASSERT_EQ(replayed(log), replayed(program.run(seed)));
    differs += log.events != program.run(seed + 1).events ? 1 : 0;
  }
  EXPECT_GT(differs, 300);
}

TEST(Async, ALogIsItsText) {
  for (std::uint64_t seed = 0; seed < 400; ++seed) {
    const AsyncLog log = Program(seed).run(seed);
    const AsyncLog read = read_async_log(log.text());
    ASSERT_EQ(read.events, log.events);
    ASSERT_EQ(read.text(), log.text());
    ASSERT_EQ(read.options.staleness, log.options.staleness);
    ASSERT_EQ(read.options.rule, log.options.rule);
  }
}

// The recurrences as they stand in the papers, over all versions of the parameters that there ever were.
Vector by_recurrence(const AsyncLog& log) {
  const bool aware = log.options.rule == AsyncRule::kStalenessAware;
  const bool compensated = log.options.rule == AsyncRule::kDelayCompensated;
  std::vector<Vector> w = {begin()};  // by version
  Momentum stepper;
  for (const AsyncEvent& event : log.events) {
    if (event.kind != Kind::kPush) continue;
    const Vector& old = w[static_cast<std::size_t>(event.version)];
    const Vector& now = w.back();
    const std::size_t tau = w.size() - 1 - static_cast<std::size_t>(event.version);
    Vector g = gradient_at(event.worker, event.clock, old);
    const auto lambda = static_cast<float>(log.options.compensation);
    for (std::size_t i = 0; compensated && i < g.size(); ++i)
      g[i] = g[i] + lambda * g[i] * g[i] * (now[i] - old[i]);
    const double rate = aware ? 1.0 / static_cast<double>(std::max<std::size_t>(tau, 1)) : 1.0;
    Vector next = now;
    stepper.step(next, g, rate);
    w.push_back(next);
  }
  return w.back();
}

// The mean in the order of workers, one step a round, whatever came first.
Vector by_synchronous_training(const AsyncLog& log) {
  std::map<std::int64_t, std::map<int, std::int64_t>> rounds;  // by version: each worker's clock
  for (const AsyncEvent& event : log.events) {
    if (event.kind == Kind::kPush) rounds[event.version][event.worker] = event.clock;
  }
  Vector w = begin();
  Momentum stepper;
  for (const auto& [version, pushes] : rounds) {
    Vector sum;
    for (const auto& [worker, clock] : pushes) {
      const Vector g = gradient_at(worker, clock, w);
      if (sum.empty()) {
        sum = g;
      } else {
        for (std::size_t i = 0; i < g.size(); ++i) sum[i] += g[i];
      }
    }
    for (float& each : sum) each /= static_cast<float>(pushes.size());
    stepper.step(w, sum, 1.0);
  }
  return w;
}

Vector by_elastic_averaging(const AsyncLog& log) {
  const auto a = static_cast<float>(log.options.elasticity > 0 ? log.options.elasticity : 0.9 / log.workers);
  Vector center = begin();
  std::map<int, Vector> x;
  std::map<int, Vector> round;
  std::set<int> waits;  // for the center that it has been exchanged with
  std::map<int, Vector> pulled_by;
  const auto end_round = [&] {
    const Vector before = center;
    for (auto& [worker, pushed] : round) {
      for (std::size_t i = 0; i < center.size(); ++i) center[i] += a * (pushed[i] - before[i]);
      pulled_by[worker] = before;
    }
    round.clear();
  };
  std::int64_t version = 0;
  for (const AsyncEvent& event : log.events) {
    if (!round.empty() && event.version > version && event.kind != Kind::kPush) end_round();
    if (event.kind != Kind::kPush) version = event.version;
    if (event.kind == Kind::kPull) {
      if (waits.erase(event.worker) == 0) {
        x[event.worker] = center;
        continue;
      }
      Vector& own = x[event.worker];
      const Vector& before = pulled_by[event.worker];
      for (std::size_t i = 0; i < own.size(); ++i) own[i] -= a * (own[i] - before[i]);
    } else if (event.kind == Kind::kPush) {
      Vector& own = x[event.worker];
      const Vector g = gradient_at(event.worker, event.clock, own);
      for (std::size_t i = 0; i < own.size(); ++i) own[i] = own[i] - 0.1F * g[i];
      round[event.worker] = own;
      waits.insert(event.worker);
      if (log.options.staleness != 0) end_round();
    } else if (event.kind == Kind::kLeave) {
      waits.erase(event.worker);
    }
  }
  if (!round.empty()) end_round();
  return center;
}

TEST(Async, EveryRuleIsItsRecurrenceBitForBit) {
  std::map<std::string, int> tried;
  for (std::uint64_t seed = 0; seed < 2500 && !HasFailure(); ++seed) {
    const AsyncLog log = Program(seed).run(seed);
    const bool elastic = log.options.rule == AsyncRule::kElastic;
    const bool synchronous = log.options.staleness == 0;
    const Vector expected = elastic       ? by_elastic_averaging(log)
                            : synchronous ? by_synchronous_training(log)
                                          : by_recurrence(log);
    ASSERT_EQ(replayed(log), expected) << "program " << seed << "\n" << log.text();
    ++tried[to_string(log.options.rule) + (synchronous ? ", synchronous" : "")];
  }
  EXPECT_EQ(tried.size(), 8U);
}

TEST(Async, RulesDifferWhereUpdatesAreLate) {
  AsyncDelays delays;
  delays.compute = {0.2, 1.0, 3.0};
  std::set<Vector> ends;
  for (const AsyncRule rule : kRules)
    ends.insert(replayed(simulate_async(3, 12, {.rule = rule, .staleness = 3}, delays, 5)));
  EXPECT_EQ(ends.size(), kRules.size());
  const auto late = [&](std::optional<std::int64_t> staleness) {
    return simulate_async(3, 12, {.staleness = staleness}, delays, 5).staleness_histogram().size();
  };
  EXPECT_EQ(late(0), 1U);
  EXPECT_GT(late(3), late(0));
  EXPECT_GE(late(std::nullopt), late(3));
}

TEST(Async, TwoServersLogsAreDoneAgainTogether) {
  // Two servers whose logs are of one run: the same events, the second one later by a server's order.
  AsyncDelays delays;
  delays.compute = {0.2, 1.0, 3.0};
  AsyncLog log = simulate_async(3, 6, {.staleness = 2}, delays, 1);
  log.options.servers = 2;
  const auto whole = begin(64);
  const std::vector<Vector> halves = {{whole.begin(), whole.begin() + 24}, {whole.begin() + 24, whole.end()}};
  std::map<int, Momentum> steppers;
  const auto ends = replay_async({log, log}, halves, model_of(steppers, AsyncRule::kPlain));
  std::map<int, Momentum> alone;
  log.options.servers = 1;
  const Vector expected = replay_async({log}, {whole}, model_of(alone, AsyncRule::kPlain)).front();
  Vector joined = ends[0];
  joined.insert(joined.end(), ends[1].begin(), ends[1].end());
  EXPECT_EQ(joined, expected);
}

TEST(Async, LogsThatCannotHaveBeenAreRefused) {
  AsyncDelays delays;
  delays.compute = {0.2, 1.0, 3.0};
  for (const AsyncRule rule : kRules) {
    for (const auto staleness : kStalenesses) {
      const AsyncLog log = simulate_async(3, 5, {.rule = rule, .staleness = staleness}, delays, 3);
      int refused = 0;
      int changed = 0;
      const auto try_one = [&](const AsyncLog& wrong) {
        ++changed;
        refused += config_error([&] { replayed(wrong); }).empty() ? 0 : 1;
      };
      for (std::size_t i = 0; i < log.events.size(); ++i) {
        for (const int field : {0, 1, 2}) {
          AsyncLog wrong = log;
          (field == 0   ? wrong.events[i].clock
           : field == 1 ? wrong.events[i].version
                        : wrong.events[i].staleness) += 1;
          try_one(wrong);
        }
        if (log.events[i].kind != Kind::kPull && log.events[i].kind != Kind::kPush) continue;
        if (log.events[i].kind == Kind::kPush) {
          AsyncLog without = log;
          without.events.erase(without.events.begin() + static_cast<std::ptrdiff_t>(i));
          try_one(without);
        }
      }
      EXPECT_EQ(refused, changed) << to_string(rule);
    }
  }
}

TEST(Async, WhatMeansNothingIsRefused) {
  const auto expect_refused = [](const AsyncOptions& options, int workers, const char* word) {
    const std::string text = config_error([&] { check_async_options(options, workers); });
    EXPECT_NE(text.find(word), std::string::npos) << word << ": " << text;
  };
  expect_refused({.servers = 0}, 1, "servers is 0");
  expect_refused({.servers = 2}, 0, "no rank is left");
  expect_refused({.staleness = -1}, 1, "staleness is -1");
  expect_refused({.compensation = -0.5}, 1, "compensation");
  expect_refused({.compensation = std::nan("")}, 1, "compensation");
  expect_refused({.elasticity = 1.5}, 1, "elasticity is 1.5");
  expect_refused({.elasticity = std::nan("")}, 1, "elasticity");
  EXPECT_NE(config_error([] { async_rule_of("hogwild"); }).find("delay_compensated"), std::string::npos);
  const auto simulated = [](int workers, std::int64_t pushes, const AsyncDelays& delays) {
    return config_error([&] { simulate_async(workers, pushes, {}, delays, 0); });
  };
  EXPECT_NE(simulated(1, 0, {}), "");
  EXPECT_NE(simulated(0, 1, {}), "");
  EXPECT_NE(simulated(1, 1, {.compute = {}}), "");
  EXPECT_NE(simulated(1, 1, {.compute = {-1.0}}), "");
  EXPECT_NE(simulated(1, 1, {.jitter = 2.0}), "");
  EXPECT_NE(simulated(1, 1, {.absences = {{1, 0.0, 1.0}}}), "");
  EXPECT_NE(simulated(1, 1, {.absences = {{0, 2.0, 1.0}}}), "");
  EXPECT_NE(config_error([] { simulate_async(2, 1, {.servers = 2}, {}, 0); }), "");
  const std::string good = simulate_async(2, 2, {}, {}, 0).text();
  for (const std::string& wrong :
       {std::string(), std::string("workers"), std::string("workers 2\n"), good + "jump worker 0\n",
        good + "pull worker 9 clock 0 version 0 staleness 0 seconds 0\n",
        good + "pull worker 0 clock 0x version 0 staleness 0 seconds 0\n",
        good + "pull worker 0 clock 0 version 0 staleness 0 seconds 0 more\n"}) {
    EXPECT_NE(config_error([&] { read_async_log(wrong); }), "") << wrong;
  }
  EXPECT_NE(config_error([] { replay_async({}, {}, {}); }), "");
}

}  // namespace
}  // namespace reef
