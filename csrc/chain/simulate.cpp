#include <string>
#include <vector>

#include "reef/error.h"
#include "reef/schedule.h"

namespace reef {
namespace {

using Kind = ScheduleOp::Kind;

class ChainSimulation {
 public:
  ChainSimulation(const ChainProfile& profile, const Schedule& schedule)
      : profile_(profile), schedule_(schedule), named_(stages() + 2), taped_(stages() + 2) {}

  ScheduleCost run() {
    for (at_ = 0; at_ < schedule_.operations.size(); ++at_) step(schedule_.operations[at_]);
    if (!lost_ || behind_ != 0) refuse("ends before backward has reached the first stage");
    for (std::uint32_t i = 1; i <= stages(); ++i) {
      if (named_[i] || taped_[i])
        refuse("ends while something of stage " + std::to_string(i) + " is still there");
    }
    return std::move(cost_);
  }

 private:
  std::uint32_t stages() const { return static_cast<std::uint32_t>(profile_.stages.size()); }
  const StageProfile& of(std::uint32_t stage) const { return profile_.stages[stage - 1]; }
  std::uint64_t output_bytes(std::uint32_t stage) const { return stage == 0 ? 0 : of(stage).output_bytes; }

  [[noreturn]] void refuse(const std::string& what) const {
    const std::string where = at_ < schedule_.operations.size()
                                  ? "operation " + std::to_string(at_ + 1) + " (" +
                                        Schedule{0, {schedule_.operations[at_]}}.text() + ") "
                                  : "it ";
    throw ConfigError("Schedule: " + where + what + "; make it with plan_chain()");
  }
  void require(bool holds, const char* what) const {
    if (!holds) refuse(what);
  }

  // An output is in memory while it has its name, and while a tape holds it: that of the stage that reads it,
  // and perhaps that of the one that has made it.
  bool there(std::uint32_t stage) const {
    if (stage == 0) return false;
    return named_[stage] || taped_[stage + 1] || (taped_[stage] && of(stage).tape_has_output);
  }
  template <class Change>
  void change(std::uint32_t stage, const Change& how) {
    const auto bytes = [&] {
      std::uint64_t sum = 0;
      for (const std::uint32_t i : {stage - 1, stage}) sum += there(i) ? output_bytes(i) : 0;
      return sum;
    };
    const std::uint64_t before = bytes();
    how();
    load_.output_bytes += bytes() - before;
  }
  std::uint64_t tape_bytes(std::uint32_t stage) const {
    return of(stage).tape_bytes - (of(stage).tape_has_output ? of(stage).output_bytes : 0);
  }
  void add_tape(std::uint32_t stage) {
    change(stage, [&] { taped_[stage] = true; });
    load_.tape_bytes += tape_bytes(stage);
  }
  void drop_tape(std::uint32_t stage) {
    change(stage, [&] { taped_[stage] = false; });
    load_.tape_bytes -= tape_bytes(stage);
  }

  // Runs for so long, and needs so much on top.
  void work(double seconds, std::uint64_t bytes) {
    cost_.seconds += seconds;
    load_.working_bytes = bytes;
  }

  void step(const ScheduleOp& op) {
    const std::uint32_t stage = op.stage;
    if (op.kind == Kind::kLoss) {
      require(stage == 0, "names a stage");
    } else {
      require(stage >= 1 && stage <= stages(), "is of a stage that the chain does not have");
    }
    load_.working_bytes = 0;
    start(op);
    cost_.load.push_back(load_);
    if (load_.total() > cost_.peak_bytes) {
      cost_.peak_bytes = load_.total();
      cost_.peak_operation = at_;
    }
    finish(op);
  }

  void start(const ScheduleOp& op) {
    const std::uint32_t stage = op.stage;
    switch (op.kind) {
      case Kind::kForward:
      case Kind::kTaped:
      case Kind::kRetape: {
        const bool anew = op.kind == Kind::kRetape;
        require(stage == 1 || named_[stage - 1], "does not find its input");
        require(anew || !named_[stage], "makes an output that is there");
        require(op.kind == Kind::kForward || !taped_[stage], "makes a tape that is there");
        if (lost_) {
          require(stage <= behind_, "runs a stage that backward has left behind");
        } else {
          require(!anew && stage == reached_ + 1, "is before the loss, where each stage runs once, in order");
        }
        const double seconds = anew ? of(stage).retape_seconds : of(stage).forward_seconds;
        if (lost_) cost_.recomputed_seconds += seconds;
        work(seconds, op.kind == Kind::kForward ? of(stage).forward_bytes
                      : anew                    ? of(stage).retape_bytes
                                                : of(stage).taped_bytes);
        return;
      }
      case Kind::kLoss:
        require(!lost_ && reached_ == stages() && named_[stages()],
                "does not find the last output, or comes again");
        work(0, output_bytes(stages()));
        return;
      case Kind::kBackward:
        require(lost_ && stage == behind_, "is not of the stage that backward has reached");
        require(taped_[stage], "does not find its tape");
        require(!named_[stage], "finds its output kept, which nothing reads any more");
        work(of(stage).backward_seconds, of(stage).backward_bytes);
        return;
      case Kind::kDropOutput:
        require(named_[stage], "drops an output that is not there");
        return;
      case Kind::kDropTape:
        require(taped_[stage], "drops a tape that is not there");
        return;
    }
    refuse("is of no kind that there is");
  }

  void finish(const ScheduleOp& op) {
    const std::uint32_t stage = op.stage;
    switch (op.kind) {
      case Kind::kForward:
      case Kind::kTaped:
      case Kind::kRetape:
        if (!lost_) reached_ = stage;
        if (op.kind != Kind::kRetape) change(stage, [&] { named_[stage] = true; });
        if (op.kind != Kind::kForward) add_tape(stage);
        return;
      case Kind::kLoss:
        lost_ = true;
        behind_ = stages();
        load_.gradient_bytes += output_bytes(stages());
        return;
      case Kind::kBackward:
        drop_tape(stage);
        behind_ = stage - 1;
        load_.gradient_bytes += of(stage).gradient_bytes + output_bytes(stage - 1);
        load_.gradient_bytes -= output_bytes(stage);
        return;
      case Kind::kDropOutput:
        change(stage, [&] { named_[stage] = false; });
        return;
      case Kind::kDropTape:
        drop_tape(stage);
        return;
    }
  }

  const ChainProfile& profile_;
  const Schedule& schedule_;
  std::size_t at_ = 0;
  std::vector<bool> named_, taped_;  ///< by stage
  std::uint32_t reached_ = 0;        ///< before the loss: the stage that has run last
  bool lost_ = false;                ///< the loss has been
  std::uint32_t behind_ = 0;         ///< after it: the stage that backward comes to next
  ScheduleLoad load_;
  ScheduleCost cost_;
};

}  // namespace

ScheduleCost simulate(const ChainProfile& profile, const Schedule& schedule) {
  check(profile);
  if (schedule.stages != profile.stages.size()) {
    throw ConfigError("Schedule: it is for " + std::to_string(schedule.stages) +
                      " stages, and the chain has " + std::to_string(profile.stages.size()) +
                      "; make it with plan_chain()");
  }
  return ChainSimulation(profile, schedule).run();
}

}  // namespace reef
