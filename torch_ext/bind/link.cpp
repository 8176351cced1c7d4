#include "reef/link.h"

#include <torch/library.h>

#include <torch/csrc/distributed/c10d/ProcessGroup.hpp>
#include <tuple>
#include <utility>
#include <vector>

#include "reef/error.h"
#include "reef/measure_link.h"

namespace {

// Numbers of a link, its worst error, its samples, its text.
using Fit = std::tuple<std::vector<double>, double, std::vector<std::vector<double>>, std::string>;

Fit fit_of(const reef::LinkFit& fit) {
  std::vector<std::vector<double>> samples;
  for (const reef::LinkSample& each : fit.samples)
    samples.push_back({each.rounds, each.messages, each.bytes, each.seconds});
  return {{fit.link.latency_seconds, fit.link.bytes_per_second, fit.link.message_seconds},
          fit.worst_error,
          std::move(samples),
          fit.text()};
}

}  // namespace

TORCH_LIBRARY_FRAGMENT(reef, m) {
  m.def("link_text(float latency_seconds, float bytes_per_second, float message_seconds) -> str",
        [](double latency_seconds, double bytes_per_second, double message_seconds) {
          return reef::link_text({latency_seconds, bytes_per_second, message_seconds});
        });
  m.def("fit_link(float[][] samples) -> (float[], float, float[][], str)",
        [](const std::vector<std::vector<double>>& given) {
          std::vector<reef::LinkSample> samples;
          for (const std::vector<double>& each : given) {
            if (each.size() != 4) throw reef::ConfigError("fit_link takes samples of 4 numbers");
            samples.push_back({each[0], each[1], each[2], each[3]});
          }
          return fit_of(reef::fit_link(std::move(samples)));
        });
  m.def("measure_link(__torch__.torch.classes.c10d.ProcessGroup group) -> (float[], float, float[][], str)",
        [](const reef::ProcessGroupPtr& group) { return fit_of(reef::measure_link(group)); });
}
