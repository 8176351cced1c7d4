#include <algorithm>
#include <limits>
#include <queue>
#include <unordered_map>

#include "chain/schedule_writer.h"
#include "chain/solvers.h"
#include "chain/terms.h"

namespace reef {
namespace {

using Kind = ScheduleOp::Kind;

/// Sets of stages, a bit each; bit 0 is the chain's input, which is always there.
using Stages = std::uint32_t;

/// A* over what may be there between two operations. By seconds, within a budget, or by the largest peak on
/// the way.
class Search {
 public:
  enum class By : std::uint8_t { kSeconds, kPeak };

  Search(const ChainProfile& profile, By by, std::uint64_t budget_bytes)
      : terms_(profile), stages_(terms_.count - 1), by_(by), budget_bytes_(budget_bytes) {
    for (std::uint32_t i = 1; i <= stages_; ++i) {
      if (profile.stages[i - 1].tape_has_input) has_input_ |= Stages{1} << i;
      if (profile.stages[i - 1].tape_has_output) has_output_ |= Stages{1} << i;
    }
  }

  bool run() {
    visit(State{}, 0, {}, {});
    while (!open_.empty()) {
      const auto [bound, cost, key] = open_.top();
      open_.pop();
      Known& known = known_.at(key);
      if (known.closed) continue;
      known.closed = true;
      const State state = unpacked(key);
      if (state.lost && state.behind == 0 && state.named == 1 && state.taped == 0) {
        goal_ = key;
        return true;
      }
      expand(state, cost);
    }
    return false;
  }

  double cost() const { return known_.at(goal_).cost; }

  Schedule schedule() const {
    Schedule schedule{stages_, {}};
    for (std::uint64_t key = goal_; key != packed(State{}); key = known_.at(key).from) {
      schedule.operations.push_back(known_.at(key).by);
    }
    std::reverse(schedule.operations.begin(), schedule.operations.end());
    return drop_early(schedule);
  }

 private:
  struct State {
    Stages named = 1, taped = 0;
    std::uint32_t behind = 0;  ///< before the loss: the stage that has run last; else the next of backward
    bool lost = false;
  };
  struct Known {
    double cost = std::numeric_limits<double>::infinity();
    std::uint64_t from = 0;
    ScheduleOp by;
    bool closed = false;
  };
  struct Open {
    double bound, cost;
    std::uint64_t key;
    bool operator<(const Open& other) const { return bound > other.bound; }
  };

  static std::uint64_t packed(const State& state) {
    return state.named | std::uint64_t{state.taped} << 16 | std::uint64_t{state.behind} << 32 |
           std::uint64_t{state.lost} << 40;
  }
  static State unpacked(std::uint64_t key) {
    return {static_cast<Stages>(key & 0xFFFF), static_cast<Stages>(key >> 16 & 0xFFFF),
            static_cast<std::uint32_t>(key >> 32 & 0xFF), (key >> 40 & 1) != 0};
  }
  static bool has(Stages set, std::uint32_t stage) { return (set >> stage & 1) != 0; }
  static Stages with(Stages set, std::uint32_t stage) { return set | Stages{1} << stage; }
  static Stages without(Stages set, std::uint32_t stage) { return set & ~(Stages{1} << stage); }

  std::uint64_t live_bytes(const State& state) const {
    const Stages outputs =
        (state.named | (state.taped & has_input_) >> 1 | (state.taped & has_output_)) & ~Stages{1};
    std::uint64_t bytes = state.lost ? terms_.behind[state.behind] + terms_.output[state.behind] : 0;
    for (std::uint32_t i = 1; i <= stages_; ++i) {
      if (has(outputs, i)) bytes += terms_.output[i];
      if (has(state.taped, i)) bytes += terms_.tape[i] - (has(has_output_, i) ? terms_.output[i] : 0);
    }
    return bytes;
  }

