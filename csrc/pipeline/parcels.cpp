#include "pipeline/parcels.h"

#include <algorithm>
#include <string>

#include "pipeline/progress.h"
#include "reef/error.h"

namespace reef {
namespace {

using std::to_string;

void check(const PipelineSkip& skip, std::size_t number, std::uint32_t chunks) {
  std::uint32_t before = skip.from;
  bool is_right = !skip.to.empty();
  for (const std::uint32_t to : skip.to) {
    is_right = is_right && to > before && to < chunks;
    before = to;
  }
  if (is_right) return;
  std::string to;
  for (const std::uint32_t each : skip.to) to += " " + to_string(each);
  throw ConfigError("PipelineSkip " + to_string(number) + " is from " + to_string(skip.from) + " to" + to +
                    ", of " + to_string(chunks) +
                    " chunks or stages; give it to one later at least, in ascending order");
}

/// Returns the parcel from one chunk to another.
PipelineParcel& parcel(std::vector<PipelineParcel>& of_chunk, std::uint32_t from, std::uint32_t to) {
  const auto known = std::find_if(of_chunk.begin(), of_chunk.end(),
                                  [&](const PipelineParcel& each) { return each.to == to; });
  return known != of_chunk.end() ? *known : of_chunk.emplace_back(PipelineParcel{from, to, false, {}});
}

void add_to_receivers(const std::vector<std::vector<PipelineParcel>>& made,
                      std::vector<std::vector<PipelineParcel>>& needed) {
  for (const std::vector<PipelineParcel>& of_chunk : made) {
    for (const PipelineParcel& each : of_chunk) needed[each.to].push_back(each);
  }
}

}  // namespace

std::uint32_t chunk_of(std::uint32_t stage, const std::vector<std::uint32_t>& cuts) {
  return static_cast<std::uint32_t>(std::upper_bound(cuts.begin(), cuts.end(), stage) - cuts.begin());
}

PipelineSkip between_chunks(PipelineSkip skip, const std::vector<std::uint32_t>& cuts) {
  skip.from = chunk_of(skip.from, cuts);
  for (std::uint32_t& to : skip.to) to = chunk_of(to, cuts);
  skip.to.erase(std::unique(skip.to.begin(), skip.to.end()), skip.to.end());
  std::erase(skip.to, skip.from);
  return skip;
}

PipelineParcels::PipelineParcels(std::uint32_t chunks, const std::vector<PipelineSkip>& skips)
    : outputs_made_(chunks), outputs_needed_(chunks), gradients_made_(chunks), gradients_needed_(chunks) {
  for (std::uint32_t chunk = 0; chunk + 1 < chunks; ++chunk) {
    outputs_made_[chunk].push_back({chunk, chunk + 1, true, {}});
    gradients_made_[chunk + 1].push_back({chunk + 1, chunk, true, {}});
  }
  for (std::size_t number = 0; number < skips.size(); ++number) {
    const PipelineSkip& skip = skips[number];
    check(skip, number, chunks);
    std::uint32_t before = skip.from;
    for (const std::uint32_t to : skip.to) {
      parcel(outputs_made_[skip.from], skip.from, to).skips.push_back(number);
      parcel(gradients_made_[to], to, before).skips.push_back(number);
      before = to;
    }
  }
  add_to_receivers(outputs_made_, outputs_needed_);
  add_to_receivers(gradients_made_, gradients_needed_);
}

const std::vector<PipelineParcel>& PipelineParcels::of(const PipelineAction& action, const OfChunks& outputs,
                                                       const OfChunks& gradients) const {
  if (action.kind == PipelineAction::Kind::kForward) return outputs[action.chunk];
  return makes_gradient(action.kind) ? gradients[action.chunk] : none_;
}

const std::vector<PipelineParcel>& PipelineParcels::made_by(const PipelineAction& action) const {
  return of(action, outputs_made_, gradients_made_);
}
const std::vector<PipelineParcel>& PipelineParcels::needed_by(const PipelineAction& action) const {
  return of(action, outputs_needed_, gradients_needed_);
}

PipelineMessage message_of(const PipelineSchedule& schedule, const PipelineAction& action,
                           const PipelineParcel& parcel) {
  const bool is_output = action.kind == PipelineAction::Kind::kForward;
  return {is_output ? PipelineMessage::Kind::kOutput : PipelineMessage::Kind::kGradient,
          parcel.from,
          parcel.to,
          action.micro_batch,
          schedule.rank(parcel.from, action.micro_batch),
          schedule.rank(parcel.to, action.micro_batch)};
}

}  // namespace reef
