#pragma once

#include <cstdint>
#include <functional>
#include <optional>
#include <span>
#include <string>
#include <vector>

#include "reef/export.h"

namespace reef {

/// Pure data and pure code (no Torch): asynchronous stochastic gradient descent as a protocol. Workers pull
/// parameters from a server and push gradients to it, each in its own time; what the server does is decided
/// by the order in which they come, which is its log. Numbers are float32.

/// What becomes of what a worker pushes. With w the server's parameters, t the number of its steps, and tau
/// how many of them came between the worker's pull and its push:
enum class AsyncRule : std::uint8_t {
  kPlain,             ///< a step with g(w_(t - tau)) (Downpour SGD; Dean et al. 2012, section 4.1)
  kStalenessAware,    ///< the same, its learning rate divided by max(tau, 1) (1511.05950, section 3.2)
  kDelayCompensated,  ///< a step with g + lambda * g * g * (w_t - w_(t - tau)) (DC-ASGD; 1609.08326, eq. 10)
  kElastic,           ///< no gradients: x += a * (c - x) and c += a * (x - c), of a worker's x and the
                      ///< server's c as they were before (EASGD; 1412.6651, section 3.1)
};

struct AsyncOptions {
  /// Ranks 0 to servers - 1 of the group serve, each a slice of the parameters; all others work.
  int servers = 1;
  AsyncRule rule = AsyncRule::kPlain;
  /// A worker that has pushed more than so many times more often than the slowest waits when it pulls (stale
  /// synchronous parallel; Ho et al. 2013). 0 is synchronous: what the workers push in a round is added up in
  /// the order of ranks and divided by their number, one step a round. Else every push is a step. nullopt:
  /// nobody waits.
  std::optional<std::int64_t> staleness = 0;
  double compensation = 0.04;  ///< kDelayCompensated: lambda; not negative
  double elasticity = 0.0;     ///< kElastic: a, in (0, 1]; 0: 0.9 / workers
};

/// One thing that a server did, in order.
struct AsyncEvent {
  enum class Kind : std::uint8_t {
    kPull,   ///< the worker was given the parameters after step number `version`
    kPush,   ///< came from what it was given after step `version`, `staleness` steps ago
    kLeave,  ///< the worker left, or was found to be gone: nobody waits for it
    kJoin,   ///< it came back, at the clock of the slowest (its own, if that is higher)
    kClock,  ///< its clock is set forward, to that of the server where it is highest
  };
  Kind kind = Kind::kPull;
  int worker = 0;              ///< counted among the workers
  std::int64_t clock = 0;      ///< how many pushes of the worker came before
  std::int64_t version = 0;    ///< steps; the server's own, where nothing else is said
  std::int64_t staleness = 0;  ///< tau; of kPush
  double seconds = 0.0;        ///< since the server began; of a simulation: virtual

  bool operator==(const AsyncEvent&) const = default;
};

/// What a server did in a run: with it, the run can be done again, bit for bit.
struct AsyncLog {
  AsyncOptions options;
  int workers = 1;
  std::vector<AsyncEvent> events = {};

  /// How many pushes were so many steps late: element i of i steps.
  REEF_API std::vector<std::int64_t> staleness_histogram() const;
  /// One line for the options and one for each event, from which read_async_log() makes the same log.
  REEF_API std::string text() const;
};

/// Throws ConfigError, which names the line, for what is not such a text.
REEF_API AsyncLog read_async_log(const std::string& text);

/// What a worker and the network take, in seconds of virtual time.
struct AsyncDelays {
  /// From a pull to the push; of worker i element i modulo their number.
  std::vector<double> compute = {1.0};
  double message = 0.01;  ///< one way
  double jitter = 0.5;    ///< each delay is drawn evenly from its mean times [1 - jitter, 1 + jitter]
  /// A worker that is away from one moment to another: what it was computing then is lost.
  struct Absence {
    int worker = 0;
    double from = 0.0;
    double until = 0.0;
  };
  std::vector<Absence> absences = {};
};

/// The log of one server and `workers` workers that push `pushes` times each (fewer by what absences lose),
/// in virtual time: the same seed gives the same log on every machine. Throws ConfigError for numbers that
/// mean nothing.
REEF_API AsyncLog simulate_async(int workers, std::int64_t pushes, const AsyncOptions& options,
                                 const AsyncDelays& delays, std::uint64_t seed);

/// What is computed in a run, for doing it again.
struct AsyncModel {
  /// What worker `worker` pushed for its push number `clock`, all servers' slices in order, of what it had
  /// been given (kElastic: of its own parameters after that). Writes `pushed`.
  std::function<void(int worker, std::int64_t clock, std::span<const float> given, std::span<float> pushed)>
      push;
  /// A step of server `server`: of its slice, with the learning rate times `rate`. Not called for kElastic.
  std::function<void(int server, std::span<float> slice, std::span<const float> gradient, double rate)> step;
};

/// Does a run again, real or simulated, from the logs of its servers, and gives their slices as they ended.
/// `slices` are those at the beginning. Throws ConfigError if the logs are not of one run, or not of this
/// protocol: a worker that went on too early, or a staleness that is not what comes out.
REEF_API std::vector<std::vector<float>> replay_async(const std::vector<AsyncLog>& logs,
                                                      std::vector<std::vector<float>> slices,
                                                      const AsyncModel& model);

/// The names by which options are given as text: "plain", "staleness_aware", "delay_compensated", "elastic".
REEF_API std::string to_string(AsyncRule rule);
/// Throws ConfigError, which lists them, for another name.
REEF_API AsyncRule async_rule_of(const std::string& name);
/// Throws ConfigError for options that mean nothing with so many workers.
REEF_API void check_async_options(const AsyncOptions& options, int workers);

}  // namespace reef
