#include "reef/checkpoint.h"

#include <torch/custom_class.h>
#include <torch/library.h>

#include <optional>

#include "python_function.h"

namespace {

struct Region : torch::CustomClassHolder {
  Region(std::int64_t function, const std::vector<std::string>& devices, bool check_values) {
    reef::CheckpointOptions options{.check_values = check_values};
    for (const std::string& device : devices) options.devices.emplace_back(device);
    region.emplace(
        [call = reef::bind::PythonFunction(function)](const std::vector<at::Tensor>&) { call({}); },
        std::vector<at::Tensor>{}, options);
  }
  std::optional<reef::CheckpointRegion> region;
};

}  // namespace

TORCH_LIBRARY_FRAGMENT(reef, m) {
  // Inputs are kept by Python, whose own hooks for saved tensors raise what only Python can pass on.
  m.class_<Region>("CheckpointRegion")
      .def(torch::init<std::int64_t, const std::vector<std::string>&, bool>())
      .def("end", [](const c10::intrusive_ptr<Region>& self) { self->region.reset(); });
  m.def("is_undone() -> bool", [] { return reef::is_undone(); });
  m.def("is_run_again() -> bool", [] { return reef::is_run_again(); });
}
