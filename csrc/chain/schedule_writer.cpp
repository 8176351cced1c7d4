#include "chain/schedule_writer.h"

#include <vector>

namespace reef {

Schedule drop_early(const Schedule& schedule) {
  using Kind = ScheduleOp::Kind;
  std::vector<ScheduleOp> operations;                         // but those that drop something
  std::vector<std::vector<ScheduleOp>> drops;                 // behind each of these
  std::vector<std::size_t> last_use(schedule.stages + 1, 0);  // of an output; by it or for the next one
  for (const ScheduleOp& op : schedule.operations) {
    if (op.kind == Kind::kDropOutput) {
      drops[last_use[op.stage]].push_back(op);
      continue;
    }
    if (op.kind == Kind::kDropTape) {
      drops.back().push_back(op);
      continue;
    }
    const std::size_t at = operations.size();
    operations.push_back(op);
    drops.emplace_back();
    if (op.kind == Kind::kLoss) last_use[schedule.stages] = at;
    const bool forward = op.kind == Kind::kForward || op.kind == Kind::kTaped || op.kind == Kind::kRetape;
    if (forward) last_use[op.stage - 1] = at;
    if (forward && op.kind != Kind::kRetape) last_use[op.stage] = at;
  }
  Schedule early{schedule.stages, {}};
  for (std::size_t at = 0; at < operations.size(); ++at) {
    early.operations.push_back(operations[at]);
    early.operations.insert(early.operations.end(), drops[at].begin(), drops[at].end());
  }
  return early;
}

}  // namespace reef
