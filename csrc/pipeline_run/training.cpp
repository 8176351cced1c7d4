#include "pipeline_run/training.h"

#include <algorithm>
#include <set>
#include <utility>
#include <vector>

#include "distributed/bytes_over_ranks.h"

namespace reef {

using at::Tensor;
using Kind = PipelineAction::Kind;

PipelineTraining::PipelineTraining(std::map<std::uint32_t, PipelineChunk>& chunks,
                                   const PipelineSchedule& schedule, Update update)
    : chunks_(chunks), update_(std::move(update)) {
  const PipelineVersions versions = pipeline_versions(schedule);
  const bool in_place = schedule.versions.kind == PipelineVersionRule::Kind::kNewest;
  for (auto& [number, chunk] : chunks_) {
    const std::vector<PipelineAction>& actions = schedule.actions[schedule.rank(number, 0)];
    const bool splits = std::any_of(actions.begin(), actions.end(), [of = number](const auto& action) {
      return action.chunk == of && action.kind == Kind::kWeight;
    });
    const auto [made, is_new] =
        weights_.try_emplace(number, chunk.trained(), versions.of[number], splits ? 2 : 1, in_place);
    if (in_place && update_.correction_decay > 0)
      made->second.correct(pipeline_delays(schedule)[number], update_.correction_decay);
    chunk.use(&made->second);
  }
}

PipelineTraining::~PipelineTraining() {
  for (auto& [number, chunk] : chunks_) {
    chunk.use(nullptr);
    weights_.at(number).settle();
  }
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
  update_.reduce(chunk);
  const std::uint32_t count = micro_batch + 1 - std::exchange(updated_[chunk], micro_batch + 1);
  const std::int64_t divisor = std::int64_t{update_.divisor} * count;
  for (const Tensor& parameter : weights.parameters()) {
    if (divisor > 1 && parameter.grad().defined()) parameter.mutable_grad().div_(divisor);
  }
  weights.update(update_.step);
  for (const Tensor& parameter : weights.parameters()) parameter.mutable_grad().reset();
  for (const auto& [parameter, gradient] : of_others) parameter.mutable_grad() = gradient;
}

std::string PipelineTraining::updates() const {
  std::string lines;
  for (const auto& [number, weights] : weights_) {
    lines += "chunk " + std::to_string(number) + " has had " + std::to_string(weights.updates()) +
             (weights.updates() == 1 ? " update\n" : " updates\n");
  }
  return lines;
}

std::string uneven_updates(const std::vector<std::string>& updates) {
  std::set<std::string> numbers;
  std::string sentence;
  for (const std::string& lines : updates) {
    for (const std::string& line : lines_of(lines)) {
      numbers.insert(line.substr(line.find("has had")));
      sentence += (sentence.empty() ? "" : ", ") + line;
    }
  }
  return numbers.size() > 1 ? sentence : "";
}

}  // namespace reef
