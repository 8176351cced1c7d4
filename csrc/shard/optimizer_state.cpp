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

void write_communication(OutputArchive& archive, const OptimizerState::Communication& communication) {
  const auto archive_of = [&] { return OutputArchive(archive.compilation_unit()); };
  OutputArchive written = archive_of();
  written.write("method", c10::IValue(communication.method));
  written.write("ranks", c10::IValue(communication.ranks));
  OutputArchive numbers = archive_of();
  write_values(numbers, communication.numbers);
  written.write("numbers", numbers);
  written.write("size", at::tensor(static_cast<std::int64_t>(communication.of_ranks.size())));
  for (std::size_t i = 0; i < communication.of_ranks.size(); ++i) {
    const auto& [rank, values] = communication.of_ranks[i];
    OutputArchive of_rank = archive_of();
    of_rank.write("rank", c10::IValue(rank));
    of_rank.write("size", at::tensor(static_cast<std::int64_t>(values.size())));
    for (std::size_t n = 0; n < values.size(); ++n) {
      OutputArchive one = archive_of();
      write_values(one, values[n].second);
      of_rank.write(numbered("name/", n), c10::IValue(values[n].first));
      of_rank.write(numbered("values/", n), one);
    }
    written.write(numbered("of_rank/", i), of_rank);
  }
  archive.write("communication", written);
}

OptimizerState::Communication read_communication(InputArchive& archive) {
  const auto value = [](InputArchive& from, const std::string& key) {
    c10::IValue read;
    from.read(key, read);
    return read;
  };
  OptimizerState::Communication read{
      value(archive, "method").toStringRef(), value(archive, "ranks").toInt(), {}, {}};
  InputArchive numbers;
  archive.read("numbers", numbers);
  read.numbers = read_values(numbers);
  const std::int64_t ranks = read_size(archive, "size");
  for (std::int64_t i = 0; i < ranks; ++i) {
    InputArchive of_rank;
    archive.read(numbered("of_rank/", static_cast<std::size_t>(i)), of_rank);
    auto& [rank, values] = read.of_ranks.emplace_back();
    rank = value(of_rank, "rank").toInt();
    const std::int64_t size = read_size(of_rank, "size");
    for (std::int64_t n = 0; n < size; ++n) {
      InputArchive one;
      of_rank.read(numbered("values/", static_cast<std::size_t>(n)), one);
      values.emplace_back(value(of_rank, numbered("name/", static_cast<std::size_t>(n))).toStringRef(),
                          read_values(one));
    }
  }
  return read;
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
  if (!state.communication.method.empty()) write_communication(archive, state.communication);
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
  if (InputArchive communication; archive.try_read("communication", communication))
    read.communication = read_communication(communication);
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
