#include "parameter_server/bring_up.h"

#include <ATen/ops/from_blob.h>

#include <algorithm>
#include <cstddef>
#include <limits>
#include <sstream>
#include <torch/csrc/distributed/c10d/ProcessGroup.hpp>
#include <utility>

#include "distributed/bytes_over_ranks.h"
#include "distributed/group_use.h"
#include "distributed/members.h"
#include "distributed/subgroup_apart.h"
#include "reef/error.h"

namespace reef {
namespace {

using Lines = std::vector<std::string>;

std::string options_line(const AsyncOptions& options) {
  AsyncLog log;
  log.options = options;
  const std::string text = log.text();  // begins with how many workers
  return "options " + text.substr(text.find("servers"), text.find('\n') - text.find("servers"));
}

std::string fault_of(const std::string& name, const at::Tensor& parameter) {
  const std::string what = "AsyncWorker: parameter " + name;
  if (!parameter.defined() || parameter.layout() != at::kStrided || parameter.is_meta())
    return what + " is not dense, or has no values.";
  if (parameter.scalar_type() != at::kFloat)
    return what + " is of " + c10::toString(parameter.scalar_type()) +
           ": what travels is Float; convert the module, or let it require no gradient.";
  return "";
}

/// What is wrong on this rank, or "", then what it is, and what must be alike.
Lines own_lines(const ProcessGroupPtr& group, const AsyncOptions& options,
                const AsyncWorker::Named* parameters) {
  const int rank = group->getRank();
  Lines lines = {"", parameters == nullptr ? "server" : "worker", options_line(options)};
  try {
    check_async_options(options, group->getSize() - options.servers);
  } catch (const ConfigError& error) {
    lines.front() = message_of(error);
  }
  if (lines.front().empty() && (parameters == nullptr) != (rank < options.servers)) {
    lines.front() = "rank " + std::to_string(rank) + " has made " +
                    (parameters == nullptr ? "a ParameterServer" : "an AsyncWorker") + ", and ranks 0 to " +
                    std::to_string(options.servers - 1) +
                    " are the servers, all others workers: make what the rank says.";
  }
  if (parameters == nullptr) return lines;
  for (const auto& [name, parameter] : *parameters) {
    if (lines.front().empty()) lines.front() = fault_of(name, parameter);
    if (!lines.front().empty()) break;
    std::ostringstream line;
    line << "parameter " << name << " of Float " << parameter.sizes() << ", elements " << parameter.numel();
    lines.push_back(line.str());
  }
  if (lines.front().empty() && parameters->empty())
    lines.front() = "AsyncWorker was given a module without a parameter that requires a gradient.";
  return lines;
}

std::vector<Lines> exchanged(const ProcessGroupPtr& group, const Lines& own) {
  std::string text;
  for (const std::string& line : own) text += line + "\n";
  const at::Tensor bytes = at::from_blob(text.data(), {static_cast<std::int64_t>(text.size())}, at::kByte);
  std::vector<Lines> all;
  for (const at::Tensor& each : gather_bytes(bytes, group, c10::kCPU)) {
    std::istringstream stream(
        std::string(static_cast<const char*>(each.const_data_ptr()), static_cast<std::size_t>(each.numel())));
    Lines& lines = all.emplace_back();
    for (std::string line; std::getline(stream, line);) lines.push_back(line);
  }
  return all;
}

/// Of the first worker's lines.
ShardLayout layout_of(const Lines& lines, int servers) {
  std::vector<ShardItem> items;
  for (std::size_t i = 3; i < lines.size(); ++i)
    items.push_back({std::stoll(lines[i].substr(lines[i].rfind(' ') + 1)), 4, 0});
  return plan_shards(items, servers, std::numeric_limits<std::int64_t>::max());
}

/// All say the same sentence of the first rank that is wrong, or of the first difference.
void agree(const std::vector<Lines>& all, int servers) {
  for (std::size_t rank = 0; rank < all.size(); ++rank) {
    if (!all[rank].front().empty())
      throw ConfigError("rank " + std::to_string(rank) + ": " + all[rank].front());
  }
  const auto refuse = [](const std::string& one, std::size_t first, const std::string& other,
                         std::size_t rank) {
    throw ConfigError("asynchronous training was given " + one + " on rank " + std::to_string(first) +
                      ", and " + other + " on rank " + std::to_string(rank) +
                      ": give the same on all ranks.");
  };
  for (std::size_t rank = 1; rank < all.size(); ++rank) {
    if (all[rank][2] != all.front()[2]) refuse(all.front()[2], 0, all[rank][2], rank);
  }
  const auto first = static_cast<std::size_t>(servers);
  for (std::size_t rank = first + 1; rank < all.size(); ++rank) {
    for (std::size_t i = 3; i < std::max(all[first].size(), all[rank].size()); ++i) {
      const auto line = [&](const Lines& of) { return i < of.size() ? of[i] : "no more parameters"; };
      if (line(all[first]) != line(all[rank])) refuse(line(all[first]), first, line(all[rank]), rank);
    }
  }
}

}  // namespace

AsyncPlan bring_up_async(const ProcessGroupPtr& group, const AsyncOptions& options,
                         const AsyncWorker::Named* parameters) {
  if (!group)
    throw ConfigError(
        "asynchronous training was given no process group: make one with reef::init_process_group.");
  note_call(*group, "asynchronous training");
  const std::vector<Lines> all = exchanged(group, own_lines(group, options, parameters));
  agree(all, options.servers);
  AsyncPlan plan{options,
                 group->getSize() - options.servers,
                 layout_of(all[static_cast<std::size_t>(options.servers)], options.servers),
                 {}};
  for (int server = 0; server < options.servers; ++server) {
    for (int worker = 0; worker < plan.workers; ++worker) {
      if (const auto pair = subgroup_apart(group, {server, plan.rank_of_worker(worker)}))
        plan.pairs.push_back(GroupUse::of(pair));
    }
  }
  return plan;
}

}  // namespace reef
