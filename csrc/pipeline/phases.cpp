#include "pipeline/phases.h"

#include <algorithm>
#include <array>
#include <cstddef>
#include <deque>
#include <utility>

namespace reef {

std::vector<PipelineAction> actions_of(const std::vector<PipelinePhase>& phases,
                                       const PassOfStream& pass_of) {
  constexpr std::uint32_t kStreams = 2;
  PipelineActions actions;
  std::array<std::uint32_t, kStreams> forwards{}, backwards{};
  std::deque<std::pair<std::uint32_t, PipelineTurn>> waiting;  // streams, and passes that need a W
  const auto weight = [&](std::uint32_t stream) {
    const auto found = std::find_if(waiting.begin(), waiting.end(), [&](const auto& each) {
      return stream == kStreams || each.first == stream;
    });
    if (found == waiting.end()) return;
    actions.weight(found->second.chunk, found->second.micro_batch);
    waiting.erase(found);
  };
  const auto run = [&](char kind, std::uint32_t stream) {
    if (kind == 'W') return weight(stream);
    const std::optional<PipelineTurn> pass =
        pass_of(stream, kind == 'F' ? forwards[stream]++ : backwards[stream]++);
    if (!pass) return;
    if (kind == 'F') actions.forward(pass->chunk, pass->micro_batch);
    if (kind == 'B') actions.backward(pass->chunk, pass->micro_batch);
    if (kind == 'I') {
      actions.input(pass->chunk, pass->micro_batch);
      waiting.emplace_back(stream, *pass);
    }
  };
  for (const PipelinePhase& phase : phases) {
    for (std::uint32_t time = 0; time < phase.times; ++time) {
      for (std::size_t at = 0; at < phase.actions.size(); at += sizeof "F0") {
        const char stream = phase.actions[at + 1];
        run(phase.actions[at], stream == '*' ? kStreams : static_cast<std::uint32_t>(stream - '0'));
      }
    }
  }
  while (!waiting.empty()) weight(kStreams);
  return actions.take();
}

}  // namespace reef
