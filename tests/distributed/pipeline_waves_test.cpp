// Pipeline::train() by "hetpipe" with several virtual workers: bit for bit what one process does that follows
// the rules of waves. Run as several ranks by tests/support/ranks.py.
#include <unistd.h>

#include <chrono>
#include <filesystem>
#include <fstream>
#include <string>
#include <thread>
#include <vector>

#include "pipeline_replay.h"

namespace reef {
namespace {

using namespace train_tests;
using Weights = std::vector<Tensor>;

struct WavesRow {
  std::uint32_t workers, wave, staleness, hop;
  bool cut_alike;
};

std::uint32_t ranks_of_worker(const WavesRow& row) {
  return static_cast<std::uint32_t>(size()) / row.workers;
}
std::uint32_t own_worker(const WavesRow& row) { return static_cast<std::uint32_t>(rank()) % row.workers; }

std::string text_of(const WavesRow& row) {
  return std::to_string(row.workers) + " workers, waves of " + std::to_string(row.wave) + ", staleness " +
         std::to_string(row.staleness) + ", hops " + std::to_string(row.hop) +
         (row.cut_alike ? "" : ", cut differently");
}

PipelineOptions options_of(const WavesRow& row) {
  PipelineOptions options{
      .micro_batches = row.wave, .schedule = "hetpipe", .hops = {row.hop}, .replicas = row.workers};
  options.staleness = row.staleness;
  if (!row.cut_alike) options.replica_cuts = different_cuts(row.workers, ranks_of_worker(row), kStages);
  return options;
}

std::vector<WavesRow> rows() {
  std::vector<WavesRow> rows;
  const auto ranks = static_cast<std::uint32_t>(size());
  for (std::uint32_t workers = 2; workers <= ranks; ++workers) {
    if (ranks % workers != 0) continue;
    for (const std::uint32_t hop : {1U, 2U}) {
      const std::uint32_t depth = 1 + hop * (ranks / workers - 1);
      for (const std::uint32_t wave : {depth, depth + 2}) {
        for (const std::uint32_t staleness : {0U, 1U, 3U}) {
          for (const bool cut_alike : {true, false}) {
            if (cut_alike || ranks > workers) rows.push_back({workers, wave, staleness, hop, cut_alike});
          }
        }
      }
    }
  }
  return rows;
}

Weights copy_of(const Weights& weights) {
  Weights copies;
  for (const Tensor& weight : weights) copies.push_back(weight.detach().clone());
  return copies;
}

/// One process that trains all workers, wave after wave.
struct Oracle {
  Oracle(const WavesRow& given, Rule rule) : row(given), workers(given.workers) {
    for (Worker& worker : workers) {
      for (std::uint32_t stage = 0; stage < kStages; ++stage)
        worker.weights.push_back(initial(stage).set_requires_grad(true));
      worker.optimizer = optimizer_of(rule, worker.weights);
    }
    common = copy_of(workers.front().weights);
  }

  /// Returns the losses of a call of train() for batches 0, 1, ...
  std::vector<Tensor> train(std::uint32_t batches) {
    for (Worker& worker : workers) {
      worker.versions = {copy_of(worker.weights)};
      worker.changes.clear();
    }
    std::vector<Tensor> losses;
    for (std::uint32_t batch = 0, merged = 0; batch < batches; ++batch) {
      Tensor sum = torch::zeros({});
      for (std::uint32_t number = 0; number < row.workers; ++number)
        sum = run_wave(workers[number], number, batch, sum);
      losses.push_back(sum / std::int64_t{row.workers * row.wave});
      const std::uint32_t until =
          batch + 1 == batches ? batches : batch + 1 - std::min(batch + 1, row.staleness);
      const bool merges = merged < until;
      for (; merged < until; ++merged) {
        for (const Worker& worker : workers) add(worker.changes[merged], common);
      }
      const torch::NoGradGuard no_grad;
      for (Worker& worker : workers) {
        if (!merges) continue;
        for (std::uint32_t i = 0; i < kStages; ++i) worker.weights[i].copy_(common[i]);
        for (std::uint32_t wave = until; wave <= batch; ++wave) add(worker.changes[wave], worker.weights);
        worker.versions.back() = copy_of(worker.weights);
      }
    }
    return losses;
  }

  struct Worker {
    Weights weights;
    std::unique_ptr<torch::optim::Optimizer> optimizer;
    std::vector<Weights> versions, changes;  ///< after each update, and of each wave
  };

  static void add(const Weights& more, Weights& to) {
    const torch::NoGradGuard no_grad;
    for (std::uint32_t i = 0; i < kStages; ++i) to[i].add_(more[i]);
  }

