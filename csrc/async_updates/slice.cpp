#include "async_updates/slice.h"

#include <algorithm>
#include <string>
#include <utility>

#include "reef/error.h"

namespace reef {
namespace {

float attraction(float elasticity, float x, float center) { return elasticity * (x - center); }

}  // namespace

double elasticity_of(const AsyncOptions& options, int workers) {
  return options.elasticity > 0.0 ? options.elasticity : 0.9 / workers;
}

void exchange_elastically(double elasticity, std::span<float> x, std::span<const float> center) {
  const auto a = static_cast<float>(elasticity);
  for (std::size_t i = 0; i < x.size(); ++i) x[i] -= attraction(a, x[i], center[i]);
}

AsyncSlice::AsyncSlice(const AsyncOptions& options, int workers, std::int64_t elements)
    : clocks_(workers, options.staleness),
      log_{options, workers, {}},
      held_(static_cast<std::size_t>(workers)),
      elements_(elements) {}

void AsyncSlice::record(AsyncEvent event) {
  event.seconds = seconds_;
  log_.events.push_back(event);
}

std::optional<AsyncSlice::Given> AsyncSlice::pull(int worker, const Values& values) {
  if (!clocks_.may_go_on(worker)) return std::nullopt;
  record(clocks_.pull(worker));
  Held& held = held_[static_cast<std::size_t>(worker)];
  if (!held.center.empty()) return Given{std::exchange(held.center, {}), true};
  Given given{{values.parameters.begin(), values.parameters.end()}, false};
  if (log_.options.rule == AsyncRule::kDelayCompensated) held.given = given.values;
  return given;
}

std::optional<double> AsyncSlice::push(int worker, std::span<const float> pushed, const Values& values) {
  if (static_cast<std::int64_t>(pushed.size()) != elements_)
    throw ConfigError("worker " + std::to_string(worker) + " pushes " + std::to_string(pushed.size()) +
                      " elements to a slice of " + std::to_string(elements_) + ".");
  const AsyncEvent event = clocks_.push(worker);
  record(event);
  Held& held = held_[static_cast<std::size_t>(worker)];
  held.pushed.assign(pushed.begin(), pushed.end());
  held.staleness = event.staleness;
  held.exchanges = true;
  return step_if_due(values);
}

std::optional<double> AsyncSlice::leave(int worker, const Values& values) {
  record(clocks_.leave(worker));
  Held& held = held_[static_cast<std::size_t>(worker)];
  held.exchanges = false;
  held.center.clear();
  return step_if_due(values);
}

std::optional<double> AsyncSlice::set_clock(int worker, std::int64_t clock, const Values& values) {
  record(clocks_.set_clock(worker, clock));
  return step_if_due(values);
}

void AsyncSlice::join(int worker) { record(clocks_.join(worker)); }

std::optional<double> AsyncSlice::step_if_due(const Values& values) {
  const std::vector<int> round = clocks_.round();
  if (round.empty()) return std::nullopt;
  if (log_.options.rule == AsyncRule::kElastic) {
    draw_center(round, values.parameters);
    stepped();
    return std::nullopt;
  }
  add_up(round, values.gradient);
  const Held& first = held_[static_cast<std::size_t>(round.front())];
  const std::int64_t staleness = round.size() == 1 ? first.staleness : 0;
  if (staleness > 0 && log_.options.rule == AsyncRule::kDelayCompensated) {
    const auto lambda = static_cast<float>(log_.options.compensation);
    for (std::size_t i = 0; i < values.gradient.size(); ++i) {
      const float g = values.gradient[i];
      values.gradient[i] = g + lambda * g * g * (values.parameters[i] - first.given[i]);
    }
  }
  const bool slower = log_.options.rule == AsyncRule::kStalenessAware && staleness > 1;
  return slower ? 1.0 / static_cast<double>(staleness) : 1.0;
}

// In the order of workers, divided last.
void AsyncSlice::add_up(const std::vector<int>& round, std::span<float> gradient) const {
  const auto pushed = [&](int worker) -> const std::vector<float>& {
    return held_[static_cast<std::size_t>(worker)].pushed;
  };
  std::copy(pushed(round.front()).begin(), pushed(round.front()).end(), gradient.begin());
  if (round.size() == 1) return;
  for (std::size_t n = 1; n < round.size(); ++n) {
    const std::vector<float>& next = pushed(round[n]);
    for (std::size_t i = 0; i < gradient.size(); ++i) gradient[i] += next[i];
  }
  const auto count = static_cast<float>(round.size());
  for (float& each : gradient) each /= count;
}

// All of a round by the same center.
void AsyncSlice::draw_center(const std::vector<int>& round, std::span<float> center) {
  const auto a = static_cast<float>(elasticity_of(log_.options, log_.workers));
  const std::vector<float> before(center.begin(), center.end());
  for (const int worker : round) {
    Held& held = held_[static_cast<std::size_t>(worker)];
    for (std::size_t i = 0; i < center.size(); ++i) center[i] += attraction(a, held.pushed[i], before[i]);
    if (std::exchange(held.exchanges, false)) held.center = before;
  }
}

}  // namespace reef
