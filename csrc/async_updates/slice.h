#pragma once

#include <cstdint>
#include <optional>
#include <span>
#include <vector>

#include "async_updates/clocks.h"
#include "reef/async_updates.h"

namespace reef {

/// One server's slice of the parameters, which the caller keeps and steps: what each worker has been given,
/// what the next step is to be made of, and the log of it.
class AsyncSlice {
 public:
  AsyncSlice(const AsyncOptions& options, int workers, std::int64_t elements);

  /// The values of the caller's: of `elements` each.
  struct Values {
    std::span<float> parameters;
    std::span<float> gradient;  ///< written where a step is due; of no use to kElastic
  };
  struct Given {
    std::vector<float> values;
    bool exchanged = false;  ///< kElastic: the center as it was before the worker's last push
  };
  /// What the worker is given; nullopt: it has to wait. Bytes: the slice once, with kDelayCompensated twice.
  std::optional<Given> pull(int worker, const Values& values);
  /// These return the rate of the step that is due, which the caller takes by the gradient and then says so:
  /// nothing else may come before. nullopt: none is due. kElastic takes its steps itself.
  std::optional<double> push(int worker, std::span<const float> pushed, const Values& values);
  std::optional<double> leave(int worker, const Values& values);
  std::optional<double> set_clock(int worker, std::int64_t clock, const Values& values);
  void stepped() { clocks_.stepped(); }
  void join(int worker);

  const AsyncClocks& clocks() const { return clocks_; }
  const AsyncLog& log() const { return log_; }
  /// The moment of what is done next.
  void set_seconds(double seconds) { seconds_ = seconds; }

 private:
  struct Held {
    std::vector<float> given;   ///< kDelayCompensated: w_bak, of its last pull
    std::vector<float> pushed;  ///< since the last step
    std::int64_t staleness = 0;
    bool exchanges = false;     ///< kElastic: it has pushed, and waits for the center
    std::vector<float> center;  ///< that it is to be given then
  };

  std::optional<double> step_if_due(const Values& values);
  void add_up(const std::vector<int>& round, std::span<float> gradient) const;
  void draw_center(const std::vector<int>& round, std::span<float> center);
  void record(AsyncEvent event);

  AsyncClocks clocks_;
  AsyncLog log_;
  std::vector<Held> held_;
  std::int64_t elements_;
  double seconds_ = 0.0;
};

/// kElastic: what a worker's `x` and the center attract each other by, a * (x - c).
double elasticity_of(const AsyncOptions& options, int workers);
void exchange_elastically(double elasticity, std::span<float> x, std::span<const float> center);

}  // namespace reef
