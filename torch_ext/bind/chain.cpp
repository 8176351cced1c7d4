#include "reef/chain.h"

#include <torch/custom_class.h>
#include <torch/library.h>

#include <optional>
#include <torch/csrc/distributed/c10d/ProcessGroup.hpp>
#include <tuple>

#include "bytes.h"
#include "python_function.h"
#include "reef/error.h"
#include "tier.h"

namespace {

using reef::bind::BoundTier;
using reef::bind::bytes_of;
using reef::bind::PythonFunction;

reef::ChainSolverOptions solver_of(const std::string& given, std::int64_t slots, std::int64_t threads) {
  if (slots < 0 || threads < 0 || slots > 1'000'000 || threads > 1024)
    throw reef::ConfigError("plan_chain: slots are from 1 to 1000000, and threads from 0 to 1024");
  std::string names;
  for (const reef::ChainSolver solver : reef::kChainSolvers) {
    if (given == name(solver))
      return {solver, static_cast<std::uint32_t>(slots), static_cast<std::uint32_t>(threads)};
    names += (names.empty() ? "" : ", ") + std::string(name(solver));
  }
  throw reef::ConfigError("'" + given + "' is no chain solver; use one of " + names);
}

struct Chain : torch::CustomClassHolder {
  reef::Chain chain;
};

using OptionalTier = std::optional<c10::intrusive_ptr<BoundTier>>;
std::shared_ptr<reef::Tier> tier_of(const OptionalTier& tier) { return tier ? (*tier)->tier : nullptr; }

struct Planned : torch::CustomClassHolder {
  Planned(const std::string& solver, std::int64_t slots, std::int64_t repeats, bool check_values,
          const std::optional<c10::intrusive_ptr<c10d::ProcessGroup>>& group, const OptionalTier& tier,
          std::vector<double> tier_speed, bool price_sizes)
      : planned(reef::Chain(), group.value_or(nullptr),
                {.solver = solver_of(solver, slots, 0),
                 .profile = {.repeats = static_cast<int>(repeats)},
                 .checkpoint = {.check_values = check_values},
                 .tier = tier_of(tier),
                 .tier_speed = {tier_speed.at(0), tier_speed.at(1)},
                 .price_sizes = price_sizes}) {}
  reef::PlannedChain planned;
};

using Self = c10::intrusive_ptr<Chain>;
using PlannedSelf = c10::intrusive_ptr<Planned>;

// In the order of the fields of reef.ScheduleCost.
using Cost = std::tuple<std::int64_t, std::int64_t, double, double, double, std::int64_t, std::int64_t,
                        std::vector<std::vector<std::int64_t>>, std::vector<double>, std::vector<double>>;
Cost cost_of(const reef::ScheduleCost& cost) {
  std::vector<std::vector<std::int64_t>> loads;
  for (const reef::ScheduleLoad& load : cost.load) {
    std::vector<std::int64_t>& bytes = loads.emplace_back();
    for (const std::uint64_t each :
         {load.output_bytes, load.tape_bytes, load.gradient_bytes, load.working_bytes}) {
      bytes.push_back(static_cast<std::int64_t>(each));
    }
  }
  return {static_cast<std::int64_t>(cost.peak_bytes),
          static_cast<std::int64_t>(cost.peak_operation),
          cost.seconds,
          cost.recomputed_seconds,
          cost.waited_seconds,
          static_cast<std::int64_t>(cost.offloaded_bytes),
          static_cast<std::int64_t>(cost.tier_bytes),
          loads,
          cost.begin_seconds,
          cost.end_seconds};
}

}  // namespace