  // What is to be done at least: never more than is.
  double rest_seconds(const State& state) const {
    double seconds = 0;
    const std::uint32_t top = state.lost ? state.behind : stages_;
    for (std::uint32_t i = 1; i <= top; ++i) {
      seconds += terms_.backward_seconds[i];
      const double again = std::min(terms_.forward_seconds[i], terms_.retape_seconds[i]);
      if (!state.lost && i > state.behind) {
        seconds += terms_.forward_seconds[i];
      } else if (!has(state.taped, i)) {
        seconds += again;
      }
    }
    return seconds;
  }

  void visit(const State& to, double cost, const State& from, ScheduleOp by) {
    const std::uint64_t key = packed(to);
    Known& known = known_[key];
    if (known.closed || cost >= known.cost) return;
    known = {cost, packed(from), by, false};
    open_.push({by_ == By::kSeconds ? cost + rest_seconds(to) : cost, cost, key});
  }

  void expand(const State& state, double cost) {
    const std::uint64_t live = live_bytes(state);
    const auto go = [&](Kind kind, std::uint32_t stage, std::uint64_t bytes, double seconds, State to) {
      const std::uint64_t peak = live + bytes;
      if (peak > budget_bytes_) return;
      const double reached = by_ == By::kSeconds ? cost + seconds : std::max(cost, static_cast<double>(peak));
      visit(to, reached, state, {kind, stage});
    };
    const auto run = [&](Kind kind, std::uint32_t i) {
      State to = state;
      if (!state.lost) to.behind = i;
      if (kind != Kind::kRetape) to.named = with(to.named, i);
      if (kind != Kind::kForward) to.taped = with(to.taped, i);
      if (kind == Kind::kRetape) {
        go(kind, i, terms_.retape[i], terms_.retape_seconds[i], to);
      } else {
        go(kind, i, kind == Kind::kTaped ? terms_.taped[i] : terms_.forward[i], terms_.forward_seconds[i],
           to);
      }
    };
    for (std::uint32_t i = 1; i <= stages_; ++i) {
      if (state.lost ? i <= state.behind : i == state.behind + 1) {
        if (has(state.named, i - 1)) {
          if (!has(state.named, i)) run(Kind::kForward, i);
          if (!has(state.named, i) && !has(state.taped, i)) run(Kind::kTaped, i);
          if (state.lost && !has(state.taped, i)) run(Kind::kRetape, i);
        }
      }
      if (has(state.named, i)) {
        State to = state;
        to.named = without(to.named, i);
        go(Kind::kDropOutput, i, 0, 0, to);
      }
      if (has(state.taped, i)) {
        State to = state;
        to.taped = without(to.taped, i);
        go(Kind::kDropTape, i, 0, 0, to);
      }
    }
    if (!state.lost && state.behind == stages_ && has(state.named, stages_)) {
      State to = state;
      to.lost = true;
      go(Kind::kLoss, 0, terms_.output[stages_], 0, to);
    }
    if (state.lost && has(state.taped, state.behind) && !has(state.named, state.behind)) {
      State to = state;
      to.taped = without(to.taped, state.behind);
      --to.behind;
      go(Kind::kBackward, state.behind, terms_.backward[state.behind], terms_.backward_seconds[state.behind],
         to);
    }
  }

  ChainTerms terms_;
  std::uint32_t stages_;
  By by_;
  std::uint64_t budget_bytes_;
  Stages has_input_ = 0, has_output_ = 0;
  std::unordered_map<std::uint64_t, Known> known_;
  std::priority_queue<Open> open_;
  std::uint64_t goal_ = 0;
};

}  // namespace

std::optional<Schedule> exact_schedule(const ChainProfile& profile, std::uint64_t budget_bytes) {
  Search search(profile, Search::By::kSeconds, budget_bytes);
  if (!search.run()) return std::nullopt;
  return search.schedule();
}

std::uint64_t exact_minimum_bytes(const ChainProfile& profile) {
  Search search(profile, Search::By::kPeak, std::numeric_limits<std::uint64_t>::max());
  search.run();
  return static_cast<std::uint64_t>(search.cost());
}

}  // namespace reef
