#include "pipeline_run/micro_batches.h"

#include <ATen/ops/full.h>

#include <cstdlib>
#include <ios>
#include <map>
#include <sstream>
#include <utility>

#include "distributed/bytes_over_ranks.h"
#include "reef/error.h"

namespace reef {

using at::Tensor;
using Tensors = PipelineStage::Tensors;

namespace {

/// Cuts tensors along dimension 0. Throws ConfigError if they differ in it, or have too few rows.
std::vector<Tensors> micro_batches_of(const Tensors& batch, std::uint32_t count) {
  std::vector<Tensors> parts(count);
  std::int64_t rows = -1;
  for (const Tensor& tensor : batch) {
    if (!tensor.defined() || tensor.dim() == 0)
      throw ConfigError(
          "reef::Pipeline: the rank with the first stage needs a batch whose tensors have rows.");
    if (rows < 0) rows = tensor.size(0);
    if (tensor.size(0) != rows || rows < count)
      throw ConfigError("reef::Pipeline: a batch of " + std::to_string(tensor.size(0)) +
                        " rows cannot be cut into " + std::to_string(count) +
                        " micro-batches: give one row for each at least, and as many in every tensor.");
    const std::vector<Tensor> cut = tensor.tensor_split(count);
    for (std::uint32_t part = 0; part < count; ++part) parts[part].push_back(cut[part]);
  }
  if (rows < 0) throw ConfigError("reef::Pipeline: the rank with the first stage was given no batch.");
  return parts;
}

}  // namespace

std::function<Tensors(std::uint32_t)> cut_into_micro_batches(const Tensors& batch, std::uint32_t count) {
  return [given = batch, count, parts = std::vector<Tensors>()](std::uint32_t micro_batch) mutable {
    if (parts.empty()) parts = micro_batches_of(std::exchange(given, {}), count);
    return std::move(parts[micro_batch]);
  };
}

std::string text_of_losses(const std::vector<Tensor>& losses, std::uint32_t first_number) {
  std::ostringstream text;
  text << std::hexfloat;
  for (std::size_t i = 0; i < losses.size(); ++i) {
    if (!losses[i].defined()) continue;
    text << first_number + i << " " << static_cast<int>(losses[i].scalar_type()) << " "
         << losses[i].item<double>() << "\n";
  }
  return text.str();
}

Tensor sum_of_losses(const std::vector<std::string>& texts) {
  std::map<std::size_t, Tensor> losses;
  for (const std::string& text : texts) {
    for (const std::string& line : lines_of(text)) {
      char* rest = nullptr;
      const std::size_t number = std::strtoull(line.c_str(), &rest, 10);
      const long dtype = std::strtol(rest, &rest, 10);
      losses[number] = at::full({}, std::strtod(rest, nullptr), static_cast<at::ScalarType>(dtype));
    }
  }
  Tensor sum;
  for (const auto& [number, loss] : losses) sum = sum.defined() ? sum + loss : loss;
  return sum;
}

}  // namespace reef
