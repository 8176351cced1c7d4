#include "async_updates/clocks.h"

#include <algorithm>
#include <string>

#include "reef/error.h"

namespace reef {

using Kind = AsyncEvent::Kind;

namespace {

ConfigError out_of_order(int worker, const std::string& what) {
  return ConfigError("worker " + std::to_string(worker) + " " + what + ".");
}

}  // namespace

AsyncClocks::AsyncClocks(int workers, std::optional<std::int64_t> staleness)
    : staleness_(staleness), workers_(static_cast<std::size_t>(std::max(workers, 0))) {}

const AsyncClocks::Worker& AsyncClocks::at(int worker) const {
  if (worker < 0 || worker >= static_cast<int>(workers_.size()))
    throw ConfigError("there is no worker " + std::to_string(worker) + " among " +
                      std::to_string(workers_.size()) + ".");
  return workers_[static_cast<std::size_t>(worker)];
}

AsyncClocks::Worker& AsyncClocks::present(int worker, const char* what) {
  if (!at(worker).present) throw out_of_order(worker, std::string(what) + ", and has left");
  return workers_[static_cast<std::size_t>(worker)];
}

std::optional<std::int64_t> AsyncClocks::slowest() const {
  std::optional<std::int64_t> least;
  for (const Worker& each : workers_) {
    if (each.present && (!least || each.clock < *least)) least = each.clock;
  }
  return least;
}

void AsyncClocks::keep_floor() { floor_ = std::max(floor_, slowest().value_or(0)); }

bool AsyncClocks::may_go_on(int worker) const {
  const Worker& asked = at(worker);
  return asked.present && round().empty() && (!staleness_ || asked.clock - *slowest() <= *staleness_);
}

AsyncEvent AsyncClocks::pull(int worker) {
  Worker& asks = present(worker, "pulls");
  if (!may_go_on(worker))
    throw out_of_order(worker, "pulls at clock " + std::to_string(asks.clock) + ", where it has to wait");
  asks.read = version_;
  return {Kind::kPull, worker, asks.clock, version_};
}

AsyncEvent AsyncClocks::push(int worker) {
  Worker& pushes = present(worker, "pushes");
  if (!pushes.read) throw out_of_order(worker, "pushes what was made of nothing: it has not pulled since");
  if (!round().empty()) throw out_of_order(worker, "pushes before the step that is due");
  const AsyncEvent event{Kind::kPush, worker, pushes.clock, *pushes.read, version_ - *pushes.read};
  ++pushes.clock;
  pushes.read.reset();
  pushes.in_round = pushes.clock;
  keep_floor();
  return event;
}

std::vector<int> AsyncClocks::round() const {
  std::vector<int> pushed;
  std::int64_t last = 0;
  for (int worker = 0; worker < static_cast<int>(workers_.size()); ++worker) {
    const Worker& each = at(worker);
    if (!each.in_round) continue;
    pushed.push_back(worker);
    last = std::max(last, *each.in_round);
  }
  // Synchronous: until everybody has come as far.
  if (staleness_ == 0 && !pushed.empty() && slowest().value_or(last) < last) pushed.clear();
  return pushed;
}

void AsyncClocks::stepped() {
  for (Worker& each : workers_) each.in_round.reset();
  ++version_;
}

AsyncEvent AsyncClocks::leave(int worker) {
  Worker& leaves = present(worker, "leaves");
  leaves.present = false;
  leaves.read.reset();
  keep_floor();
  return {Kind::kLeave, worker, leaves.clock, version_};
}

AsyncEvent AsyncClocks::join(int worker) {
  if (at(worker).present) throw out_of_order(worker, "joins, and is here");
  Worker& joins = workers_[static_cast<std::size_t>(worker)];
  joins.clock = std::max(joins.clock, slowest().value_or(floor_));
  joins.present = true;
  joins.read.reset();
  return {Kind::kJoin, worker, joins.clock, version_};
}

AsyncEvent AsyncClocks::set_clock(int worker, std::int64_t clock) {
  Worker& set = present(worker, "sets its clock");
  if (clock < set.clock)
    throw out_of_order(
        worker, "sets its clock back from " + std::to_string(set.clock) + " to " + std::to_string(clock));
  set.clock = clock;
  set.read.reset();
  keep_floor();
  return {Kind::kClock, worker, clock, version_};
}

}  // namespace reef
