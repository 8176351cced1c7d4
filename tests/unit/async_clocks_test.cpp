// Workers against several servers whose messages come in any order: the parts of the protocol that one
// server's log does not show.
#include "async_updates/clocks.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <functional>
#include <optional>
#include <random>
#include <string>
#include <utility>
#include <vector>

#include "support/config_error.h"

namespace reef {
namespace {

using test::config_error;

TEST(AsyncClocks, WhatIsNotInOrderIsRefusedAndChangesNothing) {
  AsyncClocks clocks(2, 0);
  const auto expect_refused = [](const std::string& text, const char* word) {
    EXPECT_NE(text.find(word), std::string::npos) << text;
  };
  expect_refused(config_error([&] { clocks.push(0); }), "has not pulled");
  clocks.pull(0);
  clocks.push(0);
  expect_refused(config_error([&] { clocks.push(0); }), "has not pulled");
  EXPECT_FALSE(clocks.may_go_on(0));
  expect_refused(config_error([&] { clocks.pull(0); }), "has to wait");
  expect_refused(config_error([&] { clocks.set_clock(0, 0); }), "back from 1 to 0");
  expect_refused(config_error([&] { clocks.join(1); }), "is here");
  clocks.pull(1);
  clocks.push(1);
  EXPECT_EQ(clocks.round(), (std::vector<int>{0, 1}));
  EXPECT_FALSE(clocks.may_go_on(0)) << "the step comes first";
  clocks.stepped();
  EXPECT_EQ(clocks.version(), 1);
  EXPECT_TRUE(clocks.may_go_on(0) && clocks.may_go_on(1));
  clocks.leave(1);
  for (const auto& call :
       std::vector<std::function<void()>>{[&] { clocks.leave(1); }, [&] { clocks.pull(1); },
                                          [&] { clocks.push(1); }, [&] { clocks.set_clock(1, 9); }})
    expect_refused(config_error(call), "has left");
  expect_refused(config_error([&] { clocks.pull(2); }), "no worker 2");
  expect_refused(config_error([&] { clocks.pull(-1); }), "no worker -1");
}

TEST(AsyncClocks, WhoeverLeavesIsNotWaitedForAndComesBackWhereTheSlowestIs) {
  AsyncClocks clocks(3, 0);
  for (const int worker : {0, 1, 2}) clocks.pull(worker);
  clocks.push(0);
  clocks.push(2);
  EXPECT_TRUE(clocks.round().empty());
  clocks.leave(1);
  EXPECT_EQ(clocks.round(), (std::vector<int>{0, 2})) << "the round is whole without it";
  clocks.stepped();
  EXPECT_EQ(clocks.join(1).clock, 1);
  clocks.leave(0);
  clocks.leave(1);
  clocks.pull(2);
  clocks.push(2);
  clocks.stepped();
  clocks.leave(2);
  EXPECT_EQ(clocks.join(0).clock, 2) << "where the last one was";
}

/// What AsyncWorker does, by messages that each pair keeps in order.
class Exploration {
 public:
  Exploration(unsigned seed, int servers, int workers, std::optional<std::int64_t> staleness)
      : random_(seed), staleness_(staleness), left_(static_cast<std::size_t>(workers), 6) {
    for (int i = 0; i < servers; ++i) servers_.push_back({AsyncClocks(workers, staleness), {}, {}});
    for (int worker = 0; worker < workers; ++worker) workers_.push_back({});
    for (int worker = 0; worker < workers; ++worker) ask_all(worker, Ask::kPull);
  }

  /// Until nothing is under way. Everybody must have finished then: nobody waits for ever.
  void finish() {
    while (step()) {
    }
    for (std::size_t worker = 0; worker < workers_.size(); ++worker)
      ASSERT_EQ(workers_[worker].doing, Ask::kFinish) << "worker " << worker << " waits for ever";
  }

 private:
  enum class Ask { kPull, kPush, kLeave, kJoin, kClock, kFinish };
  struct Message {
    int worker;
    Ask ask;
    std::int64_t clock;
  };
  struct Server {
    AsyncClocks clocks;
    std::vector<Message> coming;  ///< at most one of each worker
    std::vector<int> waiting;
  };
  struct Worker {
    Ask doing = Ask::kPull;
    int answers_due = 0;
    bool removed = false;
    std::int64_t clock = 0;
    std::int64_t highest = 0;
  };

  bool draw(unsigned one_in) { return random_() % one_in == 0; }

  void ask_all(int worker, Ask ask) {
    Worker& asks = workers_[static_cast<std::size_t>(worker)];
    asks = {ask, static_cast<int>(servers_.size()), false, asks.clock, 0};
    for (Server& server : servers_) server.coming.push_back({worker, ask, asks.clock});
  }

