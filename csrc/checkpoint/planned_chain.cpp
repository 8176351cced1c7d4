#include <ATen/autocast_mode.h>
#include <ATen/core/grad_mode.h>
#include <ATen/ops/empty.h>

#include <algorithm>
#include <cstdio>
#include <cstring>
#include <mutex>
#include <sstream>
#include <torch/csrc/distributed/c10d/ProcessGroup.hpp>
#include <utility>

#include "checkpoint/known_chains.h"
#include "checkpoint/run.h"
#include "distributed/bytes_over_ranks.h"
#include "reef/bytes.h"
#include "reef/chain.h"
#include "reef/error.h"
#include "reef/tier_speed.h"

namespace reef {
namespace {

using at::Tensor;

/// All but the sizes.
std::string kind_of(const Tensor& input) {
  std::ostringstream kind;
  const c10::DeviceType device = input.device().type();
  kind << input.dim() << ' ' << input.suggest_memory_format() << input.is_contiguous() << ' '
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
  ChainPlan plan{profile, {}, {}, static_cast<std::uint64_t>(budget_bytes), natural_peak_bytes(profile),
                 false};
  plan.schedule = plan_chain(profile, plan.budget_bytes, solver);
  plan.cost = simulate(profile, plan.schedule);
  return plan;
}

}  // namespace

struct PlannedChain::State {
  struct Found {
    std::string kind;
    std::vector<std::size_t> parts;
    std::shared_ptr<const ChainPlan> plan;
  };

  Chain chain;
  ProcessGroupPtr group;  ///< or none
  PlannedChainOptions options;
  std::mutex mutex;
  KnownChains known;
  bool said = false;  ///< to this rank

  // What throws is not remembered. Ranks may differ in which gradients they have, and must find the same.
  Found find(const Chain& now, const Tensor& input, std::int64_t budget_bytes) {
    now.check_current();
    const std::string name = kind_of(input) + now.state(/*gradients=*/group == nullptr);
    const std::lock_guard guard(mutex);
    KnownChains::Kind& kind = known.kind(name);
    const KnownChains::Sizes sizes = input.sizes().vec();
    KnownChains::Shape* shape = known.find(kind, sizes);
    if (shape == nullptr && options.price_sizes) shape = known.price(kind, sizes);
    if (shape == nullptr) shape = &measure(kind, now, input);
    try {
      return {name, shape->parts, plan(*shape, budget_bytes)};
    } catch (const BudgetError&) {
      if (shape->state != KnownChains::State::kPriced) throw;
    }
    shape = &measure(kind, now, input);  // an upper bound may be too much where the truth is not
    return {name, shape->parts, plan(*shape, budget_bytes)};
  }

  // With several ranks it is only said, once: one rank may have needed more, and all must find the same.
  void needed(const std::string& name, const KnownChains::Sizes& sizes, const ChainPlan& plan,
              std::uint64_t bytes) {
    const std::uint64_t allowed = plan.budget_bytes + plan.budget_bytes / kTolerated +
                                  kTensorsOfALoss * plan.profile.stages.back().output_bytes +
                                  kSmall * (plan.profile.stages.size() + 2);
    if (bytes <= allowed) return;
    {
      const std::lock_guard guard(mutex);
      KnownChains::Kind* const kind = known.known(name);
      if (group ? std::exchange(said, true) : kind == nullptr || !KnownChains::failed(*kind, sizes)) return;
    }
    const auto text = [](std::uint64_t count) { return format_bytes(static_cast<std::int64_t>(count)); };
    const char* const why =
        group ? "Ranks that must find the same profile nothing anew; give more bytes."
        : plan.is_priced
            ? "The plan was priced from inputs of other sizes, so these stages' bytes do not grow with sizes "
              "as "
              "sums and maxima of powers do, or something else has needed memory meanwhile; from now on each "
              "size is profiled. Give more bytes, or price_sizes = false from the start."
            : "The stages do not do what they did when they were profiled, which is done once more and no "
              "more "
              "than once, or something else has needed memory meanwhile; give more bytes.";
    TORCH_WARN("PlannedChain: with an input of sizes ", c10::IntArrayRef(sizes), ", ", text(bytes),
               " were alive at once where ", text(plan.budget_bytes), " were given and ",
               text(plan.cost.peak_bytes), " planned. ", why);
  }

 private:
  static constexpr std::size_t kMostPlans = 16;
  // What a program makes of the output is its own, and states of generators are not planned for.
  static constexpr std::uint64_t kTolerated = 50, kTensorsOfALoss = 3, kSmall = 6 * 1024;

  KnownChains::Shape& measure(KnownChains::Kind& kind, const Chain& now, const Tensor& input) {
    Chain joined = now;
    ChainProfile own = profile_chain(joined, input, options.profile);
    if (options.tier) {
      own.tier_speed = options.tier_speed.bytes_per_second > 0 ? options.tier_speed
                                                               : measured(own, options.tier, input.device());
      const TierUse use = options.tier->use();
      own.tier_capacity_bytes = use.capacity_bytes - use.used_bytes;
    }
    return known.keep(kind, input.sizes().vec(), joined.parts(), agreed(own, group, input.device()));
  }

  std::shared_ptr<const ChainPlan> plan(KnownChains::Shape& of, std::int64_t budget_bytes) const {
    if (const auto found = of.plans.find(budget_bytes); found != of.plans.end()) return found->second;
    if (of.plans.size() == kMostPlans) of.plans.clear();
    ChainPlan plan = planned(of.profile, budget_bytes, options.solver);
    plan.is_priced = of.state == KnownChains::State::kPriced;
    return of.plans.emplace(budget_bytes, std::make_shared<const ChainPlan>(std::move(plan))).first->second;
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
  auto needed = [of = std::weak_ptr(state_), found, sizes = input.sizes().vec()](std::uint64_t bytes) {
    if (const auto state = of.lock()) state->needed(found.kind, sizes, *found.plan, bytes);
  };
  return run_measured(joined, found.plan->schedule, input, state_->options.checkpoint, state_->options.tier,
                      std::move(needed));
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
         (cost.offloaded_bytes > 0 ? ", " + bytes(cost.offloaded_bytes) + " by way of the tier" : "") +
         (is_priced ? ", priced from other sizes" : "");
}

}  // namespace reef
