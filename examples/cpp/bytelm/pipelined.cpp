#include "pipelined.h"

#include <ATen/CPUGeneratorImpl.h>

#include <algorithm>
#include <numbers>

#include "corpus.h"
#include "evaluate.h"

namespace bytelm {

namespace nn = torch::nn;
using Tensors = std::vector<torch::Tensor>;

namespace {

/// The head's weight is the embedding's under a second name.
constexpr const char* kHead = "head.weight";

template <class Module>
std::shared_ptr<Module> part(const ByteGPT& model, const std::string& name) {
  return std::dynamic_pointer_cast<Module>(model->named_children()[name]);
}

reef::PipelineStage stage(const nn::Module& module, const std::string& prefix,
                          std::function<Tensors(const Tensors&)> run) {
  reef::PipelineStage made;
  for (const auto& each : module.named_parameters())
    made.parameters.emplace_back(prefix + each.key(), each.value());
  made.run = std::move(run);
  return made;
}

/// What is between stages has a row for each window: [batch, length, width].
torch::Tensor rows(const torch::Tensor& x) { return x.flatten(0, 1); }

struct Stages {
  std::vector<reef::PipelineStage> stages;
  std::vector<std::vector<std::shared_ptr<nn::Module>>> modules;
};

Stages stages_of(const ByteGPT& model) {
  const auto bytes = part<nn::EmbeddingImpl>(model, "bytes");
  const auto positions = part<nn::EmbeddingImpl>(model, "positions");
  const auto norm = part<nn::LayerNormImpl>(model, "norm");
  Stages made;
  reef::PipelineStage first = stage(*bytes, "bytes.", [bytes, positions](const Tensors& given) -> Tensors {
    return {embedded(*bytes, *positions, given[0]).view({given[0].size(0), given[0].size(1), -1})};
  });
  first.parameters.emplace_back("positions.weight", positions->weight);
  made.stages.push_back(std::move(first));
  made.modules.push_back({bytes, positions});
  const auto blocks = part<nn::ModuleListImpl>(model, "blocks");
  for (std::size_t i = 0; i < blocks->size(); ++i) {
    const auto block = blocks->ptr<BlockImpl>(i);
    made.stages.push_back(
        stage(*block, "blocks." + std::to_string(i) + ".", [block](const Tensors& given) -> Tensors {
          return {block->forward(rows(given[0]), given[0].size(1)).view_as(given[0])};
        }));
    made.modules.push_back({block});
  }
  reef::PipelineStage last = stage(*norm, "norm.", [norm, bytes](const Tensors& given) -> Tensors {
    return {logits_of(*norm, *bytes, rows(given[0]))};
  });
  last.parameters.emplace_back(kHead, bytes->weight);
  made.stages.push_back(std::move(last));
  made.modules.push_back({norm, bytes});
  return made;
}

}  // namespace

Pipelined::Pipelined(const ByteGPT& model, const Options& options, const reef::ProcessGroupPtr& group,
                     const torch::Tensor& windows)
    : group_(group), micro_batches_(options.pipeline), replicas_(options.replicas) {
  reef::PipelineOptions how{.micro_batches = static_cast<std::uint32_t>(micro_batches_),
                            .schedule = options.schedule,
                            .replicas = static_cast<std::uint32_t>(replicas_)};
  how.shard.stage = options.stage;
  if (options.schedule.empty())
    how.sample = reef::PipelineSample{{windows.narrow(1, 0, windows.size(1) - 1)}};
  const Stages made = stages_of(model);
  pipeline_.emplace(made.stages, group, how);
  const auto rank = static_cast<std::uint32_t>(group->getRank() / replicas_);
  for (std::size_t i = 0, chunk = 0; i < made.modules.size(); ++i) {
    const reef::PipelineCuts& cuts = pipeline_->cuts();
    while (chunk < cuts.size() && cuts[chunk] <= i) ++chunk;
    const auto& rank_of = pipeline_->schedule().rank_of;
    const bool is_own =
        std::any_of(rank_of.begin(), rank_of.end(), [&](const auto& ranks) { return ranks[chunk] == rank; });
    if (is_own) modules_.insert(modules_.end(), made.modules[i].begin(), made.modules[i].end());
  }
}

std::vector<std::string> Pipelined::names() const {
  std::vector<std::string> all;
  for (const auto& [name, parameter] : pipeline_->named_parameters()) all.push_back(name);
  return all;
}

torch::Tensor Pipelined::step(const torch::Tensor& windows) {
  const auto length = windows.size(1) - 1;
  const Tensors targets = windows.narrow(1, 1, length).tensor_split(micro_batches_);
  return pipeline_->step(windows.narrow(1, 0, length),
                         [&](const torch::Tensor& logits, std::uint32_t micro_batch) {
                           return nn::functional::cross_entropy(logits, targets[micro_batch].flatten());
                         });
}

double Pipelined::bits_per_byte(const torch::Tensor& text, const Options& options, torch::Device device) {
  const torch::NoGradGuard no_grad;
  const auto offsets = validation_offsets(text, options);
  auto nats = torch::zeros({}, torch::kDouble);
  for (const auto& some : offsets.tensor_split(std::max<std::int64_t>(1, offsets.size(0) / options.batch))) {
    const auto windows = windows_at(text, some, options.context + 1).to(device);
    const auto logits = pipeline_->forward(windows.narrow(1, 0, options.context));
    if (!logits.defined()) continue;
    const auto loss = nn::functional::cross_entropy(logits, windows.narrow(1, 1, options.context).flatten());
    nats += loss.item<double>() * static_cast<double>(some.size(0));
  }
  return told_by_the_last(nats).item<double>() / static_cast<double>(offsets.size(0)) / std::numbers::ln2;
}

// One micro-batch is the text; the others have nothing to say.
std::string Pipelined::sample(const Options& options, torch::Device device) {
  Sampler sampler(options);
  auto bytes = torch::full({options.sample}, 0, torch::kLong);
  std::vector<Tensors> starts(static_cast<std::size_t>(micro_batches_), {sampler.seen().to(device)});
  pipeline_->generate(starts, static_cast<std::uint32_t>(options.sample),
                      [&](const Tensors& logits, std::uint32_t lane, std::uint32_t step) -> Tensors {
                        if (lane > 0) return {};
                        bytes[step] = sampler.next(logits[0]);
                        return {sampler.seen().to(device)};
                      });
  const auto all = told_by_the_last(bytes);
  std::string text;
  for (std::int64_t i = 0; i < all.size(0); ++i) text += static_cast<char>(all[i].item<std::int64_t>());
  return text;
}

std::optional<ByteGPT> Pipelined::whole(const Options& options, bool on_all) {
  const reef::StateDict values = pipeline_->full_state_dict(/*rank0_only=*/!on_all);
  if (values.empty()) return std::nullopt;
  const torch::NoGradGuard no_grad;
  ByteGPT model(options);
  for (auto& each : model->named_parameters()) each.value().copy_(values.at(each.key()));
  return model;
}

void Pipelined::load(const ByteGPT& whole) {
  reef::StateDict values;
  for (const auto& each : whole->named_parameters()) values.insert(each.key(), each.value().detach());
  values.insert(kHead, values.at("bytes.weight"));
  pipeline_->load_state_dict({values});
}

torch::Tensor Pipelined::told_by_the_last(torch::Tensor known) const {
  const auto last = static_cast<int>(pipeline_->schedule().rank_of.front().back() * replicas_);
  reef::broadcast({known}, group_, last);
  return known;
}

}  // namespace bytelm
