#include <algorithm>
#include <string>
#include <vector>

#include "chain/terms.h"
#include "reef/error.h"
#include "reef/schedule.h"

namespace reef {
namespace {

using Kind = ScheduleOp::Kind;

/// An output, or a tape without the outputs that it holds.
struct Item {
  bool there = false;   ///< in memory, and counted
  bool copied = false;  ///< the tier has it, or will have
  bool away = false;    ///< and memory has not
  double left_at = 0;   ///< when its copy is in the tier
  double back_at = 0;   ///< and when it is in memory again
};

class ChainSimulation {
 public:
  ChainSimulation(const ChainProfile& profile, const Schedule& schedule)
      : profile_(profile),
        schedule_(schedule),
        named_(stages() + 2),
        taped_(stages() + 2),
        outputs_(stages() + 2),
        tapes_(stages() + 2) {
    load_.tape_bytes = profile_.state_bytes;
  }

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

  void step(const ScheduleOp& op) {
    const std::uint32_t stage = op.stage;
    if (op.kind == Kind::kLoss) {
      require(stage == 0, "names a stage");
    } else {
      require(stage >= 1 && stage <= stages(), "is of a stage that the chain does not have");
    }
    load_.working_bytes = 0;
    cost_.begin_seconds.push_back(cost_.seconds);
    cost_.end_seconds.push_back(cost_.seconds);
    start(op);
    cost_.load.push_back(load_);
    if (load_.total() > cost_.peak_bytes) {
      cost_.peak_bytes = load_.total();
      cost_.peak_operation = at_;
    }
    finish(op);
    for (std::uint32_t i = stage > 1 ? stage - 1 : 1; i <= stage; ++i) settle(i);
  }

  // An output lasts while it has its name, and while a tape holds it: that of the stage that reads it, and
  // perhaps that of the one that has made it. The tier's copy lasts as long.
  void settle(std::uint32_t stage) {
    const bool read = stage < stages() && taped_[stage + 1] && of(stage + 1).tape_has_input;
    const bool output = named_[stage] || read || (taped_[stage] && of(stage).tape_has_output);
    settle(outputs_[stage], output, output_bytes(stage), load_.output_bytes);
    settle(tapes_[stage], taped_[stage], own_tape_bytes(of(stage)), load_.tape_bytes);
  }
  void settle(Item& item, bool lasts, std::uint64_t bytes, std::uint64_t& sum) {
    if (!lasts && item.copied) tier_bytes_ -= bytes;
    if (!lasts) item = {.there = item.there};
    const bool there = lasts && !item.away;
    if (there && !item.there) sum += bytes;
    if (!there && item.there) sum -= bytes;
    item.there = there;
  }

  // Runs for so long, and needs so much on top.
  void work(double seconds, std::uint64_t bytes) {
    cost_.begin_seconds.back() = cost_.seconds;
    cost_.seconds += seconds;
    cost_.end_seconds.back() = cost_.seconds;
    load_.working_bytes = bytes;
  }
  void wait_until(double when) {
    if (when <= cost_.seconds) return;
    cost_.waited_seconds += when - cost_.seconds;
    cost_.seconds = cost_.end_seconds.back() = when;
  }
  // The end of a transfer that is given to the lane now. As soon as that, the stages wait for its work.
  double transfer(std::uint64_t bytes) {
    const double begin = std::max(lane_free_at_, cost_.seconds);
    const double taken = static_cast<double>(bytes) / profile_.tier_speed.bytes_per_second;
    lane_free_at_ = begin + taken;
    cost_.begin_seconds.back() = begin;
    cost_.seconds += taken * profile_.tier_speed.work_share;
    cost_.waited_seconds += taken * profile_.tier_speed.work_share;
    return cost_.end_seconds.back() = lane_free_at_;
  }

  void start_forward(const ScheduleOp& op) {
    const std::uint32_t stage = op.stage;
    const bool anew = op.kind == Kind::kRetape;
    require(stage == 1 || (named_[stage - 1] && !outputs_[stage - 1].away), "does not find its input");
    require(anew || !named_[stage], "makes an output that is there");
    require(!outputs_[stage].away, "makes an output that is in the tier");
    require(op.kind == Kind::kForward || !taped_[stage], "makes a tape that is there");
    if (lost_) {
      require(stage <= behind_, "runs a stage that backward has left behind");
    } else {
      require(!anew && stage == reached_ + 1, "is before the loss, where each stage runs once, in order");
    }
    wait_until(outputs_[stage - 1].back_at);
    const double seconds = anew ? of(stage).retape_seconds : of(stage).forward_seconds;
    if (lost_) cost_.recomputed_seconds += seconds;
    work(seconds, op.kind == Kind::kForward ? of(stage).forward_bytes
                  : anew                    ? of(stage).retape_bytes
                                            : of(stage).taped_bytes);
  }

