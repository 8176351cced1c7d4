#include "reef/measure_pipeline.h"

#include <torch/library.h>

#include <optional>
#include <string>
#include <torch/csrc/distributed/c10d/ProcessGroup.hpp>
#include <tuple>
#include <vector>

#include "pipeline_costs.h"
#include "pipeline_stage.h"

namespace {

using reef::bind::Floats;
using reef::bind::Ints;

/// The fields of reef.PipelineProfile in their order.
using ProfileNumbers =
    std::tuple<std::vector<Floats>, std::vector<Ints>, Floats, std::vector<Floats>, Ints, std::vector<Ints>>;

ProfileNumbers numbers_of(const reef::PipelineProfile& profile) {
  ProfileNumbers numbers;
  auto& [seconds, bytes, speeds, links, rank_bytes, skips] = numbers;
  skips = reef::bind::rows_of(profile.skips);
  for (const reef::PipelineChunkCost& stage : profile.stages) {
    seconds.push_back(reef::bind::seconds_of(stage));
    bytes.push_back(reef::bind::counts_of(stage));
  }
  speeds = profile.speeds;
  for (const reef::Link& link : profile.links)
    links.push_back({link.latency_seconds, link.bytes_per_second, link.message_seconds});
  for (const std::uint64_t count : profile.rank_bytes) rank_bytes.push_back(static_cast<std::int64_t>(count));
  return numbers;
}

}  // namespace

TORCH_LIBRARY_FRAGMENT(reef, m) {
  m.def(
      "measure_pipeline(int[] makers, Tensor[] micro_batch, __torch__.torch.classes.c10d.ProcessGroup group, "
      "int "
      "repeats, float state_bytes_per_byte, int rank_bytes, bool each_link, int? loss) -> (float[][], "
      "int[][], "
      "float[], float[][], int[], int[][])",
      [](const std::vector<std::int64_t>& makers, const std::vector<at::Tensor>& micro_batch,
         const reef::ProcessGroupPtr& group, std::int64_t repeats, double state_bytes_per_byte,
         std::int64_t rank_bytes, bool each_link, std::optional<std::int64_t> loss) {
        std::vector<reef::Pipeline::Maker> stages;
        for (const std::int64_t maker : makers)
          stages.emplace_back(
              [call = reef::bind::PythonFunction(maker)] { return reef::bind::stage_made_by(call); });
        return numbers_of(reef::measure_pipeline(
            stages, micro_batch, group,
            {.repeats = reef::bind::small(repeats, "measure_pipeline: repeats"),
             .state_bytes_per_byte = state_bytes_per_byte,
             .rank_bytes = reef::bind::bytes_of(rank_bytes, "measure_pipeline: rank_bytes"),
             .each_link = each_link,
             .loss = reef::bind::loss_of_outputs(loss)}));
      });
}
