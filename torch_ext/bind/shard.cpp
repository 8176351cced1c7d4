#include "reef/shard.h"

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
#include "python_function.h"
#include "reef/delayed_update.h"
#include "reef/error.h"
#include "reef/local_updates.h"
#include "shard_options.h"

namespace {

reef::Shard::Named named(const std::vector<std::string>& names, const std::vector<at::Tensor>& tensors) {
  reef::Shard::Named all;
  for (std::size_t i = 0; i < names.size(); ++i) all.emplace_back(names[i], tensors[i]);
  return all;
}

// Two of Python's functions, by their numbers.
reef::Shard::ModuleNow module_now(std::int64_t check, std::int64_t buffers,
                                  const std::vector<std::string>& buffer_names) {
  using reef::bind::PythonFunction;
  return {[call = PythonFunction(check)] { call({}); },
          [call = PythonFunction(buffers), buffer_names]() -> std::optional<reef::Shard::Named> {
            const std::vector<at::Tensor> now = call({});
            if (now.size() != buffer_names.size()) return std::nullopt;  // the module is gone
            return named(buffer_names, now);
          }};
}

struct Shard : torch::CustomClassHolder {
  template <class... Given>
  explicit Shard(const Given&... given) : shard(given...) {}
  reef::Shard shard;
  std::vector<std::unique_ptr<reef::Shard::NoSync>> pauses;
  std::vector<std::unique_ptr<reef::Shard::LocalSums>> local_sums;
  std::unique_ptr<reef::UpdateBeside> update;
};
using Self = c10::intrusive_ptr<Shard>;

struct LocalUpdates : torch::CustomClassHolder {
  LocalUpdates(Self of_shard, const reef::LocalUpdatesOptions& options) : shard(std::move(of_shard)) {
    updates.emplace(shard->shard, options);
  }
  const Self shard;
  std::optional<reef::LocalUpdates> updates;
};

using reef::bind::data_of;
using reef::bind::OptimizerState;
using HeldState = c10::intrusive_ptr<OptimizerState>;

}  // namespace

