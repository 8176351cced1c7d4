#include "reef/shard.h"

#include <torch/custom_class.h>
#include <torch/library.h>

#include <memory>
#include <torch/csrc/distributed/c10d/ProcessGroup.hpp>

#include "reduction.h"
#include "reef/error.h"

namespace {

reef::Stage stage_of(const std::string& name) {
  if (name == "replicate") return reef::Stage::kReplicate;
  if (name == "optimizer") return reef::Stage::kOptimizer;
  if (name == "gradients") return reef::Stage::kGradients;
  if (name == "parameters") return reef::Stage::kParameters;
  throw reef::ConfigError("stage '" + name +
                          "' is not \"replicate\", \"optimizer\", \"gradients\" or \"parameters\"");
}

reef::Shard::Named named(const std::vector<std::string>& names, const std::vector<at::Tensor>& tensors) {
  reef::Shard::Named all;
  for (std::size_t i = 0; i < names.size(); ++i) all.emplace_back(names[i], tensors[i]);
  return all;
}

struct Shard : torch::CustomClassHolder {
  template <class... Given>
  explicit Shard(const Given&... given) : shard(given...) {}
  reef::Shard shard;
  std::vector<std::unique_ptr<reef::Shard::NoSync>> pauses;
};
using Self = c10::intrusive_ptr<Shard>;

}  // namespace

TORCH_LIBRARY_FRAGMENT(reef, m) {
  m.class_<Shard>("Shard")
      .def("parameters", [](const Self& self) { return self->shard.parameters(); })
      .def("names", [](const Self& self) { return self->shard.names(); })
      .def("gather", [](const Self& self) { self->shard.gather(); })
      .def("sent_bytes", [](const Self& self) { return self->shard.sent_bytes(); })
      .def("begin_no_sync",
           [](const Self& self) {
             self->pauses.push_back(std::make_unique<reef::Shard::NoSync>(self->shard));
           })
      .def("end_no_sync", [](const Self& self) { self->pauses.pop_back(); });
  m.def(
      "shard(Tensor[] parameters, str[] parameter_names, Tensor[] buffers, str[] buffer_names, "
      "__torch__.torch.classes.c10d.ProcessGroup group, str stage, int bucket_bytes, str reduction, "
      "int resident_bytes) -> "
      "__torch__.torch.classes.reef.Shard",
      [](const std::vector<at::Tensor>& parameters, const std::vector<std::string>& parameter_names,
         const std::vector<at::Tensor>& buffers, const std::vector<std::string>& buffer_names,
         const reef::ProcessGroupPtr& group, const std::string& stage, std::int64_t bucket_bytes,
         const std::string& reduction, std::int64_t resident_bytes) {
        const reef::ShardOptions options{.stage = stage_of(stage),
                                         .bucket_bytes = bucket_bytes,
                                         .reduction = reef::bind::reduction_of(reduction),
                                         .resident_bytes = resident_bytes};
        return c10::make_intrusive<Shard>(named(parameter_names, parameters), named(buffer_names, buffers),
                                          group, options);
      });
}
