#include "reef/parameter_server.h"

#include <ATen/ops/empty.h>
#include <ATen/ops/tensor.h>
#include <torch/custom_class.h>
#include <torch/library.h>

#include <algorithm>
#include <optional>
#include <string>
#include <torch/csrc/distributed/c10d/ProcessGroup.hpp>
#include <tuple>
#include <vector>

#include "python_function.h"
#include "reef/error.h"

namespace {

reef::AsyncOptions async_options(std::int64_t servers, const std::string& rule,
                                 std::optional<std::int64_t> staleness, double compensation,
                                 double elasticity) {
  return {static_cast<int>(std::clamp<std::int64_t>(servers, -1, 1 << 30)), reef::async_rule_of(rule),
          staleness, compensation, elasticity};
}

struct BoundServer : torch::CustomClassHolder {
  BoundServer(const reef::ProcessGroupPtr& group, std::int64_t servers, const std::string& rule,
              std::optional<std::int64_t> staleness, double compensation, double elasticity)
      : server(group, async_options(servers, rule, staleness, compensation, elasticity)) {}
  reef::ParameterServer server;
};

struct BoundWorker : torch::CustomClassHolder {
  BoundWorker(const std::vector<std::string>& names, const std::vector<at::Tensor>& parameters,
              const reef::ProcessGroupPtr& group, std::int64_t servers, const std::string& rule,
              std::optional<std::int64_t> staleness, double compensation, double elasticity)
      : worker(named(names, parameters), group,
               async_options(servers, rule, staleness, compensation, elasticity)) {}
  static reef::AsyncWorker::Named named(const std::vector<std::string>& names,
                                        const std::vector<at::Tensor>& parameters) {
    reef::AsyncWorker::Named all;
    for (std::size_t i = 0; i < names.size(); ++i) all.emplace_back(names[i], parameters.at(i));
    return all;
  }
  reef::AsyncWorker worker;
};

using Server = c10::intrusive_ptr<BoundServer>;
using Worker = c10::intrusive_ptr<BoundWorker>;

at::Tensor tensor_of(std::span<const float> values) {
  at::Tensor tensor = at::empty({static_cast<std::int64_t>(values.size())}, at::kFloat);
  std::copy(values.begin(), values.end(), tensor.mutable_data_ptr<float>());
  return tensor;
}

std::vector<float> floats_of(const at::Tensor& tensor) {
  const at::Tensor values = tensor.detach().contiguous();
  if (values.scalar_type() != at::kFloat || !values.is_cpu())
    throw reef::ConfigError("replay_async: a slice is not of float32 on the CPU.");
  return {values.const_data_ptr<float>(), values.const_data_ptr<float>() + values.numel()};
}

/// What a function of Python's gives, into `to`.
void take(const std::vector<at::Tensor>& given, std::span<float> to, const char* what) {
  const std::vector<float> values = given.size() == 1 ? floats_of(given.front()) : std::vector<float>();
  if (values.size() != to.size())
    throw reef::ConfigError(std::string("replay_async: ") + what + " has given " +
                            std::to_string(values.size()) + " elements of " + std::to_string(to.size()) +
                            ".");
  std::copy(values.begin(), values.end(), to.begin());
}

std::vector<at::Tensor> replay(const std::vector<std::string>& logs, const std::vector<at::Tensor>& slices,
                               std::int64_t push, std::int64_t step) {
  const reef::bind::PythonFunction call_push(push);
  const reef::bind::PythonFunction call_step(step);
  const reef::AsyncModel model{
      [&](int worker, std::int64_t clock, std::span<const float> given, std::span<float> pushed) {
        take(call_push({at::tensor({std::int64_t{worker}, clock}, at::kLong), tensor_of(given)}), pushed,
             "what a worker pushes");
      },
      [&](int server, std::span<float> slice, std::span<const float> gradient, double rate) {
        take(call_step({at::tensor({static_cast<double>(server), rate}, at::kDouble), tensor_of(slice),
                        tensor_of(gradient)}),
             slice, "a step");
      }};
  std::vector<reef::AsyncLog> read;
  for (const std::string& text : logs) read.push_back(reef::read_async_log(text));
  std::vector<std::vector<float>> begin;
  for (const at::Tensor& slice : slices) begin.push_back(floats_of(slice));
  std::vector<at::Tensor> ends;
  for (const auto& slice : reef::replay_async(read, begin, model)) ends.push_back(tensor_of(slice));
  return ends;
}

}  // namespace

TORCH_LIBRARY_FRAGMENT(reef, m) {
  m.class_<BoundServer>("ParameterServer")
      .def(torch::init<const reef::ProcessGroupPtr&, std::int64_t, const std::string&,
                       std::optional<std::int64_t>, double, double>())
      .def("parameter", [](const Server& self) { return self->server.parameter(); })
      .def("next", [](const Server& self) { return self->server.next(); })
      .def("log", [](const Server& self) { return self->server.log().text(); })
      .def("removed", [](const Server& self) {
        std::vector<std::tuple<std::int64_t, std::string>> removed;
        for (const auto& [rank, why] : self->server.removed()) removed.emplace_back(rank, why);
        return removed;
      });
  m.class_<BoundWorker>("AsyncWorker")
      .def(torch::init<const std::vector<std::string>&, const std::vector<at::Tensor>&,
                       const reef::ProcessGroupPtr&, std::int64_t, const std::string&,
                       std::optional<std::int64_t>, double, double>())
      .def("pull", [](const Worker& self) { self->worker.pull(); })
      .def("push", [](const Worker& self) { self->worker.push(); })
      .def("leave", [](const Worker& self) { self->worker.leave(); })
      .def("join", [](const Worker& self) { self->worker.join(); })
      .def("finish", [](const Worker& self) { self->worker.finish(); })
      .def("clock", [](const Worker& self) { return self->worker.clock(); });
  m.def("read_async_log(str text) -> str",
        [](const std::string& text) { return reef::read_async_log(text).text(); });
  m.def(
      "simulate_async(int workers, int pushes, str rule, int? staleness, float compensation, float "
      "elasticity, "
      "float[] compute, float message, float jitter, int[] away, float[] away_from, float[] away_until, int "
      "seed) "
      "-> str",
      [](std::int64_t workers, std::int64_t pushes, const std::string& rule,
         std::optional<std::int64_t> staleness, double compensation, double elasticity,
         const std::vector<double>& compute, double message, double jitter,
         const std::vector<std::int64_t>& away, const std::vector<double>& away_from,
         const std::vector<double>& away_until, std::int64_t seed) {
        reef::AsyncDelays delays{compute, message, jitter, {}};
        for (std::size_t i = 0; i < away.size(); ++i)
          delays.absences.push_back({static_cast<int>(away[i]), away_from.at(i), away_until.at(i)});
        const auto options = async_options(1, rule, staleness, compensation, elasticity);
        return reef::simulate_async(static_cast<int>(workers), pushes, options, delays,
                                    static_cast<std::uint64_t>(seed))
            .text();
      });
  m.def("replay_async(str[] logs, Tensor[] slices, int push, int step) -> Tensor[]", &replay);
}
