#include "reef/optimizer_state.h"

#include <ATen/ops/tensor.h>
#include <torch/optim/optimizer.h>
#include <torch/serialize/archive.h>

#include <cstdint>

#include "reef/error.h"
#include "shard/optimizer_options.h"

// The layout of files is torch::optim's (torch/optim/serialize.h).
namespace reef {

using at::Tensor;
using torch::serialize::InputArchive;
using torch::serialize::OutputArchive;

namespace {

std::string numbered(const char* key, std::size_t number) {
  return std::string(key) + std::to_string(number);
}

std::int64_t read_size(InputArchive& archive, const std::string& key) {
  Tensor size;
  if (!archive.try_read(key, size))
    throw ConfigError("there is no " + key + " in the archive: it is not an optimizer's");
  return size.item<std::int64_t>();
}

Tensor size_of(const std::vector<std::string>& list) {
  return at::tensor(static_cast<std::int64_t>(list.size()));
}

OptimizerState::Values read_values(InputArchive& archive) {
  OptimizerState::Values values;
  for (const std::string& key : archive.keys()) {
    c10::IValue value;
    archive.read(key, value);
    values.emplace_back(key, std::move(value));
  }
  return values;
}

void write_values(OutputArchive& archive, const OptimizerState::Values& values) {
  for (const auto& [key, value] : values) archive.write(key, value);
}

// Of any class, by way of its own files.
template <class To>
void pass_on(OutputArchive& from, const To& to) {
  std::string bytes;
  from.save_to([&](const void* data, std::size_t size) {
    bytes.append(static_cast<const char*>(data), size);
    return size;
  });
  InputArchive archive;
  archive.load_from(bytes.data(), bytes.size());
  to(archive);
}

}  // namespace

OutputArchive& operator<<(OutputArchive& archive, const OptimizerState& state) {
  archive.write("pytorch_version", c10::IValue("1.5.0"));
  OutputArchive states(archive.compilation_unit());
  for (const auto& [id, values] : state.states) {
    OutputArchive one(archive.compilation_unit());
    write_values(one, values);
    states.write(id, one);
  }
  archive.write("state", states);
  OutputArchive groups(archive.compilation_unit());
  groups.write("param_groups/size", at::tensor(static_cast<std::int64_t>(state.groups.size())));
  for (std::size_t g = 0; g < state.groups.size(); ++g) {
    const OptimizerState::Group& group = state.groups[g];
    OutputArchive written(archive.compilation_unit());
    written.write("params/size", size_of(group.ids));
    for (std::size_t i = 0; i < group.ids.size(); ++i)
      written.write(numbered("params/", i), c10::IValue(group.ids[i]));
    written.write("names/size", size_of(group.names));
    for (std::size_t i = 0; i < group.names.size(); ++i)
      written.write(numbered("names/", i), c10::IValue(group.names[i]));
    OutputArchive options(archive.compilation_unit());
    write_values(options, group.options);
    written.write("options", options);
    groups.write(numbered("param_groups/", g), written);
  }
  archive.write("param_groups", groups);
  return archive;
}

InputArchive& operator>>(InputArchive& archive, OptimizerState& state) {
  OptimizerState read;
  InputArchive states;
  InputArchive groups;
  if (!archive.try_read("state", states) || !archive.try_read("param_groups", groups))
    throw ConfigError("there is no state or no param_groups in the archive: it is not an optimizer's");
  for (const std::string& id : states.keys()) {
    InputArchive one;
    states.read(id, one);
    read.states.emplace_back(id, read_values(one));
  }
  const std::int64_t many = read_size(groups, "param_groups/size");
  for (std::int64_t g = 0; g < many; ++g) {
    InputArchive group;
    groups.read(numbered("param_groups/", static_cast<std::size_t>(g)), group);
    OptimizerState::Group& to = read.groups.emplace_back();
    const auto read_list = [&](const char* key, std::vector<std::string>& list) {
      const std::int64_t size = read_size(group, std::string(key) + "size");
      for (std::int64_t i = 0; i < size; ++i) {
        c10::IValue text;
        group.read(numbered(key, static_cast<std::size_t>(i)), text);
        list.push_back(text.toStringRef());
      }
    };
    read_list("params/", to.ids);
    Tensor named;
    if (group.try_read("names/size", named)) read_list("names/", to.names);
    InputArchive options;
    group.read("options", options);
    to.options = read_values(options);
  }
  state = std::move(read);
  return archive;
}

OptimizerState::Values option_values(const torch::optim::OptimizerOptions& options) {
  OutputArchive archive;
  options.serialize(archive);
  OptimizerState::Values values;
  pass_on(archive, [&](InputArchive& read) { values = read_values(read); });
  return values;
}

OptimizerState optimizer_state(const torch::optim::Optimizer& optimizer) {
  OutputArchive archive;
  optimizer.save(archive);
  OptimizerState state;
  pass_on(archive, [&](InputArchive& read) { read >> state; });
  return state;
}

void load_optimizer_state(torch::optim::Optimizer& optimizer, const OptimizerState& state) {
  OutputArchive archive;
  archive << state;
  pass_on(archive, [&](InputArchive& read) { optimizer.load(read); });
}

}  // namespace reef
