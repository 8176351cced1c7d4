#include <ATen/autocast_mode.h>
#include <ATen/core/grad_mode.h>
#include <ATen/ops/empty.h>

#include <algorithm>
#include <cstdio>
#include <cstring>
#include <map>
#include <mutex>
#include <sstream>
#include <torch/csrc/distributed/c10d/ProcessGroup.hpp>
#include <utility>

#include "distributed/bytes_over_ranks.h"
#include "reef/bytes.h"
#include "reef/chain.h"
#include "reef/error.h"
#include "reef/tier_speed.h"

namespace reef {
namespace {

using at::Tensor;

std::string kind_of(const Tensor& input) {
  std::ostringstream kind;
  kind << input.sizes() << ' ' << input.scalar_type() << ' ' << input.device() << ' ' << input.requires_grad()
       << ' ' << at::autocast::is_autocast_enabled(input.device().type());
  return kind.str();
}

// Seconds differ between ranks, and with them schedules.
ChainProfile agreed(const ChainProfile& own, const ProcessGroupPtr& group, c10::Device device) {
  if (!group) return own;
  const std::string text = own.json();
  const Tensor bytes = at::empty({static_cast<std::int64_t>(text.size())}, at::kByte);
  std::memcpy(bytes.mutable_data_ptr(), text.data(), text.size());
  const Tensor first = broadcast_bytes(bytes, group, device);
  return chain_profile_from_json({static_cast<const char*>(first.const_data_ptr()), first.nbytes()});
}

// Needs no more memory than a stage does.
TierSpeed measured(const ChainProfile& profile, const std::shared_ptr<Tier>& tier, c10::Device device) {
  std::uint64_t bytes = 4096;
  for (const StageProfile& stage : profile.stages) bytes = std::max(bytes, stage.tape_bytes);
  return tier_speed(tier, device, std::min(bytes, std::uint64_t{16} << 20));
}

ChainPlan planned(const ChainProfile& profile, std::int64_t budget_bytes, const ChainSolverOptions& solver) {
  if (budget_bytes < 0) {
    throw ConfigError("PlannedChain: a budget of " + std::to_string(budget_bytes) + " bytes; give 0 or more");
  }
  ChainPlan plan{profile, {}, {}, static_cast<std::uint64_t>(budget_bytes), natural_peak_bytes(profile)};
  plan.schedule = plan_chain(profile, plan.budget_bytes, solver);
  plan.cost = simulate(profile, plan.schedule);
  return plan;
}

}  // namespace

struct PlannedChain::State {
  /// What has been found for a kind of input, and chosen for budgets.
  struct Known {
    Chain chain;  ///< with stages joined
    ChainProfile profile;
    std::map<std::int64_t, ChainPlan> plans;
  };

  Chain chain;
  ProcessGroupPtr group;  ///< or none
  PlannedChainOptions options;
  std::mutex mutex;
  std::map<std::string, Known> by_kind;

  // With the lock held. What throws is not remembered.
  Known& known(const Tensor& input) {
    const std::string kind = kind_of(input);
    if (const auto found = by_kind.find(kind); found != by_kind.end()) return found->second;
    Known of{chain, {}, {}};
    ChainProfile own = profile_chain(of.chain, input, options.profile);
    if (options.tier) {
      own.tier_speed = options.tier_speed.bytes_per_second > 0 ? options.tier_speed
                                                               : measured(own, options.tier, input.device());
      const TierUse use = options.tier->use();
      own.tier_capacity_bytes = use.capacity_bytes - use.used_bytes;
    }
    of.profile = agreed(own, group, input.device());
    return by_kind.emplace(kind, std::move(of)).first->second;
  }
  const ChainPlan& plan(Known& of, std::int64_t budget_bytes) const {
    if (const auto found = of.plans.find(budget_bytes); found != of.plans.end()) return found->second;
    return of.plans.emplace(budget_bytes, planned(of.profile, budget_bytes, options.solver)).first->second;
  }
};

PlannedChain::PlannedChain(Chain chain, const PlannedChainOptions& options)
    : PlannedChain(std::move(chain), ProcessGroupPtr(), options) {}
PlannedChain::PlannedChain(Chain chain, const ProcessGroupPtr& group, const PlannedChainOptions& options)
    : state_(new State{std::move(chain), group, options, {}, {}}) {}
PlannedChain::~PlannedChain() = default;
PlannedChain::PlannedChain(PlannedChain&&) noexcept = default;
PlannedChain& PlannedChain::operator=(PlannedChain&&) noexcept = default;

Tensor PlannedChain::operator()(const Tensor& input, std::int64_t budget_bytes) {
  if (!at::GradMode::is_enabled()) return state_->chain(input);
  std::unique_lock lock(state_->mutex);
  State::Known& of = state_->known(input);
  const Schedule& schedule = state_->plan(of, budget_bytes).schedule;
  lock.unlock();  // neither changes any more
  return run(of.chain, schedule, input, state_->options.checkpoint, state_->options.tier);
}

const ChainPlan& PlannedChain::plan(const Tensor& input, std::int64_t budget_bytes) {
  const std::lock_guard lock(state_->mutex);
  return state_->plan(state_->known(input), budget_bytes);
}

std::string ChainPlan::text() const {
  const double more = cost.recomputed_seconds + cost.waited_seconds;
  const double once = cost.seconds - more;
  char share[32];
  std::snprintf(share, sizeof share, "%.1f", once > 0 ? more / once * 100 : 0.0);
  const auto bytes = [](std::uint64_t count) { return format_bytes(static_cast<std::int64_t>(count)); };
  return std::to_string(schedule.stages) + " stages within " + bytes(budget_bytes) + ": peak " +
         bytes(cost.peak_bytes) + " of " + bytes(natural_peak_bytes) + ", " + share + " % more time" +
         (cost.offloaded_bytes > 0 ? ", " + bytes(cost.offloaded_bytes) + " by way of the tier" : "");
}

}  // namespace reef
