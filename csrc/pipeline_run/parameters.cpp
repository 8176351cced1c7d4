#include "pipeline_run/parameters.h"

#include <ATen/core/grad_mode.h>

#include <algorithm>
#include <torch/csrc/distributed/c10d/ProcessGroup.hpp>

#include "reef/part.h"
#include "reef/subgroup.h"
#include "shard/together.h"

namespace reef {
namespace {

using at::Tensor;
using Named = PipelineParameters::Named;

/// Those that stages share, once.
Named without_repetition(const Named& given) {
  Named once;
  for (const auto& each : given) {
    const auto is_same = [&](const auto& known) { return known.second.is_same(each.second); };
    if (std::none_of(once.begin(), once.end(), is_same)) once.push_back(each);
  }
  return once;
}

void append(const Named& more, Named& to) { to.insert(to.end(), more.begin(), more.end()); }

}  // namespace

bool PipelineParameters::Segment::is_here(int rank) const {
  return std::find(place.ranks.begin(), place.ranks.end(), rank) != place.ranks.end();
}
bool PipelineParameters::Segment::has_some_of(std::uint32_t chunk) const {
  return std::any_of(stages.begin(), stages.end(),
                     [&](const OfStage& stage) { return stage.chunk == chunk; });
}
Named PipelineParameters::Segment::all_parameters() const {
  Named all;
  for (const OfStage& stage : stages) append(stage.parameters, all);
  return all;
}
Named PipelineParameters::Segment::all_buffers() const {
  Named all;
  for (const OfStage& stage : stages) append(stage.buffers_now(), all);
  return all;
}

PipelineParameters::PipelineParameters(std::vector<PipelineSegment> segments, std::vector<TiedSegment> tied,
                                       std::vector<OfStage> own, ProcessGroupPtr group,
                                       const ShardOptions& options, bool in_one_order)
    : group_(std::move(group)),
      keeps_others_(options.stage != Stage::kReplicate || options.mixed_precision || options.offload),
      tied_(std::move(tied)) {
  for (const OfStage& stage : own) {
    for (const auto& [name, parameter] : stage.parameters) names_.emplace_back(stage.number, name);
    for (const auto& [name, buffer] : stage.buffers_now()) names_.emplace_back(stage.number, name);
  }
  std::deque<Segment> of_tied;
  for (const TiedSegment& each : tied_) {
    Segment& segment = of_tied.emplace_back(Segment{{{}, each.ranks}, /*in_one_order=*/false});
    for (const TiedNames& names : each.parameters) take_out(names, own, segment.stages);
  }
  for (PipelineSegment& each : segments) {
    Segment& segment = segments_.emplace_back(Segment{std::move(each), in_one_order});
    if (!segment.is_here(group_->getRank())) continue;
    const std::vector<std::uint32_t>& numbers = segment.place.stages;
    std::copy_if(own.begin(), own.end(), std::back_inserter(segment.stages), [&](const OfStage& stage) {
      return std::binary_search(numbers.begin(), numbers.end(), stage.number);
    });
  }
  for (Segment& each : of_tied) segments_.push_back(std::move(each));
  make_shards(options,
              [&](const Segment& segment) { return keeps_others_ || segment.place.ranks.size() > 1; });
  for (const Segment& segment : segments_) {
    if (!segment.shard) {
      append(without_repetition(segment.all_parameters()), stepped_);
      continue;
    }
    const std::vector<Tensor>& parameters = segment.shard->parameters();
    for (std::size_t i = 0; i < parameters.size(); ++i)
      stepped_.emplace_back(segment.shard->names()[i], parameters[i]);
  }
  if (group_->getSize() == 1) return;
  for (const auto& [name, parameter] : stepped_) of_one_rank_.add(parameter);
}

/// Moves a parameter, which this rank's stages have under some of the names or not at all, to a stage of its
/// own.
void PipelineParameters::take_out(const TiedNames& names, std::vector<OfStage>& from,
                                  std::vector<OfStage>& to) {
  Named found;
  for (OfStage& stage : from) {
    std::erase_if(stage.parameters, [&](const auto& each) {
      const bool is_it = std::find(names.begin(), names.end(), each.first) != names.end();
      if (is_it) found = {{names.front(), each.second}};
      return is_it;
    });
  }
  if (!found.empty()) to.push_back({0, 0, found, {}});
}

void PipelineParameters::make_shards(const ShardOptions& given,
                                     const std::function<bool(const Segment&)>& is_wanted) {
  ShardOptions options = given;
  options.reduction = Reduction::kSum;
  if (std::none_of(segments_.begin(), segments_.end(), is_wanted)) return;
  Together together(group_, c10::kCPU);
  for (Segment& segment : segments_) {
    if (!is_wanted(segment)) continue;
    const bool is_whole = segment.place.ranks.size() == static_cast<std::size_t>(group_->getSize()) &&
                          std::is_sorted(segment.place.ranks.begin(), segment.place.ranks.end());
    const ProcessGroupPtr ranks = is_whole ? group_ : subgroup(group_, segment.place.ranks);
    if (!segment.is_here(group_->getRank())) continue;
    segment.ranks = ranks;
    together.here_in_any_case([&] {
      const Named parameters = segment.all_parameters();
      segment.shard.emplace(parameters, segment.all_buffers(), ranks, options,
                            Shard::ModuleNow{{}, [&segment] { return segment.all_buffers(); }});
      const bool trains = std::any_of(parameters.begin(), parameters.end(),
                                      [](const auto& each) { return each.second.requires_grad(); });
      if (trains) segment.sums.emplace(*segment.shard, segment.in_one_order);
    });
  }
  together.agree();
}

PipelineState& PipelineParameters::state() {
  if (state_) return *state_;
  make_shards({}, [&](const Segment& segment) { return !keeps_others_ && segment.place.ranks.size() == 1; });
  std::vector<PipelineState::Segment> segments;
  for (Segment& segment : segments_) {
    PipelineState::Segment& own = segments.emplace_back();
    own.first_rank = segment.place.ranks.front();
    if (!segment.shard) continue;
    own.shard = &*segment.shard;
    Named all = segment.all_parameters();
    append(segment.all_buffers(), all);
    for (const auto& [name, tensor] : all) {
      own.names.insert(name);
      if (tensor.requires_grad()) own.trained.insert(name);
    }
  }
  std::map<std::string, std::string> aliases;
  for (const TiedSegment& segment : tied_) {
    for (const TiedNames& names : segment.parameters) {
      for (std::size_t i = 1; i < names.size(); ++i) aliases[names[i]] = names.front();
    }
  }
  state_ = std::make_unique<PipelineState>(group_, std::move(segments), names_, std::move(aliases));
  return *state_;
}

StateDict PipelineParameters::sharded_state_dict() const {
  StateDict all;
  for (const Segment& segment : segments_) {
    if (segment.shard) {
      for (const auto& entry : segment.shard->sharded_state_dict()) all.insert(entry.key(), entry.value());
      continue;
    }
    for (const auto& [name, tensor] : segment.all_parameters()) all.insert(name, tensor.detach());
    for (const auto& [name, tensor] : segment.all_buffers()) all.insert(name, tensor.detach());
  }
  return all;
}

bool PipelineParameters::steps_chunks() const { return tied_.empty() && !keeps_others_; }

std::vector<PipelineParameters::Segment*> PipelineParameters::segments_of(std::uint32_t chunk) {
  std::vector<Segment*> found;
  for (auto segment = segments_.rbegin(); segment != segments_.rend(); ++segment) {
    if (segment->has_some_of(chunk)) found.push_back(&*segment);
  }
  return found;
}

void PipelineParameters::reduce(std::uint32_t chunk) {
  for (Segment* const segment : segments_of(chunk)) {
    if (segment->reduces()) segment->sums->reduce();
  }
}

void PipelineParameters::abandon(std::uint32_t chunk, const std::string& why) noexcept {
  for (Segment* const segment : segments_of(chunk)) {
    if (segment->reduces()) segment->sums->abandon(why);
  }
}

std::vector<PipelineParameters::Shared> PipelineParameters::shared(std::uint32_t chunk) {
  std::vector<Shared> all;
  for (const Segment* const segment : segments_of(chunk)) {
    if (!segment->reduces()) continue;
    Named named;
    for (const OfStage& stage : segment->stages) {
      if (stage.chunk == chunk) append(stage.parameters, named);
    }
    Shared& shared = all.emplace_back(Shared{{}, segment->ranks});
    for (const auto& [name, parameter] : without_repetition(named)) {
      if (parameter.requires_grad()) shared.parameters.push_back(parameter);
    }
  }
  return all;
}

std::int64_t PipelineParameters::sent_bytes() const {
  std::int64_t bytes = 0;
  for (const Segment& segment : segments_) bytes += segment.shard ? segment.shard->sent_bytes() : 0;
  return bytes;
}

double PipelineParameters::clip_grad_norm_(double max_norm) {
  std::vector<GradientInNorm> gradients;
  for (const Segment& segment : segments_) {
    const bool is_first = segment.place.ranks.front() == group_->getRank();
    const auto add = [&](const Tensor& tensor) {
      const std::optional<Part> part = part_of(tensor);
      gradients.push_back({tensor, (part ? part->copy == 0 : is_first) ? GradientInNorm::Counts::kHere
                                                                       : GradientInNorm::Counts::kElsewhere});
    };
    if (segment.shard) {
      for (const Tensor& parameter : segment.shard->parameters()) add(parameter);
    } else {
      for (const auto& [name, parameter] : without_repetition(segment.all_parameters())) add(parameter);
    }
  }
  return reef::clip_grad_norm_(gradients, max_norm, group_, /*device=*/c10::kCPU);
}

void PipelineParameters::clear_gradients() {
  for (Segment& segment : segments_) {
    if (segment.shard) segment.shard->clear_gradients();
  }
}

void PipelineParameters::drop_gradients() {
  clear_gradients();
  for (const auto& [name, parameter] : stepped_) parameter.mutable_grad().reset();
  for (const Segment& segment : segments_) {
    for (const auto& [name, parameter] : segment.all_parameters()) parameter.mutable_grad().reset();
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

void PipelineParameters::settle() {
  for (Segment& segment : segments_) {
    if (segment.sums) segment.sums->settle();
  }
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
    for (const auto& [name, parameter] : without_repetition(segment.all_parameters()))
      set_aside(parameter, modules_);
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
    if (segment.reduces()) segment.sums->reduce();
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
