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
using Samples = std::vector<std::vector<double>>;
using Fit = std::tuple<std::vector<double>, double, Samples, std::string>;

Fit fit_of(const reef::LinkFit& fit) {
  Samples samples;
  for (const reef::LinkSample& each : fit.samples)
    samples.push_back({each.rounds, each.messages, each.bytes, each.seconds});
  return {{fit.link.latency_seconds, fit.link.bytes_per_second, fit.link.message_seconds},
          fit.worst_error,
          std::move(samples),
          fit.text()};
}

std::vector<reef::LinkSample> samples_of(const Samples& given) {
  std::vector<reef::LinkSample> samples;
  for (const std::vector<double>& each : given) {
    if (each.size() != 4) throw reef::ConfigError("a sample of a link has 4 numbers");
    samples.push_back({each[0], each[1], each[2], each[3]});
  }
  return samples;
}

}  // namespace

TORCH_LIBRARY_FRAGMENT(reef, m) {
  m.def("link_text(float latency_seconds, float bytes_per_second, float message_seconds) -> str",
        [](double latency_seconds, double bytes_per_second, double message_seconds) {
          return reef::link_text({latency_seconds, bytes_per_second, message_seconds});
        });
  m.def("fit_link(float[][] samples) -> (float[], float, float[][], str)",
        [](const Samples& samples) { return fit_of(reef::fit_link(samples_of(samples))); });
  m.def("bound_link(float[][] samples) -> (float[], float, float[][], str)",
        [](const Samples& samples) { return fit_of(reef::bound_link(samples_of(samples))); });
  m.def("measure_link(__torch__.torch.classes.c10d.ProcessGroup group) -> (float[], float, float[][], str)",
        [](const reef::ProcessGroupPtr& group) { return fit_of(reef::measure_link(group)); });
}