  Tensor run_wave(Worker& worker, std::uint32_t number, std::uint32_t batch, Tensor sum) const {
    const Weights before = copy_of(worker.weights);
    const std::vector<Tensor> parts = batch_of(batch, row.wave, number).tensor_split(row.wave);
    for (std::uint32_t m = 0; m < row.wave; ++m) {
      const std::uint32_t at = batch * row.wave + m + 1;
      Weights used = copy_of(worker.versions[at - std::min(at, row.wave)]);
      Tensor x = parts[m];
      for (Tensor& weight : used) x = x.mm(weight.set_requires_grad(true)).tanh();
      const Tensor loss = loss_in(batch, m, x);
      loss.backward();
      sum = sum + loss.detach();
      for (std::uint32_t i = 0; i < kStages; ++i) worker.weights[i].mutable_grad() = used[i].grad();
      worker.optimizer->step();
      worker.versions.push_back(copy_of(worker.weights));
    }
    Weights& changes = worker.changes.emplace_back();
    for (std::uint32_t i = 0; i < kStages; ++i) changes.push_back(worker.weights[i].detach() - before[i]);
    return sum;
  }

  WavesRow row;
  std::vector<Worker> workers;
  Weights common;
};

TEST(PipelineWaves, WorkersAreBitForBitOneProcessThatFollowsTheRules) {
  for (const WavesRow& row : rows()) {
    for (const Rule rule : {Rule::kSgd, Rule::kAdamW}) {
      const std::string where = text_of(row) + (rule == Rule::kSgd ? ", SGD" : ", AdamW");
      Made made = make_stages();
      Pipeline pipeline(made.stages, world(), options_of(row));
      const auto optimizer = optimizer_of(rule, pipeline.parameters());
      Oracle oracle(row, rule);
      for (const std::uint32_t batches : {kBatches, 1U, 2U}) {  // optimizers go on from call to call
        const Tensor losses = train(
            pipeline, batches, [&] { optimizer->step(); }, own_worker(row));
        EXPECT_TRUE(same(losses, torch::stack(oracle.train(batches)))) << where;
        for (const auto& [name, parameter] : pipeline.named_parameters())
          EXPECT_TRUE(same(parameter, oracle.common[static_cast<std::size_t>(std::stoi(name))]))
              << name << where;
      }
    }
  }
}

// Numbers that float64 adds up without rounding.
TEST(PipelineWaves, OfOneMicroBatchWithoutStalenessTheyAreDataParallel) {
  const auto workers = static_cast<std::uint32_t>(size());
  const Tensor weight =
      torch::tensor({1.0, -2.0, 3.0, 1.0}, at::kDouble).reshape({2, 2}).set_requires_grad(true);
  PipelineStage stage;
  stage.parameters = {{"0.weight", weight}};
  stage.run = [weight](const Tensors& given) -> Tensors { return {given[0].mm(weight)}; };
  Pipeline pipeline(std::vector<PipelineStage>{stage}, world(), {.schedule = "hetpipe", .replicas = workers});
  torch::optim::SGD sgd(pipeline.parameters(), torch::optim::SGDOptions(1.0 / 64));
  const auto batch_of_worker = [](std::uint32_t batch, std::uint32_t worker) {
    return torch::tensor({1.0 + batch, -1.0 - worker}, at::kDouble).reshape({1, 2});
  };
  constexpr std::uint32_t kSteps = 4;
  pipeline.train(
      kSteps,
      [&](std::uint32_t batch) {
        return Tensors{batch_of_worker(batch, static_cast<std::uint32_t>(rank()))};
      },
      [](const Tensors& outputs, std::uint32_t, std::uint32_t) { return outputs[0].square().sum(); },
      [&] { sgd.step(); });
  Tensor one = torch::tensor({1.0, -2.0, 3.0, 1.0}, at::kDouble).reshape({2, 2}).set_requires_grad(true);
  torch::optim::SGD plain({one}, torch::optim::SGDOptions(1.0 / 64));
  for (std::uint32_t step = 0; step < kSteps; ++step) {
    plain.zero_grad();
    for (std::uint32_t worker = 0; worker < workers; ++worker)
      batch_of_worker(step, worker).mm(one).square().sum().backward();
    plain.step();
  }
  EXPECT_TRUE(same(weight, one));
}

// The first worker gets so far ahead of the last one, which waits for it in its first pass.
TEST(PipelineWaves, AWorkerMayBeSoManyBatchesAhead) {
  if (size() == 1) GTEST_SKIP() << "one worker is ahead of nobody";
  for (const std::uint32_t staleness : {1U, 2U}) {
    const WavesRow row{static_cast<std::uint32_t>(size()), 2, staleness, 1, true};
    std::vector<Tensor> process = {torch::full({1}, getpid(), at::kLong)};  // of the first rank
    world()->broadcast(process)->wait();
    const auto reached =
        std::filesystem::temp_directory_path() /
        ("reef_waves_" + std::to_string(process[0].item<std::int64_t>()) + "_" + std::to_string(staleness));
    const bool waits = rank() == size() - 1;
    Made made = make_stages([&](std::uint32_t, const Tensor&) {
      const auto until = std::chrono::steady_clock::now() + std::chrono::seconds(60);
      while (waits && !std::filesystem::exists(reached)) {
        if (std::chrono::steady_clock::now() > until) throw std::runtime_error("the first worker has waited");
        std::this_thread::sleep_for(std::chrono::milliseconds(2));
      }
    });
    Pipeline pipeline(made.stages, world(), options_of(row));
    const auto optimizer = optimizer_of(Rule::kSgd, pipeline.parameters());
    std::uint32_t updates = 0;
    train(
        pipeline, staleness + 2,
        [&] {
          optimizer->step();
          // In the passes behind `staleness` waves, but for the last update, which waits.
          if (++updates == row.wave * (staleness + 1) && rank() == 0) std::ofstream(reached) << "reached";
        },
        own_worker(row));
    if (rank() == 0) std::filesystem::remove(reached);
  }
}

TEST(PipelineWaves, WhatFailsInOneWorkerFailsInAll) {
  struct Fault {
    std::uint32_t stage, pass;
    bool in_update = false;
  };
  for (const WavesRow& row : rows()) {
    if (row.hop > 1 || row.staleness == 3) continue;
    for (const auto& [stage_that_fails, at, in_update] :
         {Fault{0, 0}, Fault{0, 3}, Fault{kStages - 1, 0}, Fault{kStages - 1, 4}, Fault{0, 2, true},
          Fault{0, 4, true}}) {
      const std::string where = text_of(row) + ", pass " + std::to_string(at);
      bool armed = own_worker(row) == row.workers - 1;  // the last one fails
      std::uint32_t passes = 0, updates = 0;
      Made made = make_stages([&, fails_in = stage_that_fails, call = at, of_pass = !in_update](
                                  std::uint32_t stage, const Tensor&) {
        if (of_pass && armed && stage == fails_in && passes++ == call)
          throw std::runtime_error("a pass of this test");
      });
      Pipeline pipeline(made.stages, world(), options_of(row));
      const auto optimizer = optimizer_of(Rule::kSgd, pipeline.parameters());
      const StateDict before = pipeline.full_state_dict();
      const auto update = [&] {
        if (armed && in_update && updates == at) throw std::runtime_error("a pass of this test");
        optimizer->step();
        ++updates;
      };
      try {
        train(pipeline, kBatches, update, own_worker(row));
        ADD_FAILURE() << "did not throw " << where;
      } catch (const std::exception& error) {
        expect_words(error.what(), {"a pass of this test"});
      }
      armed = false;
      for (const Tensor& parameter : pipeline.parameters()) EXPECT_FALSE(parameter.grad().defined());
      // The others have had updates of their own before they were told.
      expect_words(config_error([&] { pipeline.forward(batch_of(0, row.wave)); }), {"load states"});
      pipeline.load_state_dict({before});
      const Tensor losses = train(
          pipeline, 2, [&] { optimizer->step(); }, own_worker(row));
      EXPECT_TRUE(losses.isfinite().all().item<bool>()) << where;
    }
  }
}

TEST(PipelineWaves, WhatCannotBeIsRefused) {
  const auto workers = static_cast<std::uint32_t>(size());
  const auto refused = [&](const PipelineOptions& options) {
    const Made made = make_stages();
    return config_error([&] { const Pipeline pipeline(made.stages, world(), options); });
  };
  PipelineOptions options{.micro_batches = 2, .schedule = "1f1b", .replicas = workers};
  options.staleness = 1;
  expect_words(refused(options), {"staleness", "hetpipe"});
  options.staleness = 0;
  options.replica_cuts.resize(workers + 1);
  expect_words(refused(options),
               {"cuts of " + std::to_string(workers + 1) + " replicas", "has " + std::to_string(workers)});
  options.replica_cuts.assign(workers, {3});
  expect_words(refused(options), {"cuts", "ascending"});
  if (workers == 1) return;
  options.schedule = "hetpipe";
  options.replica_cuts.clear();
  options.staleness = static_cast<std::uint32_t>(rank() == 0 ? 0 : 1);
  expect_words(refused(options), {"staleness"});
}

}  // namespace
}  // namespace reef
