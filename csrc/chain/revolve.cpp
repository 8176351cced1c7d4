#include <limits>

#include "chain/schedule_writer.h"
#include "chain/solvers.h"

namespace reef {
namespace {

using Kind = ScheduleOp::Kind;

/// p(l, c) = min over j of j + p(l - j, c - 1) + p(j, c), and the j: Griewank and Walther, by dynamic
/// programming.
class Revolve {
 public:
  explicit Revolve(std::uint32_t stages) : stages_(stages) {}

  Schedule schedule(std::uint32_t checkpoints) {
    while (first_.size() <= checkpoints) add_checkpoint();
    ScheduleWriter writer(stages_);
    reverse(writer, 1, stages_, checkpoints);
    return writer.take();
  }

 private:
  // One checkpoint more: of each number of steps, how many go before the next one is kept.
  void add_checkpoint() {
    const std::size_t c = first_.size();
    std::vector<std::uint64_t> steps(stages_ + 1, 0);
    std::vector<std::uint32_t> first(stages_ + 1, 0);
    for (std::uint32_t l = 2; l <= stages_ && c > 0; ++l) {
      if (c == 1) {
        steps[l] = std::uint64_t{l} * (l - 1) / 2;
        first[l] = l - 1;  // all of them, and once more for every step before
        continue;
      }
      steps[l] = std::numeric_limits<std::uint64_t>::max();
      for (std::uint32_t j = 1; j < l; ++j) {
        const std::uint64_t of_j = j + fewer_[l - j] + steps[j];
        if (of_j >= steps[l]) continue;
        steps[l] = of_j;
        first[l] = j;
      }
    }
    fewer_ = std::move(steps);
    first_.push_back(std::move(first));
  }

  void reverse(ScheduleWriter& writer, std::uint32_t s, std::uint32_t t, std::uint32_t checkpoints) {
    if (s == t) {
      turn(writer, s);
      return;
    }
    const std::uint32_t j = first_[checkpoints][t - s + 1];
    writer.sweep(s, s + j - 1);
    reverse(writer, s + j, t, checkpoints > 1 ? checkpoints - 1 : 1);
    writer.drop_output(s + j - 1);
    reverse(writer, s, s + j - 1, checkpoints);
  }

  // The last stage is met before the loss.
  void turn(ScheduleWriter& writer, std::uint32_t s) const {
    if (s < stages_) {
      writer.turn(s);
      return;
    }
    writer.add(Kind::kTaped, s);
    writer.add(Kind::kLoss, 0);
    writer.drop_output(s);
    writer.add(Kind::kBackward, s);
  }

  std::uint32_t stages_;
  std::vector<std::vector<std::uint32_t>> first_;  ///< by checkpoints and steps
  std::vector<std::uint64_t> fewer_;               ///< p for one checkpoint less
};

}  // namespace

std::vector<Schedule> revolve_schedules(std::uint32_t stages) {
  Revolve revolve(stages);
  std::vector<Schedule> schedules;
  for (std::uint32_t checkpoints = 1; checkpoints <= stages; ++checkpoints) {
    schedules.push_back(revolve.schedule(checkpoints));
  }
  return schedules;
}

std::uint64_t revolve_steps(std::uint64_t steps, std::uint64_t checkpoints) {
  // C(c + r, c) by r, until it holds all steps; the next one is C(c + r, c) (c + r + 1) / (r + 1).
  std::uint64_t r = 0;
  std::uint64_t reached = 1;
  std::uint64_t before = 0;  // C(c + r, r - 1) = C(c + r, c) r / (c + 1)
  while (reached < steps) {
    ++r;
    reached = reached * (checkpoints + r) / r;
    before = reached * r / (checkpoints + 1);
  }
  return r * steps - before;
}

}  // namespace reef