  bool step() {
    std::vector<std::pair<std::size_t, std::size_t>> possible;
    for (std::size_t server = 0; server < servers_.size(); ++server) {
      for (std::size_t i = 0; i < servers_[server].coming.size(); ++i) possible.emplace_back(server, i);
    }
    if (possible.empty()) return false;
    // Now and then one server takes a worker for gone, and the others do not.
    Server& unsure = servers_[random_() % servers_.size()];
    const int suspect = static_cast<int>(random_() % workers_.size());
    if (draw(40) && unsure.clocks.is_present(suspect)) remove(unsure, suspect);
    const auto [at, i] = possible[random_() % possible.size()];
    Server& server = servers_[at];
    const Message message = server.coming[i];
    server.coming.erase(server.coming.begin() + static_cast<std::ptrdiff_t>(i));
    take(server, message);
    settle(server);
    return true;
  }

  void remove(Server& server, int worker) {
    server.clocks.leave(worker);
    if (std::erase(server.waiting, worker) > 0) answer(worker, /*removed=*/true, 0);
    settle(server);
  }

  void settle(Server& server) {
    if (!server.clocks.round().empty()) server.clocks.stepped();
    for (int worker = 0; worker < static_cast<int>(workers_.size()); ++worker) {
      const auto at = std::find(server.waiting.begin(), server.waiting.end(), worker);
      if (at == server.waiting.end() || !server.clocks.may_go_on(worker)) continue;
      server.waiting.erase(at);
      const auto event = server.clocks.pull(worker);
      expect_in_bounds(server, event.clock);
      answer(worker, false, event.clock);
    }
  }

  void expect_in_bounds(const Server& server, std::int64_t clock) const {
    for (int other = 0; staleness_ && other < static_cast<int>(workers_.size()); ++other) {
      if (server.clocks.is_present(other)) {
        ASSERT_LE(clock - server.clocks.clock(other), *staleness_);
      }
    }
  }

  void take(Server& server, const Message& message) {
    AsyncClocks& clocks = server.clocks;
    const bool present = clocks.is_present(message.worker);
    if (message.ask == Ask::kJoin) {
      if (!present) clocks.join(message.worker);
    } else if (message.ask == Ask::kLeave || message.ask == Ask::kFinish) {
      if (present) clocks.leave(message.worker);
    } else if (!present) {
      return answer(message.worker, true, clocks.clock(message.worker));
    } else if (message.ask == Ask::kPull) {
      ASSERT_EQ(clocks.clock(message.worker), message.clock) << "servers differ about its clock";
      server.waiting.push_back(message.worker);
      return;
    } else if (message.ask == Ask::kPush) {
      clocks.push(message.worker);
    } else {
      clocks.set_clock(message.worker, message.clock);
    }
    answer(message.worker, false, clocks.clock(message.worker));
  }

  void answer(int number, bool removed, std::int64_t clock) {
    Worker& worker = workers_[static_cast<std::size_t>(number)];
    worker.removed |= removed;
    worker.highest = std::max(worker.highest, clock);
    if (--worker.answers_due == 0) next(number, worker);
  }

  void next(int number, Worker& worker) {
    int& left = left_[static_cast<std::size_t>(number)];
    if (worker.doing == Ask::kFinish) return;
    if (worker.doing == Ask::kPush && !worker.removed) {
      ++worker.clock;
      --left;
    }
    if (worker.doing == Ask::kJoin) worker.clock = std::max(worker.clock, worker.highest);
    if (worker.removed || worker.doing == Ask::kLeave) return ask_all(number, Ask::kJoin);
    if (worker.doing == Ask::kJoin) return ask_all(number, Ask::kClock);
    if (left == 0) return ask_all(number, Ask::kFinish);
    if (draw(12)) return ask_all(number, Ask::kLeave);
    ask_all(number, worker.doing == Ask::kPull ? Ask::kPush : Ask::kPull);
  }

  std::mt19937 random_;
  std::optional<std::int64_t> staleness_;
  std::vector<Server> servers_;
  std::vector<Worker> workers_;
  std::vector<int> left_;
};

TEST(AsyncClocks, WithSeveralServersNobodyWaitsForEverAndNobodyGoesOnTooEarly) {
  const std::vector<std::optional<std::int64_t>> stalenesses = {0, 1, 3, std::nullopt};
  for (unsigned seed = 0; seed < 6000 && !::testing::Test::HasFailure(); ++seed) {
    SCOPED_TRACE("seed " + std::to_string(seed));
    const int servers = 1 + static_cast<int>(seed % 3);
    const int workers = 1 + static_cast<int>(seed / 3 % 4);
    Exploration(seed, servers, workers, stalenesses[seed % stalenesses.size()]).finish();
  }
}

}  // namespace
}  // namespace reef
