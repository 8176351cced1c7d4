#pragma once

#include <cstdint>

namespace reef {

/// How many bytes of gathered parameters stay in memory where a budget says how much there is: what the step
/// that repeats leaves free. Pure; ranks that are told the same decide the same.
class GatheredRoom {
 public:
  /// `most_bytes`: what all parameters take. There is no room at first.
  explicit GatheredRoom(std::int64_t most_bytes) : most_bytes_(most_bytes) {}

  std::int64_t bytes() const { return bytes_; }

  /// After a step with this room. `fitting_bytes`: the most that was gathered at any time, and what the
  /// budget had left when most was alive; negative: the bytes that were evicted. What fits is taken at once.
  /// What was evicted is given back at once, or half of the room if that is more, and then nothing is taken
  /// for some steps, the first time kSteps, and twice as many each time after that: steps that differ cost a
  /// little at first, and then nothing.
  void after_step(std::int64_t fitting_bytes);
  /// There is no budget.
  void close() { *this = GatheredRoom(most_bytes_); }

  static constexpr int kSteps = 8;

 private:
  std::int64_t most_bytes_;
  std::int64_t bytes_ = 0;
  std::int64_t waits_ = 0;  ///< so many steps
  std::int64_t patience_ = kSteps;
};

}  // namespace reef
