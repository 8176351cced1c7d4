// Chains within bytes that do not hold what backward needs: computed once more, moved to a tier and back, or
// both. The tier is host memory at a pace at which a third of everything could leave during forward. Each net
// is measured with stages of a fixed pace, as on a device that does nothing else, where a few thousandths can
// be told; and ResNet-50 also as fast as this processor is, whose cores the tier's copies take.

#include <algorithm>
#include <cstdio>
#include <memory>

#include "chain_nets.h"
#include "harness.h"
#include "paced.h"
#include "reef/chain.h"
#include "reef/error.h"
#include "reef/tier_speed.h"

namespace reef::bench {
namespace {

constexpr std::uint64_t kBudgets = 6;
constexpr double kSlower = 2;  ///< stages of a fixed pace than measured ones: they are still done in time
constexpr ChainSolver kSolvers[] = {ChainSolver::kDynamic, ChainSolver::kOffload, ChainSolver::kCombined};

/// A schedule, and the solvers that have chosen it.
struct Planned {
  std::vector<ChainSolver> solvers;
  Schedule schedule;
  ScheduleCost cost;
  std::vector<double> seconds = {}, of_plain = {};  ///< an entry a turn
  std::int64_t peak_bytes = 0;
  bool equal = false;

  bool combined() const { return solvers.back() == ChainSolver::kCombined; }
  std::string names() const {
    std::string all;
    for (const ChainSolver solver : solvers) all += (all.empty() ? "" : " and ") + std::string(name(solver));
    return all;
  }
  double alone() const { return cost.seconds - cost.recomputed_seconds - cost.waited_seconds; }
};

/// How many times as long as with the faster of the other schedules a step takes, in the same turn.
std::string against_the_others(const std::vector<Planned>& all, const Planned& combined) {
  const Planned* faster = nullptr;
  for (const Planned& other : all) {
    if (&other == &combined) continue;
    if (faster == nullptr || median(other.of_plain) < median(faster->of_plain)) faster = &other;
  }
  if (faster == nullptr) return "";
  std::vector<double> ratios;
  for (std::size_t turn = 0; turn < combined.seconds.size(); ++turn)
    ratios.push_back(combined.seconds[turn] / faster->seconds[turn]);
  char text[128];
  std::snprintf(text, sizeof text, "; %.3f times %s, half of the pairs within %.3f and %.3f, predicted %.3f",
                median(ratios), faster->names().c_str(), quantile(ratios, 0.25), quantile(ratios, 0.75),
                combined.cost.seconds / faster->cost.seconds);
  return text;
}

enum class Pace : std::uint8_t { kFixed, kOfTheProcessor };

class Measurement {
 public:
  Measurement(Net net, Pace pace) : net_(std::move(net)), pace_(pace) {
    wanted_ = gradients(net_, ledger_, plain_call(net_));
    take_profile();
    if (pace_ == Pace::kFixed) {
      net_.name += ", paced";
      chain_ = paced(chain_, profile_, kSlower);
      take_profile();
    }
    double bytes = 0, forward = 0;
    for (const StageProfile& stage : profile_.stages) {
      bytes += static_cast<double>(stage.tape_bytes + (stage.tape_has_output ? 0 : stage.output_bytes));
      forward += stage.forward_seconds;
    }
    const double bytes_per_second = bytes / (3 * forward);
    tier_ = std::make_shared<PacedTier>(bytes_per_second);
    speed_ = {bytes_per_second, pace_ == Pace::kFixed ? 0 : tier_speed(tier_, c10::kCPU).work_share};
    char text[128];
    std::snprintf(text, sizeof text, "which takes a core for %.3f of that time", speed_.work_share);
    print(net_.name + "/tier", mebibytes(bytes_per_second), "MiB/s", text);
    least_ = minimum_bytes(profile_);
    most_ = natural_peak_bytes(profile_);
  }

  void run() {
    for (std::uint64_t i = 0; i < kBudgets; ++i) measure(least_ + (most_ - least_) * i / kBudgets);
  }

