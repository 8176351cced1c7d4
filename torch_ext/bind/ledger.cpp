#include "reef/ledger.h"

#include <torch/custom_class.h>
#include <torch/library.h>

#include <optional>

#include "reef/error.h"

namespace {

using Ints = std::vector<std::int64_t>;

Ints ints(const reef::CategoryBytes& bytes) { return {bytes.of.begin(), bytes.of.end()}; }

reef::Category category_of(std::int64_t index) {
  if (index < 0 || index >= static_cast<std::int64_t>(reef::kCategories)) {
    throw reef::ConfigError("category " + std::to_string(index) + " is not one of 0 to 5");
  }
  return static_cast<reef::Category>(index);
}

struct Timeline : torch::CustomClassHolder {
  explicit Timeline(reef::Timeline given) : timeline(std::move(given)) {}

  std::size_t index_of(const std::string& device) const {
    for (std::size_t i = 0; i < timeline.devices.size(); ++i) {
      if (timeline.devices[i] == device) return i;
    }
    throw reef::ConfigError("nothing was alive on device '" + device + "' while the timeline was recorded");
  }

  std::string chart(const std::string& device, const std::string& title, std::int64_t budget_bytes) const {
    return reef::memory_chart(timeline, index_of(device), {.title = title, .budget_bytes = budget_bytes});
  }

  // One row an event: nanoseconds, bytes, kind, category, from, operator, device.
  std::vector<Ints> events() const {
    std::vector<Ints> rows;
    rows.reserve(timeline.events.size());
    for (const auto& e : timeline.events) {
      rows.push_back({e.nanoseconds, e.bytes, static_cast<std::int64_t>(e.kind),
                      static_cast<std::int64_t>(e.category), static_cast<std::int64_t>(e.from), e.op,
                      e.device});
    }
    return rows;
  }

  // One row a sample: nanoseconds, value, counter.
  std::vector<Ints> samples() const {
    std::vector<Ints> rows;
    rows.reserve(timeline.samples.size());
    for (const auto& sample : timeline.samples)
      rows.push_back({sample.nanoseconds, sample.value, static_cast<std::int64_t>(sample.counter)});
    return rows;
  }

  Ints bytes_after(const std::string& device, std::int64_t count) const {
    const auto last = std::min<std::int64_t>(std::max<std::int64_t>(count, 0), std::ssize(timeline.events));
    return ints(reef::bytes_after(timeline, index_of(device), static_cast<std::size_t>(last)));
  }

  reef::Timeline timeline;
};

struct Ledger : torch::CustomClassHolder {
  reef::Ledger ledger;
};

struct CategoryScope : torch::CustomClassHolder {
  explicit CategoryScope(std::int64_t category) { scope.emplace(category_of(category)); }
  std::optional<reef::CategoryScope> scope;
};

using Self = c10::intrusive_ptr<Ledger>;

}  // namespace

TORCH_LIBRARY_FRAGMENT(reef, m) {
  m.class_<Timeline>("Timeline")
      .def("chart",
           [](const c10::intrusive_ptr<Timeline>& self, const std::string& device, const std::string& title,
              std::int64_t budget) { return self->chart(device, title, budget); })
      .def("trace",
           [](const c10::intrusive_ptr<Timeline>& self) { return reef::chrome_trace(self->timeline); })
      .def("devices", [](const c10::intrusive_ptr<Timeline>& self) { return self->timeline.devices; })
      .def("operators", [](const c10::intrusive_ptr<Timeline>& self) { return self->timeline.operators; })
      .def("events", [](const c10::intrusive_ptr<Timeline>& self) { return self->events(); })
      .def("counters", [](const c10::intrusive_ptr<Timeline>& self) { return self->timeline.counters; })
      .def("samples", [](const c10::intrusive_ptr<Timeline>& self) { return self->samples(); })
      .def("events_dropped",
           [](const c10::intrusive_ptr<Timeline>& self) { return self->timeline.events_dropped; })
      .def("bytes_after", [](const c10::intrusive_ptr<Timeline>& self, const std::string& device,
                             std::int64_t count) { return self->bytes_after(device, count); });

  m.class_<Ledger>("Ledger")
      .def(torch::init<>())
      .def("watch",
           [](const Self& self, const std::vector<at::Tensor>& tensors) { self->ledger.watch(tensors); })
      .def("mark",
           [](const Self& self, const std::vector<at::Tensor>& tensors, std::int64_t category) {
             for (const at::Tensor& tensor : tensors) self->ledger.mark(tensor, category_of(category));
           })
      .def("live",
           [](const Self& self, const std::string& device) { return ints(self->ledger.live(device)); })
      .def("peak",
           [](const Self& self, const std::string& device) {
             const reef::Peak peak = self->ledger.peak(device);
             return std::make_tuple(ints(peak.bytes), peak.op);
           })
      .def("peak_by_category",
           [](const Self& self, const std::string& device) {
             return ints(self->ledger.peak_by_category(device));
           })
      .def("reset_peak", [](const Self& self) { self->ledger.reset_peak(); })
      .def("devices",
           [](const Self& self) {
             std::vector<std::string> names;
             for (const c10::Device device : self->ledger.devices()) names.push_back(device.str());
             return names;
           })
      .def("start_timeline",
           [](const Self& self, std::int64_t max_events) {
             if (max_events < 0) throw reef::ConfigError("start_timeline: max_events must not be negative");
             self->ledger.start_timeline(static_cast<std::size_t>(max_events));
           })
      .def("stop_timeline",
           [](const Self& self) { return c10::make_intrusive<Timeline>(self->ledger.stop_timeline()); })
      .def("table", [](const Self& self) { return self->ledger.table(); });

  m.class_<CategoryScope>("CategoryScope")
      .def(torch::init<std::int64_t>())
      .def("close", [](const c10::intrusive_ptr<CategoryScope>& self) { self->scope.reset(); });

  m.def("allocator_live_bytes() -> int", [] { return reef::allocator_live_bytes(); });
  m.def("category_names() -> str[]", [] {
    std::vector<std::string> names;
    for (std::size_t i = 0; i < reef::kCategories; ++i)
      names.emplace_back(reef::name(static_cast<reef::Category>(i)));
    return names;
  });
}
