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

constexpr int kBudgets = 10;
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
    host_->write(slot, data);
    wait_for(slot);
  }
  void read(Slot slot, void* data) override {
    host_->read(slot, data);
    wait_for(slot);
  }
  TierUse use() const override { return host_->use(); }

 private:
  using Clock = std::chrono::steady_clock;
  void wait_for(Slot slot) {
    std::unique_lock lock(mutex_);
    const std::chrono::duration<double> taken(static_cast<double>(bytes_.at(slot)) / bytes_per_second_);
    free_at_ = std::max(free_at_, Clock::now()) + std::chrono::duration_cast<Clock::duration>(taken);
    const Clock::time_point until = free_at_;
    lock.unlock();
    std::this_thread::sleep_until(until);
  }

  double bytes_per_second_;
  std::shared_ptr<Tier> host_ = host_tier(std::uint64_t{1} << 40);
  std::mutex mutex_;
  std::map<Slot, std::uint64_t> bytes_;
  Clock::time_point free_at_{};
};

struct Variant {
  std::string budget;
  ChainSolver solver;
  Schedule schedule;
  ScheduleCost cost;
  std::vector<double> seconds;
  std::int64_t peak_bytes = 0;
};

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

  const std::uint64_t least = minimum_bytes(profile), most = natural_peak_bytes(profile);
  std::vector<Variant> variants;
  for (int i = 0; i < kBudgets; ++i) {
    const std::uint64_t budget = least + (most - least) * static_cast<std::uint64_t>(i) / kBudgets;
    for (const ChainSolver solver : kSolvers) {
      try {
        const Schedule schedule = plan_chain(profile, budget, {.solver = solver});
        variants.push_back(
            {std::to_string(budget >> 20) + " MiB", solver, schedule, simulate(profile, schedule), {}});
      } catch (const BudgetError&) {  // moving alone needs more
      }
    }
  }
  int equal = 0;
  for (const Variant& variant : variants) {
    const std::vector<Tensor> found =
        gradients(net, ledger, [&](const Tensor& x) { return run(chain, variant.schedule, x, {}, tier); });
    equal += std::equal(found.begin(), found.end(), wanted.begin(),
                        [](const Tensor& a, const Tensor& b) { return a.equal(b); });
  }
  std::vector<double> plain_seconds;
  for (int round = 0; round < net.rounds; ++round) {
    plain_seconds.push_back(step(net, ledger, plain).seconds);
    for (Variant& variant : variants) {
      const Found ours =
          step(net, ledger, [&](const Tensor& x) { return run(chain, variant.schedule, x, {}, tier); });
      variant.seconds.push_back(ours.seconds);
      variant.peak_bytes = std::max(variant.peak_bytes, ours.peak_bytes);
    }
  }
  const double once = median(plain_seconds);
  char text[320];
  std::snprintf(text, sizeof text, "%d of %zu schedules bit-equal; the tier moves %.0f MiB a second", equal,
                variants.size(), profile.tier_bytes_per_second / 0x1p20);
  print(net.name + "/plain", once, "s", text);
  for (const Variant& variant : variants) {
    const double seconds = median(variant.seconds);
    const double none = variant.cost.seconds - variant.cost.recomputed_seconds - variant.cost.waited_seconds;
    std::snprintf(text, sizeof text,
                  "peak %.1f MiB, predicted %.1f; %.3f times plain, predicted %.3f; %.0f MiB moved, %.0f ms "
                  "of computing "
                  "once more",
                  static_cast<double>(variant.peak_bytes) / 0x1p20,
                  static_cast<double>(variant.cost.peak_bytes) / 0x1p20, seconds / once,
                  variant.cost.seconds / none, static_cast<double>(variant.cost.offloaded_bytes) / 0x1p20,
                  variant.cost.recomputed_seconds * 1e3);
    print(net.name + "/" + variant.budget + "/" + std::string(name(variant.solver)), seconds, "s", text);
    print_point(net.name + " beside a tier", std::string(name(variant.solver)), "peak, MiB",
                static_cast<double>(variant.peak_bytes) / 0x1p20, "a step, times plain", seconds / once);
  }
}

}  // namespace
}  // namespace reef::bench

int main() {
  for (const reef::bench::Net& net : reef::bench::nets()) reef::bench::measure(net);
}
