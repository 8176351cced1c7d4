#include <algorithm>
#include <string>

#include "swap/gap.h"
#include "swap/simulation.h"

namespace reef {

std::string_view name(SwapPolicy policy) {
  switch (policy) {
    case SwapPolicy::kRecency:
      return "recency";
    case SwapPolicy::kFarthest:
      return "farthest";
    case SwapPolicy::kVdnn:
      return "vdnn";
    case SwapPolicy::kTflms:
      return "tflms";
    case SwapPolicy::kAutoSwap:
      return "autoswap";
    case SwapPolicy::kCapuchin:
      return "capuchin";
  }
  return "?";
}

namespace {

// Rhu et al., vDNN (MICRO 2016), section III: offload what a layer's forward leaves behind, prefetch it while
// the layer after it runs backward. Here a layer is whatever reads the page next.
SwapPlan plan_vdnn(const Trace& trace) {
  std::vector<Gap> gaps = longest_gaps(trace);
  std::sort(gaps.begin(), gaps.end(), [](const Gap& a, const Gap& b) { return a.to < b.to; });
  SwapPlan plan = empty_plan(trace);
  for (std::size_t i = 0; i < gaps.size(); ++i) {
    const std::size_t layer_before = i == 0 ? gaps[i].to - 1 : gaps[i - 1].to;
    add(plan, gaps[i], std::clamp(layer_before, gaps[i].from, gaps[i].to - 1));
  }
  return plan;
}

// Le et al., TFLMS (2018), section 4: swap edges that span more than a threshold, and let the swap-in start a
// fixed number of operators ahead.
SwapPlan plan_tflms(const Trace& trace) {
  const std::size_t threshold = trace.operators.size() / 8;
  constexpr std::size_t kLead = 8;
  SwapPlan plan = empty_plan(trace);
  for (const Gap& gap : gaps_of(trace)) {
    if (gap.to - gap.from > threshold) add(plan, gap, std::max(gap.from, gap.to - std::min(gap.to, kLead)));
  }
  return plan;
}

// Zhang et al., AutoSwap (2019), section 3.3: by area of absence, bytes x seconds, until the load fits.
SwapPlan plan_autoswap(const Trace& trace, std::uint64_t budget_bytes, const SwapSpeeds& speeds) {
  std::vector<Gap> gaps = gaps_of(trace);
  std::stable_sort(gaps.begin(), gaps.end(), [](const Gap& a, const Gap& b) {
    return static_cast<double>(a.bytes) * a.seconds > static_cast<double>(b.bytes) * b.seconds;
  });
  std::vector<std::uint64_t> load = natural_load_bytes(trace);
  SwapPlan plan = empty_plan(trace);
  for (const Gap& gap : gaps) {
    if (*std::max_element(load.begin(), load.end()) <= budget_bytes) break;
    add(plan, gap, fetch_in_time(trace, gap, speeds));
    for (std::size_t op = gap.from + 1; op < gap.to; ++op) load[op % load.size()] -= gap.bytes;
  }
  return plan;
}

// Peng et al., Capuchin (ASPLOS 2020), section 4.3: of the pages absent over the peak, those whose gap leaves
// most time beyond the two transfers, until they cover the excess.
SwapPlan plan_capuchin(const Trace& trace, std::uint64_t budget_bytes, const SwapSpeeds& speeds) {
  const std::vector<std::uint64_t> load = natural_load_bytes(trace);
  const auto peak = static_cast<std::size_t>(std::max_element(load.begin(), load.end()) - load.begin());
  const auto slack = [&](const Gap& gap) {
    const auto bytes = static_cast<double>(gap.bytes);
    return gap.seconds - bytes / speeds.out_bytes_per_second - bytes / speeds.in_bytes_per_second;
  };
  std::vector<Gap> gaps;
  for (const Gap& gap : gaps_of(trace)) {
    const bool over_peak = gap.from < peak && peak < gap.to;
    const bool over_next_peak = peak + load.size() < gap.to;
    if (over_peak || over_next_peak) gaps.push_back(gap);
  }
  std::stable_sort(gaps.begin(), gaps.end(), [&](const Gap& a, const Gap& b) { return slack(a) > slack(b); });
  SwapPlan plan = empty_plan(trace);
  std::uint64_t excess = load[peak] > budget_bytes ? load[peak] - budget_bytes : 0;
  for (const Gap& gap : gaps) {
    if (excess == 0) break;
    add(plan, gap, fetch_in_time(trace, gap, speeds));
    excess -= std::min(excess, gap.bytes);
  }
  return plan;
}

}  // namespace

SwapPlan plan_swaps(const Trace& trace, std::uint64_t budget_bytes, SwapPolicy policy,
                    const SwapSpeeds& speeds) {
  check_feasible(trace, budget_bytes);
  if (trace.operators.empty()) return {};
  switch (policy) {
    case SwapPolicy::kRecency:
      return empty_plan(trace);
    case SwapPolicy::kFarthest:
      return plan_farthest(trace, budget_bytes, speeds);
    case SwapPolicy::kVdnn:
      return plan_vdnn(trace);
    case SwapPolicy::kTflms:
      return plan_tflms(trace);
    case SwapPolicy::kAutoSwap:
      return plan_autoswap(trace, budget_bytes, speeds);
    case SwapPolicy::kCapuchin:
      return plan_capuchin(trace, budget_bytes, speeds);
  }
  return {};
}

}  // namespace reef