 private:
  void take_profile() {
    clear_gradients(net_);
    profile_ = profile_chain(chain_, net_.input, {.repeats = 3});
  }

  std::vector<Planned> planned(std::uint64_t budget_bytes) const {
    ChainProfile profile = profile_;
    profile.tier_speed = speed_;
    profile.tier_capacity_bytes = std::uint64_t{1} << 40;
    std::vector<Planned> all;
    for (const ChainSolver solver : kSolvers) {
      try {
        const Schedule schedule = plan_chain(profile, budget_bytes, {.solver = solver});
        const auto known = std::find_if(all.begin(), all.end(), [&](const Planned& other) {
          return other.schedule.text() == schedule.text();
        });
        if (known != all.end()) {
          known->solvers.push_back(solver);
        } else {
          all.push_back({{solver}, schedule, simulate(profile, schedule)});
        }
      } catch (const BudgetError&) {  // moving alone needs more
      }
    }
    return all;
  }

  void measure(std::uint64_t budget_bytes) {
    // By a profile of this minute: where stages have become faster than they were, and the tier has not, what
    // moves much waits.
    if (pace_ == Pace::kOfTheProcessor) take_profile();
    std::vector<Planned> all = planned(budget_bytes);
    const auto call_of = [&](const Planned& planned) -> Call {
      return [&](const Tensor& x) { return reef::run(chain_, planned.schedule, x, {}, tier_); };
    };
    for (Planned& planned : all) {
      planned.equal = bit_equal(gradients(net_, ledger_, call_of(planned)), wanted_);
    }
    const int turns = pace_ == Pace::kFixed ? 3 : 2 * net_.rounds;
    for (int turn = 0; turn < turns; ++turn) {
      const double once = step(net_, ledger_, [&](const Tensor& x) { return chain_(x); }).seconds;
      for (Planned& planned : all) {
        const Found found = step(net_, ledger_, call_of(planned));
        planned.seconds.push_back(found.seconds);
        planned.of_plain.push_back(found.seconds / once);
        planned.peak_bytes = std::max(planned.peak_bytes, found.peak_bytes);
      }
    }
    for (const Planned& planned : all) {
      const ScheduleCost& cost = planned.cost;
      char text[256];
      std::snprintf(text, sizeof text,
                    "%s; peak %.1f MiB, predicted %.1f; %.3f times plain, predicted %.3f; %.0f MiB moved, "
                    "%.0f ms of computing once more",
                    planned.equal ? "bit-equal" : "not equal", mebibytes(planned.peak_bytes),
                    mebibytes(cost.peak_bytes), median(planned.of_plain), cost.seconds / planned.alone(),
                    mebibytes(cost.offloaded_bytes), cost.recomputed_seconds * 1e3);
      std::string how = text;
      if (planned.combined()) how += against_the_others(all, planned);
      print(net_.name + "/" + std::to_string(budget_bytes >> 20) + " MiB/" + planned.names(),
            median(planned.seconds), "s", how);
      for (const ChainSolver solver : planned.solvers) {
        print_point(net_.name + " beside a tier", std::string(name(solver)), "peak, MiB",
                    mebibytes(planned.peak_bytes), "a step, times plain", median(planned.of_plain));
      }
    }
  }

  Net net_;
  Pace pace_;
  Ledger ledger_;
  Chain chain_{net_.layers};
  std::vector<Tensor> wanted_;
  ChainProfile profile_;
  std::shared_ptr<Tier> tier_;
  TierSpeed speed_;
  std::uint64_t least_ = 0, most_ = 0;
};

}  // namespace
}  // namespace reef::bench

int main() {
  using namespace reef::bench;
  keep_pages();
  const std::vector<Net> all = nets();
  for (Net net : all) {
    if (net.input.dim() == 3) net.input = net.input.narrow(0, 0, 1).detach().clone().requires_grad_();
    Measurement(std::move(net), Pace::kFixed).run();
  }
  Measurement(all.front(), Pace::kOfTheProcessor).run();
}
