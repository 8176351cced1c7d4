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
  const c10::DeviceType device = input.device().type();
  kind << input.sizes() << ' ' << input.suggest_memory_format() << input.is_contiguous() << ' '
       << input.scalar_type() << ' ' << input.device() << ' ' << input.requires_grad() << ' ';
  if (at::autocast::is_autocast_enabled(device)) kind << at::autocast::get_autocast_dtype(device);
  kind << ' ';
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
  /// What has been found for a kind of input and stages as they were, and chosen for budgets.
  struct Known {
    std::vector<std::size_t> parts;  ///< of stages that were joined; of the stages themselves nothing is kept
    ChainProfile profile;
    std::map<std::int64_t, std::shared_ptr<const ChainPlan>> plans;
    std::uint64_t used = 0;  ///< when, in calls
  };
  struct Found {
    std::vector<std::size_t> parts;
    std::shared_ptr<const ChainPlan> plan;
  };

  Chain chain;
  ProcessGroupPtr group;  ///< or none
  PlannedChainOptions options;
  std::mutex mutex;
  std::map<std::string, Known> by_kind;
  std::uint64_t calls = 0;

  Found find(const Chain& now, const Tensor& input, std::int64_t budget_bytes) {
    now.check_current();
    const std::lock_guard guard(mutex);
    Known& of = known(now, input);
    of.used = ++calls;
    if (const auto plan = of.plans.find(budget_bytes); plan != of.plans.end())
      return {of.parts, plan->second};
    if (of.plans.size() == kMostPlans) of.plans.clear();
    auto plan = std::make_shared<const ChainPlan>(planned(of.profile, budget_bytes, options.solver));
    return {of.parts, of.plans.emplace(budget_bytes, std::move(plan)).first->second};
  }

 private:
  static constexpr std::size_t kMostKinds = 64;
  static constexpr std::size_t kMostPlans = 16;

  // With the lock held. What throws is not remembered. Ranks may differ in which gradients they have, and
  // must find the same.
  Known& known(const Chain& now, const Tensor& input) {
    const std::string kind = kind_of(input) + now.state(/*gradients=*/group == nullptr);
    if (const auto found = by_kind.find(kind); found != by_kind.end()) return found->second;
    Chain joined = now;
    ChainProfile own = profile_chain(joined, input, options.profile);
    if (options.tier) {
      own.tier_speed = options.tier_speed.bytes_per_second > 0 ? options.tier_speed
                                                               : measured(own, options.tier, input.device());
      const TierUse use = options.tier->use();
      own.tier_capacity_bytes = use.capacity_bytes - use.used_bytes;
    }
    Known of{joined.parts(), agreed(own, group, input.device()), {}, 0};
    if (by_kind.size() == kMostKinds) {
      by_kind.erase(std::min_element(by_kind.begin(), by_kind.end(), [](const auto& a, const auto& b) {
        return a.second.used < b.second.used;
      }));
    }
    return by_kind.emplace(kind, std::move(of)).first->second;
  }
};

PlannedChain::PlannedChain(Chain chain, const PlannedChainOptions& options)
    : PlannedChain(std::move(chain), ProcessGroupPtr(), options) {}
PlannedChain::PlannedChain(Chain chain, const ProcessGroupPtr& group, const PlannedChainOptions& options)
    : state_(new State) {
  state_->chain = std::move(chain);
  state_->group = group;
  state_->options = options;
}
PlannedChain::~PlannedChain() = default;
PlannedChain::PlannedChain(PlannedChain&&) noexcept = default;
PlannedChain& PlannedChain::operator=(PlannedChain&&) noexcept = default;

Tensor PlannedChain::operator()(const Tensor& input, std::int64_t budget_bytes) {
  return (*this)(state_->chain, input, budget_bytes);
}

Tensor PlannedChain::operator()(const Chain& now, const Tensor& input, std::int64_t budget_bytes) {
  if (!at::GradMode::is_enabled()) return now(input);
  const State::Found found = state_->find(now, input, budget_bytes);
  Chain joined = now;
  joined.join_to(found.parts);
  return run(joined, found.plan->schedule, input, state_->options.checkpoint, state_->options.tier);
}

ChainPlan PlannedChain::plan(const Tensor& input, std::int64_t budget_bytes) {
  return plan(state_->chain, input, budget_bytes);
}

ChainPlan PlannedChain::plan(const Chain& now, const Tensor& input, std::int64_t budget_bytes) {
  return *state_->find(now, input, budget_bytes).plan;
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
