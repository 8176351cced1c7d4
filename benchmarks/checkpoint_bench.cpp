// Chains of real nets at budgets from the least to what nothing is recomputed with: bytes and seconds that
// were predicted and that a step takes, and whether its gradients are those of the plain run.

#include <algorithm>
#include <cstdio>
#include <string>
#include <vector>

#include "chain_nets.h"
#include "harness.h"
#include "reef/chain.h"

namespace reef::bench {
namespace {

constexpr int kBudgets = 20;

void measure(const Net& net) {
  Ledger ledger;
  const Call plain = [&](const Tensor& x) { return net.layers.ptr()->forward(x); };
  step(net, ledger, plain);
  net.layers.ptr()->zero_grad();
  net.input.mutable_grad() = Tensor();
  Chain chain(net.layers);
  const ChainProfile profile = profile_chain(chain, net.input, {.repeats = 5});
  std::fputs(profile.table().c_str(), stderr);
  const std::uint64_t least = minimum_bytes(profile), most = natural_peak_bytes(profile);

  struct Variant {
    std::string name;
    std::uint64_t budget_bytes;
    Schedule schedule;
    ScheduleCost cost;
    std::vector<double> seconds = {}, predicted = {};  ///< by the profile of the same round
    std::int64_t peak_bytes = 0;
  };
  std::vector<Variant> variants;
  for (int i = 0; i < kBudgets; ++i) {
    const std::uint64_t budget = least + (most - least) * static_cast<std::uint64_t>(i) / (kBudgets - 1);
    const Schedule schedule = plan_chain(profile, budget);
    variants.push_back(
        {std::to_string(budget >> 20) + " MiB", budget, schedule, simulate(profile, schedule)});
  }
  const std::vector<Tensor> wanted = gradients(net, ledger, plain);
  int equal = 0;
  for (const Variant& variant : variants) {
    const std::vector<Tensor> found =
        gradients(net, ledger, [&](const Tensor& x) { return run(chain, variant.schedule, x); });
    equal += std::equal(found.begin(), found.end(), wanted.begin(),
                        [](const Tensor& a, const Tensor& b) { return a.equal(b); });
  }
  std::vector<double> plain_seconds;
  std::int64_t plain_peak = 0;
  for (int round = 0; round < net.rounds; ++round) {
    net.layers.ptr()->zero_grad();
    net.input.mutable_grad() = Tensor();
    const ChainProfile now = profile_chain(chain, net.input, {.repeats = 1});
    const Found found = step(net, ledger, plain);
    plain_seconds.push_back(found.seconds);
    plain_peak = std::max(plain_peak, found.peak_bytes);
    for (Variant& variant : variants) {
      const Found ours = step(net, ledger, [&](const Tensor& x) { return run(chain, variant.schedule, x); });
      variant.seconds.push_back(ours.seconds);
      variant.predicted.push_back(simulate(now, variant.schedule).seconds);
      variant.peak_bytes = std::max(variant.peak_bytes, ours.peak_bytes);
    }
  }
  const double once = median(plain_seconds);
  char text[256];
  std::snprintf(text, sizeof text, "peak %.1f MiB, predicted %.1f; %d of %d budgets bit-equal",
                static_cast<double>(plain_peak) / 0x1p20, static_cast<double>(most) / 0x1p20, equal,
                kBudgets);
  print(net.name + "/plain", once, "s", text);
  for (const Variant& variant : variants) {
    const double seconds = median(variant.seconds);
    const auto predicted = static_cast<double>(variant.cost.peak_bytes);
    std::vector<double> ratios;
    for (std::size_t round = 0; round < variant.seconds.size(); ++round)
      ratios.push_back(variant.seconds[round] / variant.predicted[round]);
    std::snprintf(text, sizeof text,
                  "peak %.1f MiB, predicted %.1f (%+.1f percent); %.3f times plain, predicted %.3f; "
                  "%+.1f percent of what the profile of the same round predicts",
                  static_cast<double>(variant.peak_bytes) / 0x1p20, predicted / 0x1p20,
                  (static_cast<double>(variant.peak_bytes) / predicted - 1) * 100, seconds / once,
                  variant.cost.seconds / (variant.cost.seconds - variant.cost.recomputed_seconds),
                  (median(ratios) - 1) * 100);
    print(net.name + "/" + variant.name, seconds, "s", text);
    const double mebibytes = static_cast<double>(variant.peak_bytes) / 0x1p20;
    print_point(net.name + " in C++", "measured", "peak, MiB", mebibytes, "a step, times plain",
                seconds / once);
    print_point(net.name + " in C++", "predicted", "peak, MiB", predicted / 0x1p20, "a step, times plain",
                variant.cost.seconds / (variant.cost.seconds - variant.cost.recomputed_seconds));
  }
}

}  // namespace
}  // namespace reef::bench

int main() {
  for (const reef::bench::Net& net : reef::bench::nets()) reef::bench::measure(net);
}
