#include "pipeline_run/parameters.h"

#include <ATen/core/grad_mode.h>

#include <algorithm>
#include <torch/csrc/distributed/c10d/ProcessGroup.hpp>

#include "clip_grad_norm.h"
#include "distributed/bytes_over_ranks.h"
#include "reef/error.h"
#include "reef/part.h"
#include "reef/subgroup.h"

namespace reef {
namespace {

using at::Tensor;
using Named = PipelineParameters::Named;

/// Adds those that are not there yet: stages may share parameters.
void add_new(const Named& given, Named& all) {
  for (const auto& each : given) {
    const auto is_same = [&](const auto& known) { return known.second.is_same(each.second); };
    if (std::none_of(all.begin(), all.end(), is_same)) all.push_back(each);
  }
}

/// Throws ConfigError on every rank if one of them has failed; there, what it has failed with.
void agree(const std::exception_ptr& failed, const std::string& why, const ProcessGroupPtr& group) {
  const std::vector<std::string> all = gather_texts(why, group, c10::kCPU);
  if (failed) std::rethrow_exception(failed);
  for (std::size_t rank = 0; rank < all.size(); ++rank) {
    if (!all[rank].empty()) throw ConfigError("rank " + std::to_string(rank) + ": " + all[rank]);
  }
}

}  // namespace

PipelineParameters::PipelineParameters(const std::vector<PipelineSegment>& segments,
                                       const std::map<std::uint32_t, OfChunk>& own,
                                       const ProcessGroupPtr& group, ShardOptions options, bool in_one_order)
    : group_(group) {
  options.reduction = Reduction::kSum;
  const bool keeps_others = options.stage != Stage::kReplicate || options.mixed_precision || options.offload;
  const bool shards = keeps_others || segments.front().ranks.size() > 1;
  std::vector<ProcessGroupPtr> groups;
  for (const PipelineSegment& each : segments) {
    ProcessGroupPtr ranks;
    if (shards) {
      const bool is_whole = each.ranks.size() == static_cast<std::size_t>(group->getSize());
      ranks = is_whole ? group : subgroup(group, each.ranks);
    }
    if (!std::binary_search(each.ranks.begin(), each.ranks.end(), group->getRank())) continue;
    Segment& segment = segments_.emplace_back();
    segment.ranks = each.ranks;
    groups.push_back(ranks);
    for (const std::uint32_t chunk : each.chunks) {
      add_new(own.at(chunk).parameters, segment.parameters);
      add_new(own.at(chunk).buffers, segment.buffers);
    }
  }
  if (shards) {
    std::exception_ptr failed;
    std::string why;
    try {
      for (std::size_t i = 0; i < segments_.size(); ++i)
        shard(segments_[i], groups[i], options, in_one_order);
    } catch (const ConfigError& error) {
      failed = std::current_exception();
      why = message_of(error);
    }
    agree(failed, why, group);
  }
  for (const Segment& segment : segments_) {
    if (!segment.shard) {
      stepped_.insert(stepped_.end(), segment.parameters.begin(), segment.parameters.end());
      continue;
    }
    const std::vector<Tensor>& parameters = segment.shard->parameters();
    for (std::size_t i = 0; i < parameters.size(); ++i)
      stepped_.emplace_back(segment.shard->names()[i], parameters[i]);
  }
}

void PipelineParameters::shard(Segment& segment, const ProcessGroupPtr& ranks, const ShardOptions& options,
                               bool in_one_order) const {
  const bool trains = std::any_of(segment.parameters.begin(), segment.parameters.end(),
                                  [](const auto& each) { return each.second.requires_grad(); });
  segment.shard.emplace(segment.parameters, segment.buffers, ranks, options);
  if (trains) segment.sums.emplace(*segment.shard, in_one_order);
}

double PipelineParameters::clip_grad_norm_(double max_norm) {
  std::vector<GradientInNorm> gradients;
  for (const Segment& segment : segments_) {
    const bool is_first = segment.ranks.front() == group_->getRank();
    const auto add = [&](const Tensor& tensor) {
      const std::optional<Part> part = part_of(tensor);
      gradients.push_back({tensor, (part ? part->copy == 0 : is_first) ? GradientInNorm::Counts::kHere
                                                                       : GradientInNorm::Counts::kElsewhere});
    };
    if (segment.shard) {
      for (const Tensor& parameter : segment.shard->parameters()) add(parameter);
    } else {
      for (const auto& [name, parameter] : segment.parameters) add(parameter);
    }
  }
  return reef::clip_grad_norm_(gradients, max_norm, group_, /*device=*/c10::kCPU);
}

void PipelineParameters::clear_gradients() {
  for (Segment& segment : segments_) {
    if (segment.shard) segment.shard->clear_gradients();
  }
}

void PipelineParameters::use() {
  for (Segment& segment : segments_) {
    if (segment.sums) segment.sums->use_parameters();
  }
}

void PipelineParameters::check() const {
  for (const Segment& segment : segments_) {
    if (segment.sums) segment.sums->check();
  }
}

std::function<void()> PipelineParameters::while_waiting() {
  std::vector<SumsWhenAsked*> asked;
  for (Segment& segment : segments_) {
    if (segment.sums && segment.sums->answer()) asked.push_back(&*segment.sums);
  }
  if (asked.empty()) return {};
  return [asked] {
    for (SumsWhenAsked* const each : asked) each->answer();
  };
}

void PipelineParameters::tell_failed() {
  for (Segment& segment : segments_) {
    if (segment.sums) segment.sums->tell_failed();
  }
}

void PipelineParameters::leave_out() {
  for (Segment& segment : segments_) {
    if (segment.sums) segment.sums->leave_out();
  }
}

PipelineParameters::OfCall::OfCall(PipelineParameters& parameters) : parameters_(parameters) {
  parameters.clear_gradients();
  for (const auto& [name, parameter] : parameters.stepped_) set_aside(parameter, stepped_);
  for (const Segment& segment : parameters.segments_) {
    if (!segment.sums || !segment.sums->has_parts()) continue;
    for (const auto& [name, parameter] : segment.parameters) set_aside(parameter, modules_);
  }
}

void PipelineParameters::OfCall::set_aside(const Tensor& tensor, Aside& to) {
  to.emplace_back(tensor, tensor.grad());
  tensor.mutable_grad().reset();
}

PipelineParameters::OfCall::~OfCall() {
  for (const Aside* const aside : {&stepped_, &modules_}) {
    for (const auto& [tensor, before] : *aside) tensor.mutable_grad() = before;
  }
}

void PipelineParameters::OfCall::add(std::int64_t divisor) {
  const at::NoGradGuard no_grad;
  for (Segment& segment : parameters_.segments_) {
    if (segment.sums) segment.sums->reduce();
  }
  for (auto& [tensor, before] : stepped_) {
    Tensor& made = tensor.mutable_grad();
    if (!made.defined()) continue;
    if (divisor != 1) made.div_(divisor);
    before = before.defined() ? before.add_(made) : made;
  }
  for (auto& [tensor, before] : modules_) {  // what stands for gradients of parts
    if (tensor.grad().defined()) before = tensor.grad();
  }
}

}  // namespace reef
