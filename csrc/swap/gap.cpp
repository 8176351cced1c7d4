#include "swap/gap.h"

#include <algorithm>
#include <map>

namespace reef {

std::vector<Gap> gaps_of(const Trace& trace) {
  const std::size_t count = trace.operators.size();
  std::vector<double> began(2 * count + 1, 0);  // began[i]: when operator i of two steps in a row begins
  for (std::size_t i = 0; i < 2 * count; ++i) began[i + 1] = began[i] + trace.operators[i % count].seconds;
  const auto uses = next_uses(trace);
  std::vector<Gap> gaps;
  for (std::size_t op = 0; op < count; ++op) {
    for (std::size_t i = 0; i < uses[op].size(); ++i) {
      const std::uint64_t next = uses[op][i];
      if (next == kNeverUsed || next <= op + 1) continue;
      const std::uint32_t page = trace.operators[op].accesses[i].page;
      gaps.push_back({page, op, next, trace.pages[page].bytes, began[next] - began[op + 1]});
    }
  }
  return gaps;
}

std::vector<Gap> longest_gaps(const Trace& trace) {
  std::map<std::uint32_t, Gap> longest;
  for (const Gap& gap : gaps_of(trace)) {
    if (trace.pages[gap.page].persistent) continue;
    const auto [known, is_new] = longest.try_emplace(gap.page, gap);
    if (!is_new && gap.to - gap.from > known->second.to - known->second.from) known->second = gap;
  }
  std::vector<Gap> gaps;
  for (const auto& [page, gap] : longest) gaps.push_back(gap);
  return gaps;
}

SwapPlan empty_plan(const Trace& trace) {
  SwapPlan plan;
  plan.after.resize(trace.operators.size());
  return plan;
}

void add(SwapPlan& plan, const Gap& gap, std::size_t fetch_after) {
  plan.after[gap.from].push_back({gap.page, SwapMove::Kind::kEvict});
  plan.after[fetch_after % plan.after.size()].push_back({gap.page, SwapMove::Kind::kFetch});
}

std::size_t fetch_in_time(const Trace& trace, const Gap& gap, const SwapSpeeds& speeds) {
  const double needed = static_cast<double>(gap.bytes) / speeds.in_bytes_per_second;
  double ahead = 0;
  std::size_t op = gap.to - 1;
  while (op > gap.from && ahead < needed) ahead += trace.operators[op-- % trace.operators.size()].seconds;
  return op;
}

}  // namespace reef
