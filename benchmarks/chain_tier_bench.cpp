// Chains within bytes that do not hold what backward needs: computed once more, moved to a tier and back, or
// both. The tier is host memory at a pace at which a third of everything could leave during forward.

#include <algorithm>
#include <cstdio>
#include <map>
#include <memory>
#include <mutex>
#include <thread>

#include "chain_nets.h"
#include "harness.h"
#include "reef/chain.h"
#include "reef/error.h"
#include "reef/tier.h"

namespace reef::bench {
namespace {

constexpr std::uint64_t kBudgets = 8;
constexpr int kRounds = 2;
constexpr ChainSolver kSolvers[] = {ChainSolver::kDynamic, ChainSolver::kOffload, ChainSolver::kCombined};

/// Host memory behind a link of so many bytes a second, one transfer at a time.
class PacedTier final : public Tier {
 public:
  explicit PacedTier(double bytes_per_second) : bytes_per_second_(bytes_per_second) {}

  std::string name() const override { return "paced host"; }
  std::optional<Slot> take(std::uint64_t bytes) override {
    const std::optional<Slot> slot = host_->take(bytes);
    const std::lock_guard lock(mutex_);
    if (slot) bytes_[*slot] = bytes;
    return slot;
  }
  void give_back(Slot slot) noexcept override { host_->give_back(slot); }
  void write(Slot slot, const void* data) override {
    const Clock::time_point until = sent(slot);
    host_->write(slot, data);
    std::this_thread::sleep_until(until);
  }
  void read(Slot slot, void* data) override {
    const Clock::time_point until = sent(slot);
    host_->read(slot, data);
    std::this_thread::sleep_until(until);
  }
  TierUse use() const override { return host_->use(); }

 private:
  using Clock = std::chrono::steady_clock;
  // When the link is through with it.
  Clock::time_point sent(Slot slot) {
    const std::lock_guard lock(mutex_);
    const std::chrono::duration<double> taken(static_cast<double>(bytes_.at(slot)) / bytes_per_second_);
    free_at_ = std::max(free_at_, Clock::now()) + std::chrono::duration_cast<Clock::duration>(taken);
    return free_at_;
  }

  double bytes_per_second_;
  std::shared_ptr<Tier> host_ = host_tier(std::uint64_t{1} << 40);
  std::mutex mutex_;
  std::map<Slot, std::uint64_t> bytes_;
  Clock::time_point free_at_{};
};

struct Planned {
  ChainSolver solver;
  Schedule schedule;
  ScheduleCost cost;
  std::vector<double> seconds = {}, of_plain = {};
  std::int64_t peak_bytes = 0;

