#include "checkpoint.h"

#include <torch/serialize.h>

#include <boost/crc.hpp>
#include <sstream>
#include <string_view>
#include <utility>
#include <vector>

#include "reef/error.h"
#include "whole_file.h"

namespace bytelm {
namespace {

/// The first line of a checkpoint; the archive comes after it. (The archive alone would do, but LibTorch does
/// not verify its checksums: a damaged tensor would be read as if nothing had happened.)
std::string first_line(std::string_view archive) {
  boost::crc_32_type crc;
  crc.process_bytes(archive.data(), archive.size());
  return "bytelm checkpoint 1, crc32 " + std::to_string(crc.checksum()) + "\n";
}

/// The options a checkpoint fits only if they are the same, by their names on the command line.
std::vector<std::pair<std::string, std::string>> identity(const Options& options) {
  return {
      {"width", std::to_string(options.width)}, {"depth", std::to_string(options.depth)},
      {"heads", std::to_string(options.heads)}, {"context", std::to_string(options.context)},
      {"optimizer", options.optimizer},         {"state", options.state.empty() ? "torch" : options.state}};
}

c10::IValue read_value(torch::serialize::InputArchive& archive, const std::string& key) {
  c10::IValue value;
  archive.read(key, value);
  return value;
}

}  // namespace

void save_checkpoint(const std::string& path, TrainingState& state, const Options& options) {
  torch::serialize::OutputArchive archive, fits, model, optimizer;
  std::optional<ByteGPT> whole_model;
  if (state.pipelined) {
    const reef::OptimizerState whole =
        state.pipelined->pipeline().full_optimizer_state(*state.optimizer, /*rank0_only=*/true);
    whole_model = state.pipelined->whole(options, /*on_all=*/false);
    if (!whole_model) return;  // not rank 0
    optimizer << whole;
  } else if (state.sharded) {
    const reef::OptimizerState whole = state.sharded->full_optimizer_state(*state.optimizer, true);
    state.sharded->gather();
    if (whole.groups.empty()) return;  // not rank 0
    optimizer << whole;
  } else {
    state.optimizer->save(optimizer);
  }
  for (const auto& [name, value] : identity(options)) fits.write(name, c10::IValue(value));
  archive.write("fits", fits);
  archive.write("step", c10::IValue(state.step));
  archive.write("batches", c10::IValue(state.batches.get_state()));
  (whole_model ? *whole_model : state.model)->save(model);
  archive.write("model", model);
  archive.write("optimizer", optimizer);
  std::ostringstream content;
  archive.save_to(content);
  write_whole_file(path, first_line(content.view()) + content.str());
}

void load_checkpoint(const std::string& path, TrainingState& state, const Options& options,
                     torch::Device device) {
  const auto content = read_whole_file(path, "--resume takes a file that --save wrote");
  const auto archive_begin = content.find('\n') + 1;
  const auto archive_bytes = content.substr(archive_begin);
  if (content.substr(0, archive_begin) != first_line(archive_bytes)) {
    throw reef::FileError(path +
                              " is damaged or not a checkpoint of bytelm: resume from another file that "
                              "--save wrote, or begin anew without --resume",
                          path);
  }
  torch::serialize::InputArchive archive, fits, model, optimizer;
  archive.load_from(archive_bytes.data(), archive_bytes.size(), device);
  archive.read("fits", fits);
  for (const auto& [name, value] : identity(options)) {
    const std::string saved = read_value(fits, name).toStringRef();
    if (saved != value) {
      throw reef::ConfigError(path + " was saved with --" + name + " " + saved + ", not " + value +
                              ": resume it with --" + name + " " + saved +
                              ", or begin anew without --resume");
    }
  }
  archive.read("model", model);
  archive.read("optimizer", optimizer);
  if (state.pipelined) {
    ByteGPT plain(options);
    plain->load(model);
    state.pipelined->load(plain);
    reef::OptimizerState whole;
    optimizer >> whole;
    state.pipelined->pipeline().load_optimizer_state(*state.optimizer, {whole});
  } else if (state.sharded) {
    ByteGPT plain(options);  // a module's load() gives it other memory, which a shard's must keep
    plain->load(model);
    reef::StateDict dict;
    for (const auto& item : plain->named_parameters()) dict.insert(item.key(), item.value().detach());
    for (const auto& item : plain->named_buffers()) dict.insert(item.key(), item.value());
    state.sharded->load_state_dict({dict});
    reef::OptimizerState whole;
    optimizer >> whole;
    state.sharded->load_optimizer_state(*state.optimizer, {whole});
  } else {
    state.model->load(model);
    state.optimizer->load(optimizer);
  }
  state.batches.set_state(read_value(archive, "batches").toTensor().cpu());
  state.step = read_value(archive, "step").toInt();
}

}  // namespace bytelm
