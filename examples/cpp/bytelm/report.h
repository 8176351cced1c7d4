#pragma once

#include <chrono>
#include <cstdint>
#include <optional>
#include <string>

#include "options.h"
#include "run_log.h"

namespace bytelm {

/// What a run tells while it goes: lines on stdout and a bar on stderr (both of rank 0 only, the bar only if
/// stderr is a terminal), and the log of this rank.
class Report {
 public:
  Report(const Options& options, int rank, int ranks, std::int64_t first_step);
  ~Report() { clear_bar(); }
  Report(const Report&) = delete;
  Report& operator=(const Report&) = delete;

  void say(const std::string& text);

  /// Around each step: only the time between the two counts. `bytes_alive` is nullopt if nobody counts.
  void step_begins();
  void step_ends(std::int64_t step, double nats, std::optional<std::int64_t> bytes_alive);

  /// "loss 2.310 bits/byte, 12345 tokens/s, 45.2 MiB alive, 1:23 left".
  std::string progress() const;

  double tokens_per_second() const;

  RunLog& log() { return log_; }

 private:
  void draw_bar();
  void clear_bar();

  const bool speaks_;
  const bool shows_bar_;
  const std::int64_t first_step_;
  const std::int64_t steps_;
  const std::int64_t tokens_per_step_;
  RunLog log_;
  std::int64_t step_;
  double bits_per_byte_ = 0;
  std::optional<std::int64_t> bytes_alive_;
  double seconds_ = 0;  ///< in steps
  std::chrono::steady_clock::time_point begin_;
  std::chrono::steady_clock::time_point bar_drawn_;
  bool bar_visible_ = false;
};

}  // namespace bytelm