TORCH_LIBRARY_FRAGMENT(reef, m) {
  m.class_<OptimizerState>("OptimizerState").def(torch::init([](const c10::IValue& data) {
    return c10::make_intrusive<OptimizerState>(reef::bind::state_of(data));
  }));
  m.class_<Shard>("Shard")
      .def("parameters", [](const Self& self) { return self->shard.parameters(); })
      .def("names", [](const Self& self) { return self->shard.names(); })
      .def("gather", [](const Self& self) { self->shard.gather(); })
      .def(
          "refresh",
          [](const Self& self, const std::vector<at::Tensor>& parameters,
             const std::vector<std::string>& parameter_names, const std::vector<at::Tensor>& buffers,
             const std::vector<std::string>& buffer_names, std::int64_t check_now, std::int64_t buffers_now) {
            self->shard.refresh(named(parameter_names, parameters), named(buffer_names, buffers),
                                module_now(check_now, buffers_now, buffer_names));
          })
      .def("has_ended", [](const Self& self) { return self->shard.has_ended(); })
      .def("nonfinite_gradients",
           [](const Self& self) { return reef::bind::data_of(self->shard.nonfinite_gradients()); })
      .def("clear_gradients", [](const Self& self) { self->shard.clear_gradients(); })
      .def("agree", [](const Self& self, const std::string& failed,
                       const std::string& rule) { self->shard.agree_with_ranks(failed, rule); })
      .def("param_groups",
           [](const Self& self, const std::vector<std::string>& keys) {
             std::size_t next = 0;
             std::vector<std::vector<at::Tensor>> groups;
             for (auto& group : self->shard.param_groups(
                      [&](const std::string&, at::IntArrayRef) { return keys.at(next++); }))
               groups.push_back(std::move(group.parameters));
             return groups;
           })
      .def("full_state_dict",
           [](const Self& self, bool rank0_only) { return self->shard.full_state_dict(rank0_only); })
      .def("sharded_state_dict", [](const Self& self) { return self->shard.sharded_state_dict(); })
      .def("load_state_dict",
           [](const Self& self, const std::vector<reef::StateDict>& given) {
             self->shard.load_state_dict(given);
           })
      .def("full_optimizer_state",
           [](const Self& self, const HeldState& own, bool rank0_only) {
             return data_of(self->shard.full_optimizer_state(own->state, rank0_only));
           })
      .def("own_optimizer_state",
           [](const Self& self, const HeldState& own, const std::vector<HeldState>& given,
              const std::string& rule) {
             std::vector<reef::OptimizerState> states;
             for (const HeldState& one : given) states.push_back(one->state);
             return data_of(self->shard.own_optimizer_state(own->state, std::move(states), rule));
           })
      .def("communication", [](const Self& self) { return data_of(self->shard.communication()); })
      .def("load_communication",
           [](const Self& self, const c10::IValue& own) {
             self->shard.load_communication(reef::bind::communication_of(own));
           })
      .def("resident_bytes", [](const Self& self) { return self->shard.resident_bytes(); })
      .def("compression",
           [](const Self& self) { return std::string(reef::name_of(self->shard.compression())); })
      .def("compression_prices",
           [](const Self& self) -> std::vector<std::string> {
             const auto& prices = self->shard.compression_prices();
             if (!prices) return {};
             return {prices->json(), prices->table()};
           })
      .def("sent_bytes", [](const Self& self) { return self->shard.sent_bytes(); })
      .def("begin_no_sync",
           [](const Self& self) {
             self->pauses.push_back(std::make_unique<reef::Shard::NoSync>(self->shard));
           })
      .def("end_no_sync", [](const Self& self) { self->pauses.pop_back(); })
      .def("begin_local_sums",
           [](const Self& self) {
             self->local_sums.push_back(std::make_unique<reef::Shard::LocalSums>(self->shard));
           })
      .def("end_local_sums", [](const Self& self) { self->local_sums.pop_back(); })
      .def("join",
           [](const Self& self, std::int64_t step) {
             self->shard.join([call = reef::bind::PythonFunction(step)] { call({}); });
           })
      .def("average_parameters", [](const Self& self) { self->shard.average_parameters(); })
      .def("open_update",
           [](const Self& self) { self->update = std::make_unique<reef::UpdateBeside>(self->shard); })
      .def("close_update", [](const Self& self) { self->update.reset(); })
      .def("wait_for_update",
           [](const Self& self) {
             if (self->update) self->update->wait();
           })
      .def("under_way", [](const Self& self) { return self->update->under_way(); })
      .def("begin_update", [](const Self& self) { self->update->begin(); })
      .def("wait_for_parts", [](const Self& self) { self->update->wait_for_parts(); })
      .def("end_update", [](const Self& self) { self->update->end(); })
      .def("finish_update", [](const Self& self) { self->update->finish(); });
  using Updates = c10::intrusive_ptr<LocalUpdates>;
  m.class_<LocalUpdates>("LocalUpdates")
      .def("step", [](const Updates& self) { self->updates->step(); })
      .def("finish", [](const Updates& self) { self->updates->finish(); })
      .def("begin_round", [](const Updates& self) { self->updates->begin_round(); })
      .def("local_step", [](const Updates& self) { return self->updates->local_step(); })
      .def("sent_bytes", [](const Updates& self) { return self->updates->sent_bytes(); })
      .def("state", [](const Updates& self) { return data_of(self->updates->state().communication); })
      .def("load_state",
           [](const Updates& self, const HeldState& own) { self->updates->load_state(own->state); })
      .def("close", [](const Updates& self) { self->updates.reset(); });
  m.def(
      "local_updates(__torch__.torch.classes.reef.Shard shard, int local_steps, float outer_lr, "
      "float outer_momentum, bool nesterov, str compression, str[] compression_options, int[] option_steps, "
      "float[] option_values, int parts, int overlap_steps, float mixing, "
      "__torch__.torch.classes.c10d.ProcessGroup? between_copies) -> "
      "__torch__.torch.classes.reef.LocalUpdates",
      [](const Self& shard, std::int64_t local_steps, double outer_lr, double outer_momentum, bool nesterov,
         const std::string& compression, const std::vector<std::string>& option_names,
         const std::vector<std::int64_t>& option_steps, const std::vector<double>& option_values,
         std::int64_t parts, std::int64_t overlap_steps, double mixing,
         const std::optional<reef::ProcessGroupPtr>& between_copies) {
        const reef::LocalUpdatesOptions options{
            .local_steps = local_steps,
            .outer_lr = outer_lr,
            .outer_momentum = outer_momentum,
            .nesterov = nesterov,
            .compression = reef::compression_named(compression),
            .compression_options = reef::bind::compression_options(option_names, option_steps, option_values),
            .parts = parts,
            .overlap_steps = overlap_steps,
            .mixing = mixing,
            .between_copies = between_copies.value_or(reef::ProcessGroupPtr())};
        return c10::make_intrusive<LocalUpdates>(shard, options);
      });
  m.def(
      "check_compression(str compression, str[] compression_options, int[] option_steps, float[] "
      "option_values) -> ()",
      [](const std::string& compression, const std::vector<std::string>& names,
         const std::vector<std::int64_t>& steps, const std::vector<double>& values) {
        reef::check_compression(reef::compression_named(compression),
                                reef::bind::compression_options(names, steps, values));
      });
  m.def(
      "shard(Tensor[] parameters, str[] parameter_names, Tensor[] buffers, str[] buffer_names, "
      "__torch__.torch.classes.c10d.ProcessGroup group, Any options, "
      "int check_now, int buffers_now) -> __torch__.torch.classes.reef.Shard",
      [](const std::vector<at::Tensor>& parameters, const std::vector<std::string>& parameter_names,
         const std::vector<at::Tensor>& buffers, const std::vector<std::string>& buffer_names,
         const reef::ProcessGroupPtr& group, const c10::IValue& options, std::int64_t check_now,
         std::int64_t buffers_now) {
        return c10::make_intrusive<Shard>(named(parameter_names, parameters), named(buffer_names, buffers),
                                          group, reef::bind::shard_options_of(options),
                                          module_now(check_now, buffers_now, buffer_names));
      });
}