TORCH_LIBRARY_FRAGMENT(reef, m) {
  reef::bind::register_tier(m);

  m.class_<Chain>("Chain")
      .def(torch::init<>())
      .def("add",
           [](const Self& self, std::string name, std::int64_t function, std::string state) {
             self->chain.add(
                 std::move(name),
                 [call = PythonFunction(function)](const at::Tensor& input) { return call({input}).at(0); },
                 [of = std::move(state)](bool) { return of; });  // a chain is made anew for each call
           })
      .def("parts",
           [](const Self& self) {
             const std::vector<std::size_t> parts = self->chain.parts();
             return std::vector<std::int64_t>(parts.begin(), parts.end());
           })
      .def("join_to",
           [](const Self& self, const std::vector<std::int64_t>& parts) {
             self->chain.join_to({parts.begin(), parts.end()});
           })
      .def("names", [](const Self& self) {
        std::vector<std::string> names;
        for (std::size_t i = 0; i < self->chain.size(); ++i) names.push_back(self->chain.name(i));
        return names;
      });

  m.class_<Planned>("PlannedChain")
      .def(torch::init<const std::string&, std::int64_t, std::int64_t, bool,
                       const std::optional<c10::intrusive_ptr<c10d::ProcessGroup>>&, const OptionalTier&,
                       std::vector<double>, bool>());

  // Operators, through which what Python's stages raise arrives; not so through methods.
  m.def("profile_chain(__torch__.torch.classes.reef.Chain chain, Tensor input, int repeats) -> str",
        [](const Self& self, const at::Tensor& input, std::int64_t repeats) {
          return reef::profile_chain(self->chain, input, {static_cast<int>(repeats)}).json();
        });
  m.def(
      "run_chain(__torch__.torch.classes.reef.Chain chain, str schedule, Tensor input, bool check_values, "
      "__torch__.torch.classes.reef.Tier? tier) -> Tensor",
      [](const Self& self, const std::string& schedule, const at::Tensor& input, bool check_values,
         const OptionalTier& tier) {
        return reef::run(self->chain, reef::schedule_from_json(schedule), input,
                         {.check_values = check_values}, tier_of(tier));
      });
  m.def(
      "run_planned_chain(__torch__.torch.classes.reef.PlannedChain planned, "
      "__torch__.torch.classes.reef.Chain "
      "chain, Tensor input, int budget_bytes) -> Tensor",
      [](const PlannedSelf& self, const Self& chain, const at::Tensor& input, std::int64_t budget_bytes) {
        return self->planned(chain->chain, input, budget_bytes);
      });
  m.def(
      "plan_of_chain(__torch__.torch.classes.reef.PlannedChain planned, __torch__.torch.classes.reef.Chain "
      "chain, Tensor input, int budget_bytes) -> (str, str, str, bool)",
      [](const PlannedSelf& self, const Self& chain, const at::Tensor& input, std::int64_t budget_bytes) {
        const reef::ChainPlan plan = self->planned.plan(chain->chain, input, budget_bytes);
        return std::make_tuple(plan.profile.json(), plan.schedule.json(), plan.text(), plan.is_priced);
      });

  m.def("chain_solvers() -> str[]", [] {
    std::vector<std::string> names;
    for (const reef::ChainSolver solver : reef::kChainSolvers) names.emplace_back(name(solver));
    return names;
  });
  m.def("plan_chain(str profile, int budget_bytes, str solver, int slots, int threads) -> str",
        [](const std::string& profile, std::int64_t budget_bytes, const std::string& solver,
           std::int64_t slots, std::int64_t threads) {
          return reef::plan_chain(reef::chain_profile_from_json(profile),
                                  bytes_of(budget_bytes, "the budget"), solver_of(solver, slots, threads))
              .json();
        });
  m.def("chain_minimum_bytes(str profile) -> int", [](const std::string& profile) {
    return static_cast<std::int64_t>(reef::minimum_bytes(reef::chain_profile_from_json(profile)));
  });
  m.def("chain_natural_peak_bytes(str profile) -> int", [](const std::string& profile) {
    return static_cast<std::int64_t>(reef::natural_peak_bytes(reef::chain_profile_from_json(profile)));
  });
  m.def("chain_profile_table(str profile) -> str",
        [](const std::string& profile) { return reef::chain_profile_from_json(profile).table(); });
  m.def(
      "schedule_cost(str profile, str schedule) -> (int, int, float, float, float, int, int, int[][], "
      "float[], "
      "float[])",
      [](const std::string& profile, const std::string& schedule) {
        return cost_of(
            reef::simulate(reef::chain_profile_from_json(profile), reef::schedule_from_json(schedule)));
      });
  m.def("schedule_chart(str profile, str schedule, int budget_bytes, str title) -> str",
        [](const std::string& profile, const std::string& schedule, std::int64_t budget_bytes,
           const std::string& title) {
          return reef::schedule_chart(reef::chain_profile_from_json(profile),
                                      reef::schedule_from_json(schedule),
                                      bytes_of(budget_bytes, "the budget"), title);
        });
}
