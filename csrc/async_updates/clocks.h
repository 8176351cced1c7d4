#pragma once

#include <cstdint>
#include <optional>
#include <vector>

#include "reef/async_updates.h"

namespace reef {

/// Who has pushed how often, who may go on, and which step each worker has read: the protocol of one server,
/// without values. What is not in order (a push of what was never pulled) is a ConfigError, and changes
/// nothing.
class AsyncClocks {
 public:
  AsyncClocks(int workers, std::optional<std::int64_t> staleness);

  /// Whether it may be given the parameters now: a step that is due comes first.
  bool may_go_on(int worker) const;
  AsyncEvent pull(int worker);
  AsyncEvent push(int worker);
  /// Whose pushes the step that is due is made of, in order; none: no step is due, and others are waited for.
  std::vector<int> round() const;
  /// That step has been taken.
  void stepped();
  /// It is not waited for any more. What it has pushed stays.
  AsyncEvent leave(int worker);
  AsyncEvent join(int worker);
  /// Forward only.
  AsyncEvent set_clock(int worker, std::int64_t clock);

  bool is_present(int worker) const { return at(worker).present; }
  std::int64_t clock(int worker) const { return at(worker).clock; }
  std::int64_t version() const { return version_; }

 private:
  struct Worker {
    bool present = true;
    std::int64_t clock = 0;
    std::optional<std::int64_t> read = {};      ///< version, since its last push
    std::optional<std::int64_t> in_round = {};  ///< its clock after what the next step has of it
  };

  const Worker& at(int worker) const;
  Worker& present(int worker, const char* what);
  std::optional<std::int64_t> slowest() const;
  void keep_floor();

  const std::optional<std::int64_t> staleness_;
  std::vector<Worker> workers_;
  std::int64_t version_ = 0;
  std::int64_t floor_ = 0;  ///< where the slowest was, for who comes when nobody is there
};

}  // namespace reef
