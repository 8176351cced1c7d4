#include "reef/budget.h"

#include <torch/custom_class.h>
#include <torch/library.h>

#include <optional>
#include <tuple>

#include "bytes.h"
#include "reef/error.h"
#include "swap_trace.h"
#include "tier.h"

namespace {

using reef::bind::BoundTier;
using reef::bind::bytes_of;
using reef::bind::SwapTrace;

reef::Addresses addresses_of(const std::string& text) {
  if (text == "automatic") return reef::Addresses::kAutomatic;
  if (text == "stay") return reef::Addresses::kStay;
  if (text == "go") return reef::Addresses::kGo;
  throw reef::ConfigError("addresses='" + text + "' is none of automatic, stay, go");
}

struct Budget : torch::CustomClassHolder {
  Budget(std::int64_t bytes, const std::vector<at::Tensor>& tensors, const std::vector<std::string>& names,
         const std::string& device, const std::vector<c10::intrusive_ptr<BoundTier>>& tiers, bool prefetch,
         bool restore, const std::string& addresses, bool strict, bool wait_while_full) {
    reef::BudgetOptions options{.device = c10::Device(device),
                                .tiers = {},
                                .prefetch = prefetch,
                                .restore = restore,
                                .addresses = addresses_of(addresses),
                                .strict = strict,
                                .wait_while_full = wait_while_full,
                                .names = names};
    for (const auto& tier : tiers) options.tiers.push_back(tier->tier);
    budget.emplace(bytes_of(bytes, "the budget"), tensors, std::move(options));
  }
  std::optional<reef::Budget> budget;
};

struct WholeTensors : torch::CustomClassHolder {
  explicit WholeTensors(reef::WholeTensors of) { whole.emplace(std::move(of)); }
  std::optional<reef::WholeTensors> whole;
};

using Self = c10::intrusive_ptr<Budget>;
using Floats = std::tuple<std::vector<std::int64_t>, double, double>;

// In the order of the fields of reef.BudgetUse.
Floats use_of(const reef::BudgetUse& use) {
  std::vector<std::int64_t> counts;
  for (const std::uint64_t count :
       {use.budget_bytes, use.live_bytes, use.peak_bytes, use.minimum_bytes, use.faults, use.fetches,
        use.evictions, use.clean_evictions, use.unseen_writes, use.bytes_in, use.bytes_out, use.unannounced,
        use.oversized}) {
    counts.push_back(static_cast<std::int64_t>(count));
  }
  return {counts, use.waited_seconds, use.unannounced_seconds};
}

}  // namespace

TORCH_LIBRARY_FRAGMENT(reef, m) {
  reef::bind::register_swap(m);
  reef::bind::register_tier(m);

  m.class_<WholeTensors>("WholeTensors")
      .def("bytes",
           [](const c10::intrusive_ptr<WholeTensors>& self) {
             return static_cast<std::int64_t>(self->whole ? self->whole->bytes() : 0);
           })
      .def("end", [](const c10::intrusive_ptr<WholeTensors>& self) { self->whole.reset(); });

  m.class_<Budget>("Budget")
      .def(torch::init<std::int64_t, const std::vector<at::Tensor>&, const std::vector<std::string>&,
                       const std::string&, const std::vector<c10::intrusive_ptr<BoundTier>>&, bool, bool,
                       const std::string&, bool, bool>())
      .def("end", [](const Self& self) { self->budget->end(); })
      .def("set_bytes", [](const Self& self,
                           std::int64_t bytes) { self->budget->set_bytes(bytes_of(bytes, "the budget")); })
      .def("whole",
           [](const Self& self, const std::vector<at::Tensor>& tensors) {
             return c10::make_intrusive<WholeTensors>(self->budget->whole(tensors));
           })
      .def("use", [](const Self& self) { return use_of(self->budget->use()); })
      .def("outlook",
           [](const Self& self) {
             std::vector<std::tuple<std::int64_t, double, double, std::int64_t>> steps;
             for (const reef::BudgetOutlook& step : self->budget->outlook()) {
               steps.emplace_back(static_cast<std::int64_t>(step.budget_bytes), step.seconds,
                                  step.waited_seconds, static_cast<std::int64_t>(step.moved_bytes));
             }
             return steps;
           })
      .def("trace", [](const Self& self) { return c10::make_intrusive<SwapTrace>(self->budget->trace()); })
      .def("addresses", [](const Self& self) { return self->budget->addresses(); })
      .def("report", [](const Self& self, bool with_outlook) { return self->budget->report(with_outlook); })
      .def("reset_use", [](const Self& self) { self->budget->reset_use(); });

  m.def("addresses_here() -> str", &reef::addresses_here);
  m.def("pin(Tensor tensor) -> ()", [](const at::Tensor& tensor) { reef::pin(tensor); });
  m.def("unpin(Tensor tensor) -> ()", [](const at::Tensor& tensor) { reef::unpin(tensor); });
}
