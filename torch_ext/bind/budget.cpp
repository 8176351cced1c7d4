#include "reef/budget.h"

#include <torch/custom_class.h>
#include <torch/library.h>

#include <optional>
#include <tuple>

#include "reef/error.h"
#include "swap_trace.h"

namespace {

using reef::bind::SwapTrace;

std::uint64_t bytes_of(std::int64_t bytes, const char* what) {
  if (bytes < 0)
    throw reef::ConfigError(std::string(what) + " is " + std::to_string(bytes) + " bytes; give 0 or more");
  return static_cast<std::uint64_t>(bytes);
}

reef::DiskIo disk_io_of(const std::string& name) {
  if (name == "automatic") return reef::DiskIo::kAutomatic;
  if (name == "threads") return reef::DiskIo::kThreads;
  if (name == "uring") return reef::DiskIo::kUring;
  throw reef::ConfigError("io '" + name + "' is not \"automatic\", \"threads\" or \"uring\"");
}

struct Tier : torch::CustomClassHolder {
  explicit Tier(std::shared_ptr<reef::Tier> given) : tier(std::move(given)) {}
  std::shared_ptr<reef::Tier> tier;
};

struct Budget : torch::CustomClassHolder {
  Budget(std::int64_t bytes, const std::vector<at::Tensor>& tensors, const std::string& device,
         const std::vector<c10::intrusive_ptr<Tier>>& tiers, bool prefetch, bool restore) {
    reef::BudgetOptions options{
        .device = c10::Device(device), .tiers = {}, .prefetch = prefetch, .restore = restore};
    for (const auto& tier : tiers) options.tiers.push_back(tier->tier);
    budget.emplace(bytes_of(bytes, "the budget"), tensors, std::move(options));
  }
  std::optional<reef::Budget> budget;
};

using Self = c10::intrusive_ptr<Budget>;
using Floats = std::tuple<std::vector<std::int64_t>, double>;

// In the order of the fields of reef.BudgetUse.
Floats use_of(const reef::BudgetUse& use) {
  std::vector<std::int64_t> counts;
  for (const std::uint64_t count :
       {use.budget_bytes, use.live_bytes, use.peak_bytes, use.minimum_bytes, use.faults, use.fetches,
        use.evictions, use.clean_evictions, use.unseen_writes, use.bytes_in, use.bytes_out}) {
    counts.push_back(static_cast<std::int64_t>(count));
  }
  return {counts, use.waited_seconds};
}

}  // namespace

TORCH_LIBRARY_FRAGMENT(reef, m) {
  reef::bind::register_swap(m);

  m.class_<Tier>("Tier")
      .def("name", [](const c10::intrusive_ptr<Tier>& self) { return self->tier->name(); })
      .def("use", [](const c10::intrusive_ptr<Tier>& self) {
        const reef::TierUse use = self->tier->use();
        std::vector<std::int64_t> counts;
        for (const std::uint64_t count :
             {use.capacity_bytes, use.used_bytes, use.peak_bytes, use.written_bytes, use.read_bytes}) {
          counts.push_back(static_cast<std::int64_t>(count));
        }
        return counts;
      });
  m.def("host_tier(int capacity_bytes) -> __torch__.torch.classes.reef.Tier",
        [](std::int64_t capacity_bytes) {
          return c10::make_intrusive<Tier>(reef::host_tier(bytes_of(capacity_bytes, "the host tier")));
        });
  m.def("pinned_tier(int capacity_bytes) -> __torch__.torch.classes.reef.Tier",
        [](std::int64_t capacity_bytes) {
          return c10::make_intrusive<Tier>(reef::pinned_tier(bytes_of(capacity_bytes, "the pinned tier")));
        });
  m.def(
      "disk_tier(str directory, int capacity_bytes, int block_bytes, int threads, bool direct, str io) -> "
      "__torch__.torch.classes.reef.Tier",
      [](const std::string& directory, std::int64_t capacity_bytes, std::int64_t block_bytes,
         std::int64_t threads, bool direct, const std::string& io) {
        return c10::make_intrusive<Tier>(
            reef::disk_tier({.directory = directory,
                             .capacity_bytes = bytes_of(capacity_bytes, "the disk tier"),
                             .block_bytes = bytes_of(block_bytes, "a block"),
                             .threads = static_cast<int>(threads),
                             .direct = direct,
                             .io = disk_io_of(io)}));
      });

  m.class_<Budget>("Budget")
      .def(torch::init<std::int64_t, const std::vector<at::Tensor>&, const std::string&,
                       const std::vector<c10::intrusive_ptr<Tier>>&, bool, bool>())
      .def("end", [](const Self& self) { self->budget->end(); })
      .def("set_bytes", [](const Self& self,
                           std::int64_t bytes) { self->budget->set_bytes(bytes_of(bytes, "the budget")); })
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
      .def("report", [](const Self& self) { return self->budget->report(); })
      .def("reset_use", [](const Self& self) { self->budget->reset_use(); });

  m.def("pin(Tensor tensor) -> ()", [](const at::Tensor& tensor) { reef::pin(tensor); });
  m.def("unpin(Tensor tensor) -> ()", [](const at::Tensor& tensor) { reef::unpin(tensor); });
}
