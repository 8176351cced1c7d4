// bytelm: trains a GPT on text, byte by byte, and shows where its memory goes.
//
// An ordinary LibTorch program. What Reef adds to it: a ledger that watches the model and the optimizer, with
// --budget and --recompute-within memory that suffices, and, when several ranks were started (torchrun,
// mpirun, srun), a process group among which reef::shard divides as much as --stage says.

#include <ATen/CPUGeneratorImpl.h>
#include <torch/torch.h>

#include <algorithm>
#include <cmath>
#include <cstdio>
#include <iostream>
#include <limits>
#include <numbers>
#include <optional>

#include "bytelm/checkpoint.h"
#include "bytelm/corpus.h"
#include "bytelm/evaluate.h"
#include "bytelm/model.h"
#include "bytelm/options.h"
#include "bytelm/report.h"
#include "bytelm/whole_file.h"
#include "reef/reef.h"

namespace bytelm {
namespace {

std::unique_ptr<torch::optim::Optimizer> make_optimizer(const Options& options,
                                                        std::vector<torch::Tensor> parameters) {
  if (!options.state.empty()) {
    const reef::optim::StateFormat format = reef::optim::state_format(options.state);
    if (options.optimizer == "sgd") {
      return std::make_unique<reef::optim::SGD>(
          std::move(parameters), reef::optim::SGDOptions(options.learning_rate).momentum(0.9).state(format));
    }
    return std::make_unique<reef::optim::AdamW>(
        std::move(parameters),
        reef::optim::AdamWOptions(options.learning_rate).betas({0.9, 0.95}).weight_decay(0.01).state(format));
  }
  if (options.optimizer == "sgd") {
    return std::make_unique<torch::optim::SGD>(std::move(parameters),
                                               torch::optim::SGDOptions(options.learning_rate).momentum(0.9));
  }
  return std::make_unique<torch::optim::AdamW>(
      std::move(parameters),
      torch::optim::AdamWOptions(options.learning_rate).betas({0.9, 0.95}).weight_decay(0.01));
}

/// Linear warm-up over the first twentieth, then a cosine down to a tenth.
double learning_rate(std::int64_t step, const Options& options) {
  const auto warm_up = std::max<std::int64_t>(1, options.steps / 20);
  if (step < warm_up)
    return options.learning_rate * static_cast<double>(step + 1) / static_cast<double>(warm_up);
  const double part = static_cast<double>(step - warm_up) / static_cast<double>(options.steps - warm_up);
  return options.learning_rate * (0.55 + 0.45 * std::cos(std::numbers::pi * part));
}

/// This rank's windows of the next step. Every rank draws those of all ranks and takes its own, so one
/// generator, the same everywhere, is all there is to save.
torch::Tensor draw_windows(torch::Generator& generator, const torch::Tensor& text, const Options& options,
                           int rank, int ranks) {
  const auto window = options.context + 1;
  const auto offsets = torch::randint(text.size(0) - window + 1, {options.batch * ranks}, generator,
                                      torch::TensorOptions(torch::kLong));
  return windows_at(text, offsets.narrow(0, options.batch * rank, options.batch), window);
}

[[noreturn]] void report_divergence(std::int64_t step, const std::vector<torch::Tensor>& parameters,
                                    const std::vector<std::string>& names) {
  std::string where = "although all gradients are finite";
  for (std::size_t i = 0; i < parameters.size(); ++i) {
    const auto& gradient = parameters[i].grad();
    if (const auto count = reef::count_nonfinite(gradient); count > 0) {
      where = "and the first gradient with values that are not is that of " + names[i] + " (" +
              std::to_string(count) + " of " + std::to_string(gradient.numel()) + ")";
      break;
    }
  }
  throw std::runtime_error("the loss of step " + std::to_string(step) + " is not finite, " + where +
                           ": try a smaller --learning-rate");
}

void save_pictures(const reef::Timeline& timeline, const Options& options, torch::Device device) {
  const auto& devices = timeline.devices;
  const auto index = std::find(devices.begin(), devices.end(), device.str()) - devices.begin();
  const reef::ChartOptions how{.title = "Bytes alive during one training step",
                               .budget_bytes = options.budget_bytes.value_or(0)};
  write_whole_file(options.chart, reef::memory_chart(timeline, static_cast<std::size_t>(index), how));
  if (!options.trace.empty()) write_whole_file(options.trace, reef::chrome_trace(timeline));
}

void require_writable_files(const Options& options) {
  if (!options.save.empty()) require_writable(options.save);
  if (options.ledger) require_writable(options.chart);
  if (!options.trace.empty()) require_writable(options.trace);
  if (!options.summary.empty()) require_writable(options.summary);
}

void open_budget(std::optional<reef::Budget>& budget, const Options& options, torch::Device device) {
  reef::BudgetOptions how;
  how.device = device;
  if (!options.spill.empty()) {
    how.tiers.push_back(reef::disk_tier(
        {.directory = options.spill, .capacity_bytes = std::numeric_limits<std::int64_t>::max()}));
  }
  budget.emplace(static_cast<std::uint64_t>(*options.budget_bytes), std::vector<const torch::nn::Module*>{},
                 std::move(how));
}

// What a run came to, as one JSON object.
void save_summary(const Options& options, const Report& report, double validation_bits_per_byte,
                  std::int64_t peak_bytes, std::int64_t state_bytes) {
  char text[256];
  std::snprintf(text, sizeof text,
                "{\"steps\": %lld, \"validation_bits_per_byte\": %.17g, \"tokens_per_second\": %.1f, "
                "\"peak_bytes\": %lld, \"optimizer_state_bytes\": %lld}\n",
                static_cast<long long>(options.steps), validation_bits_per_byte, report.tokens_per_second(),
                static_cast<long long>(peak_bytes), static_cast<long long>(state_bytes));
  write_whole_file(options.summary, text);
}

void train(const Options& options) {
  const auto device = find_device(options.device, reef::resolve_rendezvous().local_rank);
  const auto group = reef::init_process_group();
  const int rank = group->getRank(), ranks = group->getSize();
  const bool leads = rank == 0;  // and so speaks and writes
  if (leads) require_writable_files(options);
  if (options.threads > 0) torch::set_num_threads(static_cast<int>(options.threads));

  // Before the model, so that it is made inside and goes first.
  std::optional<reef::Budget> budget;
  if (options.budget_bytes) open_budget(budget, options, device);

  const auto seed = static_cast<std::uint64_t>(options.seed);
  torch::manual_seed(seed);
  TrainingState state{ByteGPT(options), {}, {}, nullptr, at::make_generator<at::CPUGeneratorImpl>(seed)};
  auto& model = state.model;
  std::optional<reef::Ledger> ledger;  // of a CUDA device it counts what is allocated from now on
  if (options.ledger) ledger.emplace();
  model->to(device);
  std::int64_t count = 0;
  for (const auto& parameter : model->parameters()) count += parameter.numel();
  const auto corpus = load_corpus(options.data, options.context + 1);
  if (options.pipeline > 0) {
    const auto like = torch::arange(options.batch / options.pipeline);
    state.pipelined.emplace(model, options, group,
                            windows_at(corpus.training, like, options.context + 1).to(device));
    model = nullptr;  // the stages of other ranks are not needed here
  } else if (ranks > 1) {
    state.sharded.emplace(reef::shard(*model, group,
                                      {.stage = options.stage,
                                       .compression = options.compression,
                                       .compression_options = options.compression_options}));
  }
  auto* const pipelined = state.pipelined ? &*state.pipelined : nullptr;
  const auto parameters = pipelined       ? pipelined->pipeline().parameters()
                          : state.sharded ? state.sharded->parameters()
                                          : model->parameters();
  const auto names = pipelined       ? pipelined->names()
                     : state.sharded ? state.sharded->names()
                                     : model->named_parameters().keys();
  if (options.recompute_within_bytes) {
    model->recompute_within(*options.recompute_within_bytes, ranks > 1 ? group : nullptr);
  }
  state.optimizer = make_optimizer(options, parameters);
  auto& optimizer = *state.optimizer;
  if (!options.resume.empty()) load_checkpoint(options.resume, state, options, device);

  if (ledger) {
    if (model) ledger->watch(*model);
    if (pipelined) {
      for (const auto& module : pipelined->modules()) ledger->watch(*module);
    }
    ledger->watch(optimizer);
  }

  const auto first_step = state.step;
  // Of the ranks that train on windows of their own.
  const int share = pipelined ? rank % static_cast<int>(options.replicas) : rank;
  const int shares = pipelined ? static_cast<int>(options.replicas) : ranks;
  Report report(options, rank, shares, first_step);
  double validation = 0;
  const auto validate = [&] {  // by all ranks: what is divided comes together on all of them
    validation = pipelined ? pipelined->bits_per_byte(corpus.validation, options, device)
                           : bits_per_byte(model, corpus.validation, options, device);
    char text[64];
    std::snprintf(text, sizeof text, "validation: %.4f bits per byte", validation);
    return std::string(text);
  };
  report.say("text: " + corpus.description);
  report.say("model: " + std::to_string(count) + " parameters on " + device.str() +
             (ranks > 1 ? ", " + std::to_string(ranks) + " ranks" : ""));
  if (const std::string plan = pipelined ? pipelined->pipeline().plan() : ""; !plan.empty())
    report.say(plan.substr(0, plan.size() - 1));  // it ends with a line break
  report.say("step " + std::to_string(first_step) + "/" + std::to_string(options.steps) + "  " + validate());

  // The picture is of the third step: by then gradients and optimizer states are where they stay.
  const auto pictured_step = ledger && leads ? std::min(first_step + 3, options.steps) : -1;
  while (state.step < options.steps) {
    report.step_begins();
    const auto step = state.step + 1;
    if (step == pictured_step) ledger->start_timeline();

    for (auto& parameters_and_options : optimizer.param_groups()) {
      parameters_and_options.options().set_lr(learning_rate(state.step, options));
    }
    const auto windows = draw_windows(state.batches, corpus.training, options, share, shares).to(device);
    optimizer.zero_grad();
    torch::Tensor loss;
    if (pipelined) {
      loss = pipelined->step(windows);
    } else {
      loss = next_byte_loss(model, windows);
      loss.backward();
      if (ranks > 1) reef::all_reduce({loss.detach()}, group, reef::Reduction::kMean);
    }
    const auto nats = loss.item<double>();
    if (!std::isfinite(nats)) report_divergence(step, parameters, names);
    if (pipelined) {
      pipelined->pipeline().clip_grad_norm_(1.0);
    } else {
      reef::clip_grad_norm_(parameters, 1.0, group);
    }
    optimizer.step();
    state.step = step;

    report.step_ends(step, nats, ledger ? std::optional(ledger->live(device).total()) : std::nullopt);
    if (step == pictured_step) save_pictures(ledger->stop_timeline(), options, device);
    if (step == options.steps) continue;
    if (step % options.eval_every == 0) {
      report.say("step " + std::to_string(step) + "/" + std::to_string(options.steps) + "  " + validate() +
                 ", " + report.progress());
    }
    if (options.save_every > 0 && step % options.save_every == 0)
      save_checkpoint(options.save, state, options);
  }

  const ByteGPT trained = pipelined ? *pipelined->whole(options, /*on_all=*/true) : model;
  report.log().finish(trained->parameters());
  report.say(validate());
  if (!trained->recomputation().empty()) report.say("blocks: " + trained->recomputation());
  if (budget) report.say(budget->report());
  if (leads && !options.summary.empty()) {
    const std::int64_t peak = budget   ? static_cast<std::int64_t>(budget->use().peak_bytes)
                              : ledger ? ledger->peak(device).bytes.total()
                                       : 0;
    const std::int64_t states = ledger ? ledger->live(device)[reef::Category::kOptimizerState] : 0;
    save_summary(options, report, validation, peak, states);
  }
  if (budget && !options.save.empty()) budget->end();  // a checkpoint is read off memory
  if (!options.save.empty()) save_checkpoint(options.save, state, options);
  if (options.sample > 0) {
    report.say("sample:" +
               printable(pipelined ? pipelined->sample(options, device) : sample(model, options, device)));
  }
  if (ledger) report.say(ledger->table());
  if (pictured_step > first_step) {
    report.say("memory of step " + std::to_string(pictured_step) + ": " + options.chart);
  }
}

}  // namespace
}  // namespace bytelm

int main(int argc, char** argv) {
  std::string speaker = "bytelm: ";
  try {
    const auto place = reef::resolve_rendezvous();
    if (place.world_size > 1) speaker += "rank " + std::to_string(place.rank) + ": ";
    if (const auto options = bytelm::parse_options(argc, argv)) bytelm::train(*options);
    return 0;
  } catch (const reef::ConfigError& error) {
    std::cerr << speaker << reef::message_of(error) << std::endl;
    return 2;
  } catch (const std::exception& error) {
    std::cerr << speaker << reef::message_of(error) << std::endl;
    return 1;
  }
}
