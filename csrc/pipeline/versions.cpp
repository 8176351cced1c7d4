#include "reef/pipeline_versions.h"

#include <algorithm>
#include <cmath>
#include <map>
#include <string>
#include <utility>

#include "pipeline/progress.h"
#include "reef/error.h"

namespace reef {
namespace {

using Kind = PipelineAction::Kind;
using Rule = PipelineVersionRule::Kind;
using std::to_string;

/// Subtracts, but not below 0.
std::uint32_t minus(std::uint32_t count, std::uint32_t less) { return count - std::min(count, less); }

/// The number of updates that each chunk has had when it begins a pass, for each micro-batch.
using UpdatesBefore = std::vector<std::vector<PipelineVersion>>;

UpdatesBefore updates_before(const PipelineSchedule& schedule) {
  UpdatesBefore before(schedule.chunks(), std::vector<PipelineVersion>(schedule.micro_batches));
  for (const std::vector<PipelineAction>& actions : schedule.actions) {
    std::vector<std::uint32_t> updates(schedule.chunks());
    for (const auto& [kind, chunk, micro_batch] : actions) {
      if (kind == Kind::kForward) before[chunk][micro_batch].forward = updates[chunk];
      if (makes_gradient(kind)) before[chunk][micro_batch].backward = updates[chunk];
      if (kind == Kind::kUpdate) ++updates[chunk];
    }
  }
  return before;
}

PipelineVersion version_of(const PipelineSchedule& schedule, const UpdatesBefore& before, std::uint32_t chunk,
                           std::uint32_t micro_batch) {
  const PipelineVersion newest = before[chunk][micro_batch];
  const PipelineVersionRule& rule = schedule.versions;
  const auto both = [](std::uint32_t version) { return PipelineVersion{version, version, 0}; };
  switch (rule.kind) {
    case Rule::kFlush:
      return {};
    case Rule::kStash:
      return both(newest.forward);
    case Rule::kVertical:
      return both(before.front()[micro_batch].forward);
    case Rule::kTwoBuffers:
      return both(minus(micro_batch / rule.micro_batches_per_update, 1));
    case Rule::kNewest:
      return newest;
    case Rule::kWave: {
      PipelineVersion version = both(minus(micro_batch + 1, rule.micro_batches_per_update));
      version.others_waves = minus(version.forward / rule.micro_batches_per_update, rule.staleness);
      return version;
    }
  }
  return {};
}

void check_exists(const PipelineSchedule& schedule, const PipelineVersion& wanted,
                  const PipelineVersion& newest, std::uint32_t chunk, std::uint32_t micro_batch) {
  if (wanted.forward <= newest.forward && wanted.backward <= newest.backward) return;
  throw ConfigError("PipelineSchedule '" + schedule.name + "': chunk " + to_string(chunk) +
                    " needs its weights after update " + to_string(wanted.forward) + " for micro-batch " +
                    to_string(micro_batch) + ", and has had only " + to_string(newest.forward) +
                    " updates by then; give more micro-batches per update, or less depth");
}

/// Counts versions that a chunk's rank has to hold: those that there are and that later passes need, and the
/// newest.
std::uint32_t most_alive(const PipelineSchedule& schedule, const std::vector<PipelineVersion>& versions,
                         std::uint32_t chunk) {
  std::map<std::uint32_t, std::uint32_t> uses;  // of each version, by micro-batches that are not done
  for (const PipelineVersion& version : versions) ++uses[version.backward];
  std::size_t held = 1, most = 1;  // of those that are not newer than the newest
  std::uint32_t updates = 0;
  for (const auto& [kind, of, micro_batch] : schedule.actions[schedule.rank(chunk, 0)]) {
    if (of != chunk) continue;
    const std::uint32_t version = versions[micro_batch].backward;
    if (makes_weight_gradients(kind) && --uses[version] == 0) {
      uses.erase(version);
      if (version != updates) --held;
    }
    if (kind == Kind::kUpdate) {
      if (uses.contains(updates)) ++held;
      ++updates;
    }
    most = std::max(most, held);
  }
  return static_cast<std::uint32_t>(most);
}

}  // namespace

std::vector<double> pipeline_delays(const PipelineSchedule& schedule) {
  const PipelineVersions versions = pipeline_versions(schedule);
  std::vector<double> delays(schedule.chunks());
  for (const std::vector<PipelineAction>& actions : schedule.actions) {
    std::map<std::uint32_t, std::vector<std::uint32_t>> since_update;  // forward versions, of each chunk
    std::map<std::uint32_t, std::uint32_t> updates;
    for (const auto& [kind, chunk, micro_batch] : actions) {
      if (makes_weight_gradients(kind))
        since_update[chunk].push_back(versions.of[chunk][micro_batch].forward);
      if (kind != Kind::kUpdate) continue;
      double sum = 0;
      const std::vector<std::uint32_t> used = std::exchange(since_update[chunk], {});
      for (const std::uint32_t version : used) sum += updates[chunk] - version;
      if (!used.empty()) delays[chunk] = sum / static_cast<double>(used.size());
      ++updates[chunk];
    }
    for (const auto& [chunk, used] : since_update) {
      if (updates[chunk] > 0) continue;
      throw ConfigError("PipelineSchedule '" + schedule.name + "': chunk " + to_string(chunk) +
                        " has no update, so no delay; take what is asynchronous, or with_updates()");
    }
  }
  return delays;
}

double pipemare_rate(double delay, std::uint64_t update, std::uint64_t annealing_updates) {
  const double part =
      annealing_updates == 0 ? 1 : static_cast<double>(update) / static_cast<double>(annealing_updates);
  return std::pow(std::max(delay, 1.0), std::min(part, 1.0) - 1);
}

PipelineVersions pipeline_versions(const PipelineSchedule& schedule) {
  check(schedule);
  const Rule rule = schedule.versions.kind;
  if (rule != Rule::kFlush && schedule.rank_of.size() > 1)
    throw ConfigError(
        "PipelineSchedule '" + schedule.name +
        "': a rule of versions is for one direction; with two, each rank has two chunks' weights");
  if (schedule.versions.micro_batches_per_update == 0)
    throw ConfigError("PipelineSchedule '" + schedule.name + "': an update is of at least one micro-batch");
  const UpdatesBefore before = updates_before(schedule);
  PipelineVersions versions;
  for (std::uint32_t chunk = 0; chunk < schedule.chunks(); ++chunk) {
    std::vector<PipelineVersion>& of_chunk = versions.of.emplace_back();
    for (std::uint32_t m = 0; m < schedule.micro_batches; ++m) {
      of_chunk.push_back(version_of(schedule, before, chunk, m));
      check_exists(schedule, of_chunk.back(), before[chunk][m], chunk, m);
    }
    // What uses the newest weights at each pass keeps no others.
    const bool keeps = rule != Rule::kFlush && rule != Rule::kNewest;
    versions.most_alive.push_back(keeps ? most_alive(schedule, of_chunk, chunk) : 1);
  }
  return versions;
}

}  // namespace reef