  double alone() const { return cost.seconds - cost.recomputed_seconds - cost.waited_seconds; }
};
/// The solvers that find a schedule within the bytes.
struct Budget {
  std::string name;
  std::vector<Planned> planned;
};

double mebibytes(auto bytes) { return static_cast<double>(bytes) / 0x1p20; }

/// The faster of those that have other schedules; nullptr if none has.
Planned* rival_of(Budget& budget, const Planned& combined) {
  Planned* faster = nullptr;
  for (Planned& other : budget.planned) {
    if (other.schedule.text() == combined.schedule.text()) continue;
    if (faster == nullptr || median(other.of_plain) < median(faster->of_plain)) faster = &other;
  }
  return faster;
}

void measure(const Net& net) {
  Ledger ledger;
  const Call plain = [&](const Tensor& x) { return net.layers.ptr()->forward(x); };
  const std::vector<Tensor> wanted = gradients(net, ledger, plain);
  net.layers.ptr()->zero_grad();
  net.input.mutable_grad() = Tensor();
  Chain chain(net.layers);
  ChainProfile profile = profile_chain(chain, net.input, {.repeats = 5});
  double bytes = 0, forward = 0;
  for (const StageProfile& stage : profile.stages) {
    bytes += static_cast<double>(stage.tape_bytes + (stage.tape_has_output ? 0 : stage.output_bytes));
    forward += stage.forward_seconds;
  }
  profile.tier_bytes_per_second = bytes / (3 * forward);
  profile.tier_capacity_bytes = std::uint64_t{1} << 40;
  const auto tier = std::make_shared<PacedTier>(profile.tier_bytes_per_second);
  profile.tier_work_share = tier_speed(tier, c10::kCPU).work_share;

  const std::uint64_t least = minimum_bytes(profile), most = natural_peak_bytes(profile);
  std::vector<Budget> budgets;
  for (std::uint64_t i = 0; i < kBudgets; ++i) {
    const std::uint64_t budget_bytes = least + (most - least) * i / kBudgets;
    Budget& budget = budgets.emplace_back(std::to_string(budget_bytes >> 20) + " MiB");
    for (const ChainSolver solver : kSolvers) {
      try {
        const Schedule schedule = plan_chain(profile, budget_bytes, {.solver = solver});
        budget.planned.push_back({solver, schedule, simulate(profile, schedule)});
      } catch (const BudgetError&) {  // moving alone needs more
      }
    }
  }
  const auto call_of = [&](const Planned& planned) -> Call {
    return [&](const Tensor& x) { return run(chain, planned.schedule, x, {}, tier); };
  };
  const auto take = [&](Planned& planned) {
    const Found found = step(net, ledger, call_of(planned));
    planned.seconds.push_back(found.seconds);
    planned.peak_bytes = std::max(planned.peak_bytes, found.peak_bytes);
    return found.seconds;
  };
  int equal = 0, schedules = 0;
  for (Budget& budget : budgets) {
    for (Planned& planned : budget.planned) {
      const std::vector<Tensor> found = gradients(net, ledger, call_of(planned));
      equal += std::equal(found.begin(), found.end(), wanted.begin(),
                          [](const Tensor& a, const Tensor& b) { return a.equal(b); });
      ++schedules;
    }
  }
  std::vector<double> plain_seconds;
  for (int round = 0; round < kRounds; ++round) {
    for (Budget& budget : budgets) {
      plain_seconds.push_back(step(net, ledger, plain).seconds);
      for (Planned& planned : budget.planned)
        planned.of_plain.push_back(take(planned) / plain_seconds.back());
    }
  }
  char text[320];
  std::snprintf(text, sizeof text,
                "%d of %d schedules bit-equal; the tier moves %.0f MiB a second, and for %.3f of that time "
                "takes a core",
                equal, schedules, mebibytes(profile.tier_bytes_per_second), profile.tier_work_share);
  print(net.name + "/plain", median(plain_seconds), "s", text);
  for (Budget& budget : budgets) {
    std::string against;
    if (Planned& combined = budget.planned.back(); Planned* rival = rival_of(budget, combined)) {
      std::vector<double> ratios;  // of steps one after the other
      for (int pair = 0; pair < net.rounds + 2; ++pair) ratios.push_back(take(combined) / take(*rival));
      std::snprintf(text, sizeof text, "; %.3f times %s, predicted %.3f", median(ratios),
                    std::string(name(rival->solver)).c_str(), combined.cost.seconds / rival->cost.seconds);
      against = text;
    }
    for (const Planned& planned : budget.planned) {
      const ScheduleCost& cost = planned.cost;
      const double seconds = median(planned.seconds);
      std::snprintf(text, sizeof text,
                    "peak %.1f MiB, predicted %.1f; %.3f times plain, predicted %.3f; %.0f MiB moved, "
                    "%.0f ms of computing once more",
                    mebibytes(planned.peak_bytes), mebibytes(cost.peak_bytes), median(planned.of_plain),
                    cost.seconds / planned.alone(), mebibytes(cost.offloaded_bytes),
                    cost.recomputed_seconds * 1e3);
      std::string how = text;
      if (planned.solver == ChainSolver::kCombined) how += against;
      print(net.name + "/" + budget.name + "/" + std::string(name(planned.solver)), seconds, "s", how);
      print_point(net.name + " beside a tier", std::string(name(planned.solver)), "peak, MiB",
                  mebibytes(planned.peak_bytes), "a step, times plain", median(planned.of_plain));
    }
  }
}

}  // namespace
}  // namespace reef::bench

int main() {
  reef::bench::keep_pages();
  for (const reef::bench::Net& net : reef::bench::nets()) reef::bench::measure(net);
}
