#include "chain/schedule_writer.h"
#include "chain/solvers.h"

namespace reef {
namespace {

using Kind = ScheduleOp::Kind;

// Backward over stages s to e, whose tapes are there, as are their outputs but the last.
void go_back(ScheduleWriter& writer, std::uint32_t s, std::uint32_t e) {
  for (std::uint32_t i = e; i >= s; --i) {
    writer.add(Kind::kBackward, i);
    if (i > s) writer.drop_output(i - 1);
  }
}

}  // namespace

Schedule periodic_schedule(std::uint32_t stages, std::uint32_t period) {
  ScheduleWriter writer(stages);
  const std::uint32_t last = (stages - 1) / period * period + 1;  // first stage of the last segment
  for (std::uint32_t s = 1; s < last; s += period) writer.sweep(s, s + period - 1);
  for (std::uint32_t i = last; i <= stages; ++i) writer.add(Kind::kTaped, i);
  writer.add(Kind::kLoss, 0);
  writer.drop_output(stages);
  go_back(writer, last, stages);
  for (std::uint32_t s = last; s > 1;) {
    const std::uint32_t e = s - 1;
    s -= period;
    writer.drop_output(e);
    for (std::uint32_t i = s; i < e; ++i) writer.add(Kind::kTaped, i);
    writer.add(Kind::kRetape, e);
    go_back(writer, s, e);
  }
  return writer.take();
}

}  // namespace reef
