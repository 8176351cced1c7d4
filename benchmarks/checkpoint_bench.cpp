// Chains of real nets at budgets from the least to what nothing is recomputed with: bytes and seconds that
// were predicted and that a step takes, and whether its gradients are those of the plain run.

#include <algorithm>
#include <cmath>
#include <cstdio>
#include <numeric>
#include <random>
#include <string>
#include <utility>
#include <vector>

#include "chain_nets.h"
#include "harness.h"
#include "reef/chain.h"

namespace reef::bench {
namespace {

constexpr std::size_t kBudgets = 20;

struct Planned {
  std::string name;
  Schedule schedule;
  ScheduleCost cost;
  std::vector<double> of_plain = {}, of_predicted = {};  ///< in the same round
  std::vector<double> seconds = {};
  std::int64_t peak_bytes = 0;

  double predicted_of_plain() const { return cost.seconds / (cost.seconds - cost.recomputed_seconds); }
};

class Measurement {
 public:
  explicit Measurement(const Net& net) : net_(net), plain_(plain_call(net)) {
    step(net_, ledger_, plain_);
    profile_ = profile(/*repeats=*/5);
    std::fputs(profile_.table().c_str(), stderr);
    const std::uint64_t least = minimum_bytes(profile_), most = natural_peak_bytes(profile_);
    for (std::size_t i = 0; i < kBudgets; ++i) {
      const std::uint64_t budget = least + (most - least) * i / (kBudgets - 1);
      plan(std::to_string(budget >> 20) + " MiB", budget);
    }
    std::uint64_t gradients = 0;
    for (const StageProfile& stage : profile_.stages) gradients += stage.gradient_bytes;
    plan("half of store-all", gradients + (most - gradients) / 2);
  }

  void run() {
    const std::vector<Tensor> wanted = gradients(net_, ledger_, plain_);
    int equal = 0;
    for (const Planned& planned : planned_) {
      equal += bit_equal(gradients(net_, ledger_, call_of(planned)), wanted) ? 1 : 0;
    }
    std::vector<double> plain_seconds;
    std::int64_t plain_peak = 0;
    ChainProfile before = profile(/*repeats=*/1);
    for (int round = 0; round < net_.rounds; ++round) {
      std::vector<std::size_t> order(planned_.size());
      std::iota(order.begin(), order.end(), std::size_t{0});
      std::shuffle(order.begin(), order.end(), std::mt19937(static_cast<unsigned>(round)));
      std::vector<double> plain;
      for (std::size_t turn = 0; turn < order.size(); ++turn) {
        if (turn % 7 == 0) {
          const Found found = step(net_, ledger_, plain_);
          plain.push_back(found.seconds);
          plain_peak = std::max(plain_peak, found.peak_bytes);
        }
        take(planned_[order[turn]]);
      }
      // Machines drift: a step is held against what lies between the profiles before and after its round.
      ChainProfile after = profile(/*repeats=*/1);
      for (std::size_t turn = 0; turn < order.size(); ++turn) {
        Planned& planned = planned_[order[turn]];
        const double predicted =
            std::lerp(simulate(before, planned.schedule).seconds, simulate(after, planned.schedule).seconds,
                      (static_cast<double>(turn) + 0.5) / static_cast<double>(order.size()));
        planned.of_predicted.push_back(planned.seconds.back() / predicted);
      }
      before = std::move(after);
      plain_seconds.push_back(median(plain));
      for (Planned& planned : planned_)
        planned.of_plain.push_back(planned.seconds.back() / plain_seconds.back());
    }
    char text[256];
    std::snprintf(text, sizeof text, "peak %.1f MiB, predicted %.1f; %d of %zu schedules bit-equal",
                  mebibytes(plain_peak), mebibytes(natural_peak_bytes(profile_)), equal, planned_.size());
    print(net_.name + "/plain", median(plain_seconds), "s", text);
    // Where a figure is asked for to a few hundredths: with a plain step before each.
    planned_.back().of_plain.clear();
    for (int pair = 0; pair < 5 * net_.rounds; ++pair) {
      const double once = step(net_, ledger_, plain_).seconds;
      take(planned_.back());
      planned_.back().of_plain.push_back(planned_.back().seconds.back() / once);
    }
    for (const Planned& planned : planned_) tell(planned);
  }

 private:
  void plan(const std::string& name, std::uint64_t budget_bytes) {
    const Schedule schedule = plan_chain(profile_, budget_bytes);
    planned_.push_back({name, schedule, simulate(profile_, schedule)});
  }
  ChainProfile profile(int repeats) {
    clear_gradients(net_);
    return profile_chain(chain_, net_.input, {.repeats = repeats});
  }
  Call call_of(const Planned& planned) {
    return [&](const Tensor& x) { return reef::run(chain_, planned.schedule, x); };
  }
  void take(Planned& planned) {
    const Found found = step(net_, ledger_, call_of(planned));
    planned.seconds.push_back(found.seconds);
    planned.peak_bytes = std::max(planned.peak_bytes, found.peak_bytes);
  }

  void tell(const Planned& planned) const {
    const double times_plain = median(planned.of_plain);
    char text[256];
    std::snprintf(text, sizeof text,
                  "peak %.1f MiB, predicted %.1f (%+.1f percent); %.3f times plain, predicted %.3f; "
                  "%+.1f percent of what profiles around it predict",
                  mebibytes(planned.peak_bytes), mebibytes(planned.cost.peak_bytes),
                  (mebibytes(planned.peak_bytes) / mebibytes(planned.cost.peak_bytes) - 1) * 100, times_plain,
                  planned.predicted_of_plain(), (median(planned.of_predicted) - 1) * 100);
    print(net_.name + "/" + planned.name, median(planned.seconds), "s", text);
    const auto point = [&](const char* series, double peak, double times) {
      print_point(net_.name + " in C++", series, "peak, MiB", peak, "a step, times plain", times);
    };
    point("measured", mebibytes(planned.peak_bytes), times_plain);
    point("predicted", mebibytes(planned.cost.peak_bytes), planned.predicted_of_plain());
  }

  Net net_;
  Call plain_;
  Ledger ledger_;
  Chain chain_{net_.layers};
  ChainProfile profile_;
  std::vector<Planned> planned_;
};

}  // namespace
}  // namespace reef::bench

int main() {
  reef::bench::keep_pages();
  for (const reef::bench::Net& net : reef::bench::nets()) reef::bench::Measurement(net).run();
}
