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

/// How a server uses what a worker pushes. w are the server's parameters, t is the number of its steps, and
/// the staleness tau is the number of steps between the worker's pull and its push.
enum class AsyncRule : std::uint8_t {
  /// Takes a step with g(w_(t - tau)) (Downpour SGD; Dean et al. 2012, section 4.1).
  kPlain,
  /// Takes the same step with the learning rate divided by max(tau, 1) (1511.05950, section 3.2).
  kStalenessAware,
  /// Takes a step with g + lambda * g * g * (w_t - w_(t - tau)) (DC-ASGD; 1609.08326, eq. 10).
  kDelayCompensated,
  /// Uses no gradients: x += a * (c - x) for the worker's parameters x and c += a * (x - c) for the server's
  /// c, both with the values before the exchange (EASGD; 1412.6651, section 3.1).
  kElastic,
};

struct AsyncOptions {
  /// The number of servers: ranks 0 to servers - 1 of the group, each with a slice of the parameters. All
  /// other ranks are workers.
  int servers = 1;
  AsyncRule rule = AsyncRule::kPlain;
  /// How many pushes a worker may be ahead of the slowest one: beyond that it waits when it pulls (stale
  /// synchronous parallel; Ho et al. 2013). 0 is synchronous: the gradients of a round are added up in the
  /// order of ranks and divided by the number of workers, and a round is one step. Otherwise every push is a
  /// step. With nullopt nobody waits.
  std::optional<std::int64_t> staleness = 0;
  double compensation = 0.04;  ///< lambda of kDelayCompensated; not negative
  double elasticity = 0.0;     ///< a of kElastic, in (0, 1]; 0 stands for 0.9 / workers
};

/// One thing that a server did, in order.
struct AsyncEvent {
  enum class Kind : std::uint8_t {
    kPull,   ///< the worker was given the parameters as they were after step number `version`
    kPush,   ///< the worker pushed what it made of the parameters of step `version`, `staleness` steps ago
    kLeave,  ///< the worker left, or was found to be gone, and nobody waits for it any longer
    kJoin,   ///< the worker came back, at the clock of the slowest worker or its own if that is higher
    kClock,  ///< the worker's clock was set forward to its highest on any server
  };
  Kind kind = Kind::kPull;
  int worker = 0;              ///< the worker's number among the workers
  std::int64_t clock = 0;      ///< the number of pushes of the worker before this event
  std::int64_t version = 0;    ///< a number of steps: the server's own, unless the kind says otherwise
  std::int64_t staleness = 0;  ///< tau of a kPush
  double seconds = 0.0;        ///< since the server began; virtual time in a simulation

  bool operator==(const AsyncEvent&) const = default;
};

/// What a server did in a run. replay_async() repeats the run from it, bit for bit.
struct AsyncLog {
  AsyncOptions options;
  int workers = 1;
  std::vector<AsyncEvent> events = {};

  /// Counts pushes by staleness: element i is the number of pushes that were i steps late.
  REEF_API std::vector<std::int64_t> staleness_histogram() const;
  /// Writes one line for the options and one for each event; read_async_log() reads them back.
  REEF_API std::string text() const;
};

/// Reads AsyncLog::text(). Throws ConfigError, which names the line, if the text is not of that form.
REEF_API AsyncLog read_async_log(const std::string& text);

/// The delays of a simulation, in seconds of virtual time.
struct AsyncDelays {
  /// The mean time from a pull to the push; worker i has element i modulo their number.
  std::vector<double> compute = {1.0};
  double message = 0.01;  ///< the mean time of a message, one way
  double jitter = 0.5;    ///< each delay is drawn uniformly from its mean times [1 - jitter, 1 + jitter]
  /// A time during which a worker is away. What it is computing when it leaves is lost.
  struct Absence {
    int worker = 0;
    double from = 0.0;
    double until = 0.0;
  };
  std::vector<Absence> absences = {};
};

/// Simulates one server and `workers` workers, each of which pushes `pushes` times (less what its absences
/// lose), in virtual time, and gives the server's log. The same seed gives the same log on every machine.
/// Throws ConfigError for negative or not finite numbers.
REEF_API AsyncLog simulate_async(int workers, std::int64_t pushes, const AsyncOptions& options,
                                 const AsyncDelays& delays, std::uint64_t seed);

/// The computations of a run, which replay_async() calls.
struct AsyncModel {
  /// Computes push number `clock` of worker `worker` from the parameters that it was given (kElastic: from
  /// its own parameters after that exchange), and writes it into `pushed`: all servers' slices in order.
  std::function<void(int worker, std::int64_t clock, std::span<const float> given, std::span<float> pushed)>
      push;
  /// Takes a step of server `server` on its slice, with the learning rate times `rate`. Never called for
  /// kElastic.
  std::function<void(int server, std::span<float> slice, std::span<const float> gradient, double rate)> step;
};

/// Repeats a real or simulated run from the logs of its servers. Takes their slices at the beginning and
/// gives their slices at the end. Throws ConfigError if the logs are not of one run, or contradict the
/// protocol, as when a worker went on too early or a staleness differs from the one recorded.
REEF_API std::vector<std::vector<float>> replay_async(const std::vector<AsyncLog>& logs,
                                                      std::vector<std::vector<float>> slices,
                                                      const AsyncModel& model);

/// Gives "plain", "staleness_aware", "delay_compensated" or "elastic".
REEF_API std::string to_string(AsyncRule rule);
/// Gives the rule of this name. Throws ConfigError, which lists the names, if there is none.
REEF_API AsyncRule async_rule_of(const std::string& name);
/// Throws ConfigError for options that cannot be used with so many workers.
REEF_API void check_async_options(const AsyncOptions& options, int workers);

}  // namespace reef
