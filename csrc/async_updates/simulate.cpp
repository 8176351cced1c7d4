#include <algorithm>
#include <cmath>
#include <map>
#include <string>
#include <utility>

#include "async_updates/clocks.h"
#include "reef/async_updates.h"
#include "reef/error.h"

namespace reef {
namespace {

/// SplitMix64: the same numbers everywhere.
class Draws {
 public:
  explicit Draws(std::uint64_t seed) : state_(seed) {}
  /// In [0, 1).
  double next() {
    state_ += 0x9E3779B97F4A7C15U;
    std::uint64_t mixed = state_;
    mixed = (mixed ^ (mixed >> 30U)) * 0xBF58476D1CE4E5B9U;
    mixed = (mixed ^ (mixed >> 27U)) * 0x94D049BB133111EBU;
    mixed ^= mixed >> 31U;
    return static_cast<double>(mixed >> 11U) * 0x1.0p-53;
  }

 private:
  std::uint64_t state_;
};

class Simulation {
 public:
  Simulation(int workers, std::int64_t pushes, const AsyncOptions& options, const AsyncDelays& delays,
             std::uint64_t seed)
      : delays_(delays),
        draws_(seed),
        clocks_(workers, options.staleness),
        log_{options, workers, {}},
        workers_(static_cast<std::size_t>(workers), Worker{pushes}) {
    for (const auto& absence : delays.absences) {
      plan(absence.from, {What::kLeaves, absence.worker});
      plan(absence.until, {What::kReturns, absence.worker});
    }
    for (int worker = 0; worker < workers; ++worker) plan(message(), {What::kPull, worker});
  }

  AsyncLog run() {
    while (!coming_.empty()) {
      const auto next = coming_.begin();
      now_ = next->first.first;
      const Coming what = next->second;
      coming_.erase(next);
      take(what);
      for (int worker = 0; worker < log_.workers; ++worker) {
        if (of(worker).waits && clocks_.may_go_on(worker)) give(worker);
      }
    }
    return std::move(log_);
  }

 private:
  enum class What : std::uint8_t { kPull, kPush, kLeaves, kReturns };
  struct Coming {
    What what;
    int worker;
    int life = 0;  ///< of the worker, when it was sent: what is older is lost
  };
  struct Worker {
    std::int64_t left;
    bool waits = false;
    int life = 0;
  };

  Worker& of(int worker) { return workers_[static_cast<std::size_t>(worker)]; }
  void plan(double at, Coming what) { coming_.emplace(std::pair(at, planned_++), what); }
  double drawn(double mean) { return mean * (1.0 + delays_.jitter * (2.0 * draws_.next() - 1.0)); }
  double message() { return drawn(delays_.message); }
  double compute(int worker) {
    return drawn(delays_.compute[static_cast<std::size_t>(worker) % delays_.compute.size()]);
  }
  void record(AsyncEvent event) {
    event.seconds = now_;
    log_.events.push_back(event);
    if (!clocks_.round().empty()) clocks_.stepped();
  }

  void take(const Coming& coming) {
    Worker& worker = of(coming.worker);
    const bool present = clocks_.is_present(coming.worker);
    switch (coming.what) {
      case What::kPull:
        if (coming.life == worker.life) worker.waits = true;
        break;
      case What::kPush:
        if (coming.life != worker.life) break;
        record(clocks_.push(coming.worker));
        if (--worker.left == 0) {
          record(clocks_.leave(coming.worker));
        } else {
          const double back_and_forth = message() + message();
          plan(now_ + back_and_forth, {What::kPull, coming.worker, worker.life});
        }
        break;
      case What::kLeaves:
        if (!present) break;
        ++worker.life;
        worker.waits = false;
        record(clocks_.leave(coming.worker));
        break;
      case What::kReturns:
        if (present || worker.left == 0) break;
        record(clocks_.join(coming.worker));
        worker.waits = true;
        break;
    }
  }

  void give(int worker) {
    of(worker).waits = false;
    record(clocks_.pull(worker));
    const double there = message();
    const double made = there + compute(worker);
    plan(now_ + made + message(), {What::kPush, worker, of(worker).life});
  }

  const AsyncDelays& delays_;
  Draws draws_;
  AsyncClocks clocks_;
  AsyncLog log_;
  std::vector<Worker> workers_;
  std::map<std::pair<double, std::int64_t>, Coming> coming_;  ///< at one moment: in the order of planning
  std::int64_t planned_ = 0;
  double now_ = 0.0;
};

bool is_duration(double seconds) { return std::isfinite(seconds) && seconds >= 0.0; }

void check(int workers, std::int64_t pushes, const AsyncDelays& delays) {
  const bool fine = !delays.compute.empty() &&
                    std::all_of(delays.compute.begin(), delays.compute.end(), is_duration) &&
                    is_duration(delays.message) && delays.jitter >= 0.0 && delays.jitter <= 1.0;
  if (!fine)
    throw ConfigError(
        "simulate_async was given delays that are none: give finite seconds that are not negative, and a "
        "jitter from 0 to 1.");
  if (pushes < 1)
    throw ConfigError("simulate_async was given " + std::to_string(pushes) + " pushes: give at least 1.");
  for (const auto& absence : delays.absences) {
    if (absence.worker >= 0 && absence.worker < workers && is_duration(absence.from) &&
        std::isfinite(absence.until) && absence.from < absence.until) {
      continue;
    }
    throw ConfigError("simulate_async was given an absence of worker " + std::to_string(absence.worker) +
                      " from " + std::to_string(absence.from) + " until " + std::to_string(absence.until) +
                      " s, among " + std::to_string(workers) + " workers: it must end after it begins.");
  }
}

}  // namespace

AsyncLog simulate_async(int workers, std::int64_t pushes, const AsyncOptions& options,
                        const AsyncDelays& delays, std::uint64_t seed) {
  check_async_options(options, workers);
  if (options.servers != 1)
    throw ConfigError("simulate_async was given " + std::to_string(options.servers) +
                      " servers: it simulates one; give 1.");
  check(workers, pushes, delays);
  return Simulation(workers, pushes, options, delays, seed).run();
}

}  // namespace reef
