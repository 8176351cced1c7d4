#include "reef/ddp_hook.h"

#include <torch/custom_class.h>
#include <torch/library.h>

#include <memory>
#include <optional>
#include <string>
#include <torch/csrc/distributed/c10d/ProcessGroup.hpp>
#include <utility>
#include <vector>

#include "compression_options.h"
#include "nonfinite_gradients.h"
#include "optimizer_state.h"
#include "reef/error.h"

namespace {

struct DdpHook : torch::CustomClassHolder {
  DdpHook(const reef::Shard::Named& parameters, const reef::ProcessGroupPtr& group,
          const reef::DdpHookOptions& options)
      : of_library(std::make_unique<reef::DdpHook>(parameters, group, options)) {}
  reef::DdpHook& hook() const {
    if (of_library == nullptr) throw reef::ConfigError("this DdpHook has been closed; make another");
    return *of_library;
  }
  std::unique_ptr<reef::DdpHook> of_library;
};
using Hook = c10::intrusive_ptr<DdpHook>;

}  // namespace

TORCH_LIBRARY_FRAGMENT(reef, m) {
  m.class_<DdpHook>("DdpHook")
      .def("exchange",
           [](const Hook& self, const at::Tensor& buffer, const std::vector<at::Tensor>& parameters,
              bool is_last) { self->hook().exchange(buffer, parameters, is_last); })
      .def("end_pass",
           [](const Hook& self, const std::optional<at::Tensor>& used) { self->hook().end_pass(used); })
      .def("nonfinite_gradients",
           [](const Hook& self) { return reef::bind::data_of(self->hook().nonfinite_gradients()); })
      .def("state", [](const Hook& self) { return reef::bind::data_of(self->hook().state()); })
      .def("full_state",
           [](const Hook& self, bool rank0_only) {
             return reef::bind::data_of(self->hook().full_state(rank0_only));
           })
      .def("load_state",
           [](const Hook& self, const std::vector<c10::IValue>& held) {
             std::vector<reef::OptimizerState::Communication> given;
             for (const c10::IValue& one : held)
               given.push_back(one.toCustomClass<reef::bind::OptimizerState>()->state.communication);
             self->hook().load_state(given);
           })
      .def("compression", [](const Hook& self) { return std::string(name_of(self->hook().compression())); })
      .def("compression_prices",
           [](const Hook& self) -> std::vector<std::string> {
             const auto& prices = self->hook().compression_prices();
             if (!prices) return {};
             return {prices->json(), prices->table()};
           })
      .def("sent_bytes", [](const Hook& self) { return self->hook().sent_bytes(); })
      .def("close", [](const Hook& self) { self->of_library.reset(); });
  m.def(
      "ddp_hook(Tensor[] parameters, str[] parameter_names, __torch__.torch.classes.c10d.ProcessGroup group, "
      "int bucket_bytes, str compression, str[] compression_options, int[] option_steps, float[] "
      "option_values, str[] allow) -> __torch__.torch.classes.reef.DdpHook",
      [](const std::vector<at::Tensor>& parameters, const std::vector<std::string>& names,
         const reef::ProcessGroupPtr& group, std::int64_t bucket_bytes, const std::string& compression,
         const std::vector<std::string>& option_names, const std::vector<std::int64_t>& option_steps,
         const std::vector<double>& option_values, const std::vector<std::string>& allow) {
        reef::Shard::Named named;
        for (std::size_t i = 0; i < names.size(); ++i) named.emplace_back(names[i], parameters[i]);
        reef::DdpHookOptions options{.bucket_bytes = bucket_bytes,
                                     .compression = reef::compression_named(compression),
                                     .compression_options = reef::bind::compression_options(
                                         option_names, option_steps, option_values)};
        for (const std::string& each : allow) options.allow.push_back(reef::exchange_class_named(each));
        return c10::make_intrusive<DdpHook>(named, group, options);
      });
}