  void start_backward(std::uint32_t stage) {
    require(lost_ && stage == behind_, "is not of the stage that backward has reached");
    require(taped_[stage], "does not find its tape");
    require(!named_[stage], "finds its output kept, which nothing reads any more");
    const Item input = of(stage).tape_has_input ? outputs_[stage - 1] : Item{};
    require(!tapes_[stage].away && !input.away && !outputs_[stage].away,
            "needs something that is in the tier");
    wait_until(std::max({tapes_[stage].back_at, input.back_at, outputs_[stage].back_at}));
    work(of(stage).backward_seconds, of(stage).backward_bytes);
  }

  void start_transfer(const ScheduleOp& op) {
    const bool output =
        op.kind == Kind::kOffloadOutput || op.kind == Kind::kEvictOutput || op.kind == Kind::kPrefetchOutput;
    Item& item = output ? outputs_[op.stage] : tapes_[op.stage];
    const std::uint64_t bytes = output ? output_bytes(op.stage) : own_tape_bytes(of(op.stage));
    require(profile_.tier_speed.bytes_per_second > 0, "moves something, and the profile knows of no tier");
    require(!output || op.stage < stages(), "moves the last output, which the program has");
    if (op.kind == Kind::kOffloadOutput || op.kind == Kind::kOffloadTape) {
      require(item.there && !item.copied, "copies what is not there, or has been copied");
      item.copied = true;
      item.left_at = transfer(bytes);
      cost_.offloaded_bytes += bytes;
      tier_bytes_ += bytes;
      cost_.tier_bytes = std::max(cost_.tier_bytes, tier_bytes_);
      require(tier_bytes_ <= profile_.tier_capacity_bytes, "copies more than the tier holds");
    } else if (op.kind == Kind::kEvictOutput || op.kind == Kind::kEvictTape) {
      require(item.there && item.copied, "evicts what is not there, or has no copy in the tier");
      require(!output || lost_ || reached_ > op.stage, "evicts what the next stage reads");
      wait_until(std::max(item.left_at, item.back_at));
      item.away = true;
    } else {
      require(item.away, "brings back what is not away");
      item.back_at = transfer(bytes);
      item.away = false;
      item.there = true;
      (output ? load_.output_bytes : load_.tape_bytes) += bytes;
    }
  }

  void start(const ScheduleOp& op) {
    switch (op.kind) {
      case Kind::kForward:
      case Kind::kTaped:
      case Kind::kRetape:
        return start_forward(op);
      case Kind::kLoss:
        require(!lost_ && reached_ == stages() && named_[stages()],
                "does not find the last output, or comes again");
        work(0, output_bytes(stages()));
        return;
      case Kind::kBackward:
        return start_backward(op.stage);
      case Kind::kDropOutput:
        require(named_[op.stage], "drops an output that is not there");
        return;
      case Kind::kDropTape:
        require(taped_[op.stage], "drops a tape that is not there");
        return;
      case Kind::kOffloadOutput:
      case Kind::kOffloadTape:
      case Kind::kEvictOutput:
      case Kind::kEvictTape:
      case Kind::kPrefetchOutput:
      case Kind::kPrefetchTape:
        return start_transfer(op);
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
        if (op.kind != Kind::kRetape) named_[stage] = true;
        if (op.kind != Kind::kForward) taped_[stage] = true;
        return;
      case Kind::kLoss:
        lost_ = true;
        behind_ = stages();
        load_.gradient_bytes += output_bytes(stages());
        return;
      case Kind::kBackward:
        taped_[stage] = false;
        behind_ = stage - 1;
        load_.gradient_bytes += of(stage).gradient_bytes + output_bytes(stage - 1);
        load_.gradient_bytes -= output_bytes(stage);
        return;
      case Kind::kDropOutput:
        named_[stage] = false;
        return;
      case Kind::kDropTape:
        taped_[stage] = false;
        return;
      default:
        return;
    }
  }

  const ChainProfile& profile_;
  const Schedule& schedule_;
  std::size_t at_ = 0;
  std::vector<bool> named_, taped_;    ///< by stage
  std::vector<Item> outputs_, tapes_;  ///< by stage
  double lane_free_at_ = 0;            ///< transfers that have been given to it are over
  std::uint64_t tier_bytes_ = 0;
  std::uint32_t reached_ = 0;  ///< before the loss: the stage that has run last
  bool lost_ = false;          ///< the loss has been
  std::uint32_t behind_ = 0;   ///< after it: the stage that backward comes to next
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
