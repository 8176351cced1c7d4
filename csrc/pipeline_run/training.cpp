#include "pipeline_run/training.h"

#include <algorithm>
#include <set>
#include <torch/csrc/distributed/c10d/ProcessGroup.hpp>
#include <utility>

#include "distributed/bytes_over_ranks.h"

namespace reef {

using at::Tensor;
using Kind = PipelineAction::Kind;
using Rule = PipelineVersionRule::Kind;

PipelineTraining::PipelineTraining(std::map<std::uint32_t, PipelineChunk>& chunks,
                                   PipelineParameters& parameters, const PipelineSchedule& schedule,
                                   Options options)
    : chunks_(chunks), parameters_(parameters), options_(std::move(options)) {
  const PipelineVersions versions = pipeline_versions(schedule);
  const bool in_place = schedule.versions.kind == Rule::kNewest;
  const bool in_waves = schedule.versions.kind == Rule::kWave && options_.replicas > 1;
  wave_ = in_waves ? schedule.versions.micro_batches_per_update : 0;
  for (auto& [number, chunk] : chunks_) {
    const std::vector<PipelineAction>& actions = schedule.actions[schedule.rank(number, 0)];
    const bool splits = std::any_of(actions.begin(), actions.end(), [of = number](const auto& action) {
      return action.chunk == of && action.kind == Kind::kWeight;
    });
    const auto [made, is_new] =
        weights_.try_emplace(number, chunk.trained(), versions.of[number], splits ? 2 : 1, in_place);
    if (in_place && options_.correction_decay > 0)
      made->second.correct(pipeline_delays(schedule)[number], options_.correction_decay);
    if (wave_ > 0) add_waves(number, schedule);
  }
  for (auto& [number, chunk] : chunks_) chunk.use(&weights_.at(number));
}

void PipelineTraining::add_waves(std::uint32_t chunk, const PipelineSchedule& schedule) {
  for (PipelineParameters::Shared& shared : parameters_.shared(chunk)) {
    waves_[chunk].emplace_back(
        std::move(shared.parameters), shared.ranks,
        PipelineWaves::Rule{schedule.micro_batches / wave_, schedule.versions.staleness});
  }
}

PipelineTraining::~PipelineTraining() {
  for (auto& [number, chunk] : chunks_) {
    chunk.use(nullptr);
    weights_.at(number).settle();
  }
}

void PipelineTraining::at_end_of_wave(
    std::uint32_t chunk, std::uint32_t micro_batch,
    const std::function<void(PipelineWaves& waves, std::uint32_t wave)>& visit) {
  if (wave_ == 0 || (micro_batch + 1) % wave_ != 0) return;
  for (PipelineWaves& waves : waves_[chunk]) visit(waves, micro_batch / wave_);
}

void PipelineTraining::update(std::uint32_t chunk, std::uint32_t micro_batch) {
  std::vector<std::pair<Tensor, Tensor>> of_others;
  for (const auto& [number, weights] : weights_) {
    for (const Tensor& parameter : weights.parameters()) {
      Tensor& gradient = parameter.mutable_grad();
      if (number != chunk) of_others.emplace_back(parameter, std::exchange(gradient, {}));
    }
  }
  PipelineWeights& weights = weights_.at(chunk);
  if (wave_ == 0) parameters_.reduce(chunk);
  const std::uint32_t count = micro_batch + 1 - std::exchange(updated_[chunk], micro_batch + 1);
  const std::int64_t divisor = std::int64_t{count} * (wave_ == 0 ? options_.replicas : 1);
  for (const Tensor& parameter : weights.parameters()) {
    if (options_.divides && divisor > 1 && parameter.grad().defined()) parameter.mutable_grad().div_(divisor);
  }
  try {
    weights.update(options_.update);
    at_end_of_wave(chunk, micro_batch, [](PipelineWaves& waves, std::uint32_t wave) { waves.end(wave); });
  } catch (...) {
    at_end_of_wave(chunk, micro_batch, [](PipelineWaves& waves, std::uint32_t wave) { waves.leave(wave); });
    throw;
  }
  for (const Tensor& parameter : weights.parameters()) parameter.mutable_grad().reset();
  for (const auto& [parameter, gradient] : of_others) parameter.mutable_grad() = gradient;
}

void PipelineTraining::leave(std::uint32_t chunk, std::uint32_t micro_batch,
                             const std::string& why) noexcept {
  if (wave_ == 0) parameters_.abandon(chunk, why);
  at_end_of_wave(chunk, micro_batch, [](PipelineWaves& waves, std::uint32_t wave) { waves.leave(wave); });
}

std::string PipelineTraining::updates() const {
  std::string lines;
  for (const auto& [number, weights] : weights_) {
    lines += "chunk " + std::to_string(number) + " has had " + std::to_string(weights.updates()) +
             (weights.updates() == 1 ? " update\n" : " updates\n");
  }
  return lines;
}

std::string PipelineTraining::uneven(const std::vector<std::string>& of_all) const {
  std::set<std::string> numbers;
  if (wave_ > 0) numbers.insert("has had 0 updates");  // any update is of one worker alone
  std::string sentence;
  for (const std::string& lines : of_all) {
    for (const std::string& line : lines_of(lines)) {
      numbers.insert(line.substr(line.find("has had")));
      sentence += (sentence.empty() ? "" : ", ") + line;
    }
  }
  return numbers.size() > 1 ? sentence : "";
}

}  // namespace reef
