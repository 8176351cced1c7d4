#include "pipeline_run/micro_batches.h"

#include <ATen/TensorOperators.h>
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

std::function<Tensors(std::uint32_t)> cut_each_batch(std::function<Tensors(std::uint32_t)> batch_of,
                                                     std::uint32_t count) {
  struct Cut {
    std::vector<Tensors> parts;
    std::uint32_t left;
  };
  return [batch_of = std::move(batch_of), count,
          cut = std::map<std::uint32_t, Cut>()](std::uint32_t micro_batch) mutable {
    const std::uint32_t batch = micro_batch / count;
    if (!cut.contains(batch)) cut[batch] = {micro_batches_of(batch_of(batch), count), count};
    Cut& found = cut.at(batch);
    Tensors part = std::move(found.parts[micro_batch % count]);
    if (--found.left == 0) cut.erase(batch);
    return part;
  };
}

std::string text_of_losses(const std::vector<Tensor>& losses, std::uint32_t count, std::uint32_t replica,
                           std::uint32_t replicas) {
  std::ostringstream text;
  text << std::hexfloat;
  for (std::size_t i = 0; i < losses.size(); ++i) {
    if (!losses[i].defined()) continue;
    const std::size_t number = (i / count * replicas + replica) * count + i % count;
    text << number << " " << static_cast<int>(losses[i].scalar_type()) << " " << losses[i].item<double>()
         << "\n";
  }
  return text.str();
}

std::vector<Tensor> sums_of_losses(const std::vector<std::string>& texts, std::uint32_t count) {
  std::map<std::size_t, Tensor> losses;
  for (const std::string& text : texts) {
    for (const std::string& line : lines_of(text)) {
      char* rest = nullptr;
      const std::size_t number = std::strtoull(line.c_str(), &rest, 10);
      const long dtype = std::strtol(rest, &rest, 10);
      losses[number] = at::full({}, std::strtod(rest, nullptr), static_cast<at::ScalarType>(dtype));
    }
  }
  std::vector<Tensor> sums;
  for (const auto& [number, loss] : losses) {
    sums.resize(number / count + 1);
    Tensor& sum = sums.back();
    sum = sum.defined() ? sum + loss : loss;
  }
  return sums;
}

void check_loss(const Tensor& loss, const char* call) {
  if (!loss.defined() || loss.numel() != 1 || !loss.is_floating_point())
    throw ConfigError(std::string(call) + ": a loss is a single floating-point number.");
}

}  // namespace reef
