#include "reef/swap.h"

#include <cmath>
#include <limits>
#include <tuple>

#include "reef/error.h"
#include "swap_trace.h"

namespace reef::bind {
namespace {

using Ints = std::vector<std::int64_t>;

struct Plan : torch::CustomClassHolder {
  explicit Plan(reef::SwapPlan given) : plan(std::move(given)) {}
  reef::SwapPlan plan;
};

using Self = c10::intrusive_ptr<SwapTrace>;
using PlanSelf = c10::intrusive_ptr<Plan>;

std::uint64_t count(std::int64_t value, const char* what) {
  if (value < 0)
    throw reef::ConfigError(std::string(what) + " is " + std::to_string(value) + "; give 0 or more");
  return static_cast<std::uint64_t>(value);
}

std::uint32_t page_number(std::int64_t value) {
  if (value < 0 || value > std::numeric_limits<std::uint32_t>::max())
    throw reef::ConfigError("page " + std::to_string(value) + " is no page; they are numbered from 0");
  return static_cast<std::uint32_t>(value);
}

reef::SwapPolicy policy_of(const std::string& given) {
  std::string names;
  for (const reef::SwapPolicy policy : reef::kSwapPolicies) {
    if (given == name(policy)) return policy;
    names += (names.empty() ? "" : ", ") + std::string(name(policy));
  }
  throw reef::ConfigError("'" + given + "' is no policy; use one of " + names);
}

reef::SwapSpeeds speeds_of(double out, double in) {
  if (!(out > 0) || !(in > 0)) throw reef::ConfigError("speeds are in bytes per second, and above 0");
  return {out, in};
}

reef::Demand demand_of(const std::string& given) {
  if (given == "recency") return reef::Demand::kRecency;
  if (given == "farthest") return reef::Demand::kFarthest;
  throw reef::ConfigError("'" + given + "' is no demand; use recency or farthest");
}

// Of each operator, its pages and whether it writes them.
void add_operator(const Self& self, const std::string& name, double seconds, std::int64_t scratch_bytes,
                  const Ints& pages, const c10::List<bool>& writes, const Ints& frees) {
  reef::TraceOperator op{name, seconds, count(scratch_bytes, "scratch"), {}, {}};
  if (pages.size() != writes.size())
    throw reef::ConfigError("an operator says of each page whether it is written");
  if (!(seconds >= 0)) throw reef::ConfigError("operator '" + name + "' runs for less than 0 seconds");
  for (std::size_t i = 0; i < pages.size(); ++i) op.accesses.push_back({page_number(pages[i]), writes[i]});
  for (const std::int64_t page : frees) op.frees.push_back(page_number(page));
  self->trace.operators.push_back(std::move(op));
}

std::tuple<std::string, double, std::int64_t, Ints, c10::List<bool>, Ints> operator_at(const Self& self,
                                                                                       std::int64_t index) {
  const reef::TraceOperator& op = self->trace.operators.at(static_cast<std::size_t>(index));
  Ints pages;
  c10::List<bool> writes;
  for (const reef::TraceAccess& access : op.accesses) {
    pages.push_back(access.page);
    writes.push_back(access.writes);
  }
  return {op.name, op.seconds, static_cast<std::int64_t>(op.scratch_bytes),
          pages,   writes,     Ints(op.frees.begin(), op.frees.end())};
}

// The pages moved when each operator has run: page + 1 for a fetch, -(page + 1) for an eviction.
std::vector<Ints> moves_of(const PlanSelf& self) {
  std::vector<Ints> after;
  for (const std::vector<reef::SwapMove>& moves : self->plan.after) {
    Ints& numbers = after.emplace_back();
    for (const reef::SwapMove& move : moves) {
      const std::int64_t number = std::int64_t{move.page} + 1;
      numbers.push_back(move.kind == reef::SwapMove::Kind::kFetch ? number : -number);
    }
  }
  return after;
}

SwapPlan plan_of(const std::string& demand, const std::vector<Ints>& after) {
  reef::SwapPlan plan{demand_of(demand), {}};
  for (const Ints& numbers : after) {
    std::vector<reef::SwapMove>& moves = plan.after.emplace_back();
    for (const std::int64_t number : numbers) {
      moves.push_back({page_number(std::abs(number) - 1),
                       number > 0 ? reef::SwapMove::Kind::kFetch : reef::SwapMove::Kind::kEvict});
    }
  }
  return plan;
}

}  // namespace

void register_swap(torch::Library& m) {
  m.class_<Plan>("SwapPlan")
      .def(torch::init([](const std::string& demand, const std::vector<Ints>& after) {
        return c10::make_intrusive<Plan>(plan_of(demand, after));
      }))
      .def("demand",
           [](const PlanSelf& self) {
             return std::string(self->plan.demand == reef::Demand::kRecency ? "recency" : "farthest");
           })
      .def("after", &moves_of);

  m.class_<SwapTrace>("SwapTrace")
      .def(torch::init<>())
      .def("add_page",
           [](const Self& self, std::int64_t bytes, bool persistent) {
             self->trace.pages.push_back({count(bytes, "a page's size"), persistent});
           })
      .def("add_operator", &add_operator)
      .def("pages",
           [](const Self& self) {
             std::vector<std::tuple<std::int64_t, bool>> pages;
             for (const reef::TracePage& page : self->trace.pages)
               pages.emplace_back(static_cast<std::int64_t>(page.bytes), page.persistent);
             return pages;
           })
      .def("operators",
           [](const Self& self) { return static_cast<std::int64_t>(self->trace.operators.size()); })
      .def("operator_at", &operator_at)
      .def("check", [](const Self& self) { reef::check(self->trace); })
      .def("minimum_bytes",
           [](const Self& self) { return static_cast<std::int64_t>(reef::minimum_bytes(self->trace)); })
      .def("natural_peak_bytes",
           [](const Self& self) { return static_cast<std::int64_t>(reef::natural_peak_bytes(self->trace)); })
      .def("plan",
           [](const Self& self, std::int64_t budget_bytes, const std::string& policy, double out, double in) {
             return c10::make_intrusive<Plan>(reef::plan_swaps(self->trace, count(budget_bytes, "the budget"),
                                                               policy_of(policy), speeds_of(out, in)));
           })
      // In the order of the fields of reef.SwapCost.
      .def("simulate", [](const Self& self, const PlanSelf& plan, std::int64_t budget_bytes, double out,
                          double in) {
        const reef::SwapCost cost =
            reef::simulate(self->trace, plan->plan, count(budget_bytes, "the budget"), speeds_of(out, in));
        Ints counts;
        for (const std::uint64_t value :
             {cost.faults, cost.fetches, cost.evictions, cost.bytes_in, cost.bytes_out, cost.peak_bytes}) {
          counts.push_back(static_cast<std::int64_t>(value));
        }
        return std::make_tuple(counts, cost.seconds, cost.stalled_seconds);
      });

  m.def("swap_policies() -> str[]", [] {
    std::vector<std::string> names;
    for (const reef::SwapPolicy policy : reef::kSwapPolicies) names.emplace_back(name(policy));
    return names;
  });
}

}  // namespace reef::bind
