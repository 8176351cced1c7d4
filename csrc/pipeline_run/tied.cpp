#include "pipeline_run/tied.h"

#include <torch/csrc/autograd/variable.h>
#include <algorithm>
#include <map>
#include <set>

#include "pipeline/parcels.h"
#include "pipeline_run/stages.h"
#include "reef/error.h"

namespace reef {
namespace {

using at::Tensor;

std::map<std::string, Tensor> by_name(const MadeStages& made) {
  std::map<std::string, Tensor> all;
  for (const auto& [number, stage] : made) {
    for (const auto& [name, parameter] : stage.parameters) all.try_emplace(name, parameter);
  }
  return all;
}

}  // namespace

std::vector<TiedNames> find_tied(const MadeStages& made) {
  struct Use {
    Tensor parameter;
    std::set<std::uint32_t> stages;
    TiedNames names;
  };
  std::vector<Use> uses;
  std::map<const c10::TensorImpl*, std::size_t> known;
  std::map<const c10::StorageImpl*, std::size_t> in_memory;
  for (const auto& [number, stage] : made) {
    for (const auto& [name, parameter] : stage.parameters) {
      const auto [at, is_new] = known.try_emplace(parameter.unsafeGetTensorImpl(), uses.size());
      if (is_new) uses.push_back({parameter, {}, {}});
      Use& use = uses[at->second];
      use.stages.insert(number);
      use.names.push_back(name);
      if (!is_new || !parameter.has_storage()) continue;
      const auto [other, is_apart] =
          in_memory.try_emplace(parameter.storage().unsafeGetStorageImpl(), at->second);
      if (is_apart || uses[other->second].stages == use.stages) continue;
      throw ConfigError(
          "reef::Pipeline: parameter " + name + " shares memory with " + uses[other->second].names.front() +
          " of another stage, and is not the same tensor: tie weights by giving both stages the "
          "same parameter.");
    }
  }
  std::vector<TiedNames> tied;
  for (Use& use : uses) {
    if (use.stages.size() > 1) tied.push_back(std::move(use.names));
  }
  return tied;
}

void check_tied(const MadeStages& made, const std::vector<TiedNames>& tied) {
  const auto all = by_name(made);
  for (const TiedNames& names : tied) {
    Tensor one;
    for (const std::string& name : names) {
      const auto own = all.find(name);
      if (own == all.end()) continue;
      if (one.defined() && !one.is_same(own->second)) {
        throw ConfigError("reef::Pipeline: " + name + " is tied to " + names.front() +
                          ", and is another tensor on a rank that has both: give both stages the same "
                          "parameter.");
      }
      one = own->second;
    }
  }
}

std::map<std::string, std::uint32_t> stages_of_names(const NamesOfStages& names) {
  std::map<std::string, std::uint32_t> stage_of;
  for (const auto& [stage, of_stage] : names) {
    for (const std::string& name : of_stage) {
      const auto [known, is_new] = stage_of.emplace(name, stage);
      if (is_new) continue;
      throw ConfigError("reef::Pipeline: " + name + " is the name of a parameter of stage " +
                        std::to_string(known->second) + " and of one of stage " + std::to_string(stage) +
                        ": give each a name of its own, also where stages share one.");
    }
  }
  return stage_of;
}

std::vector<TiedSegment> tied_segments(const std::vector<TiedNames>& tied,
                                       const std::map<std::string, std::uint32_t>& stage_of,
                                       const PipelineSchedule& schedule,
                                       const std::vector<PipelineCuts>& cuts) {
  std::vector<TiedSegment> segments;
  for (TiedNames names : tied) {
    for (const std::string& name : names) {
      if (!stage_of.contains(name))
        throw ConfigError("reef::Pipeline: a tied parameter is named " + name +
                          ", and no stage has one of this name.");
    }
    std::stable_sort(names.begin(), names.end(), [&](const std::string& a, const std::string& b) {
      return stage_of.at(a) < stage_of.at(b);
    });
    const auto replicas = static_cast<std::int64_t>(cuts.size());
    std::set<std::pair<std::int64_t, std::int64_t>> all;  // replicas, and ranks of the group
    std::vector<std::int64_t> of_first;
    bool is_of_one_segment = true;
    for (const std::string& name : names) {
      const std::vector<std::int64_t> ranks = ranks_of_stage(schedule, cuts, stage_of.at(name));
      if (of_first.empty()) of_first = ranks;
      is_of_one_segment = is_of_one_segment && ranks == of_first;
      for (const std::int64_t rank : ranks) all.emplace(rank % replicas, rank);
    }
    if (is_of_one_segment) continue;
    std::vector<std::int64_t> ranks;
    for (const auto& [replica, rank] : all) ranks.push_back(rank);
    auto segment = std::find_if(segments.begin(), segments.end(),
                                [&](const TiedSegment& each) { return each.ranks == ranks; });
    if (segment == segments.end()) segment = segments.insert(segment, {ranks, {}});
    segment->parameters.push_back(std::move(names));
  }
  return segments;
}

std::vector<std::pair<std::string, Tensor>> used_by_several_chunks(
    const std::vector<TiedNames>& tied, const MadeStages& made,
    const std::map<std::string, std::uint32_t>& stage_of, const PipelineCuts& cuts) {
  const auto all = by_name(made);
  std::vector<std::pair<std::string, Tensor>> found;
  for (const TiedNames& names : tied) {
    std::set<std::uint32_t> chunks;
    for (const std::string& name : names) chunks.insert(chunk_of(stage_of.at(name), cuts));
    const auto own =
        std::find_if(names.begin(), names.end(), [&](const std::string& name) { return all.contains(name); });
    if (chunks.size() > 1 && own != names.end()) found.emplace_back(names.front(), all.at(*own));
  }
  return found;
}

void check_no_hooks(const std::vector<std::pair<std::string, Tensor>>& used_by_several) {
  for (const auto& [name, parameter] : used_by_several) {
    if (torch::autograd::impl::hooks(parameter).empty() &&
        !torch::autograd::impl::post_acc_grad_hooks(parameter)) {
      continue;
    }
    throw ConfigError("reef::Pipeline: parameter " + name +
                      " is used in several chunks and has a hook, which would be called with the gradient of "
                      "each chunk's uses and not with their sum: change gradients after step(), or cut the "
                      "model so that one chunk has all uses.");
  }
}

}  // namespace reef
