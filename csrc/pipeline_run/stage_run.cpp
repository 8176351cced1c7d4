#include "pipeline_run/stage_run.h"

#include <ATen/Context.h>
#include <ATen/core/grad_mode.h>
#include <ATen/ops/alias.h>

#include <torch/csrc/autograd/variable.h>
#include <algorithm>
#include <map>
#include <mutex>
#include <utility>

#include "pipeline/recompute.h"
#include "pipeline_run/pass_tensors.h"
#include "pipeline_run/unmodified_tensors.h"
#include "reef/checkpoint.h"
#include "reef/error.h"
#include "tensor_layout.h"

namespace reef {
namespace {

namespace ta = torch::autograd;
using at::Tensor;
using Tensors = PipelineStage::Tensors;

std::uint64_t mixed(std::uint64_t x) {  // splitmix64 (Steele, Lea, Flood 2014)
  x += 0x9E3779B97F4A7C15U;
  x = (x ^ (x >> 30)) * 0xBF58476D1CE4E5B9U;
  x = (x ^ (x >> 27)) * 0x94D049BB133111EBU;
  return x ^ (x >> 31);
}

void seed_generators(const std::vector<c10::Device>& devices, PipelineSeed seed, std::uint32_t micro_batch,
                     std::uint32_t stage) {
  const std::uint64_t call = seed.call + micro_batch / seed.micro_batches_per_call;
  const std::uint64_t place =
      std::uint64_t{stage} << 32 | (seed.first_micro_batch + micro_batch % seed.micro_batches_per_call);
  const std::uint64_t number = mixed(mixed(mixed(seed.seed) ^ call) ^ place);
  const auto set = [&](c10::Device device) {
    at::Generator generator = at::globalContext().defaultGenerator(device);
    const std::lock_guard lock(generator.mutex());
    generator.set_current_seed(number);
  };
  set(c10::kCPU);
  for (const c10::Device device : devices) set(device);
}

thread_local std::optional<std::uint32_t> micro_batch_now;

/// The tensors of skips by their names, which must not be modified.
class Known {
 public:
  void learn(const std::string& name, const Tensor& tensor) {
    tensors_[name] = tensor;
    unmodified_.add(tensor, name);
  }
  const Tensor& at(const std::string& name) const { return tensors_.at(name); }
  void check() const {
    if (const std::string* const name = unmodified_.find_modified())
      throw ConfigError("reef::Pipeline: '" + *name +
                        "' was modified in place after a stage had given it to others, which would have "
                        "other values where the model is cut elsewhere: give a clone, or modify one.");
  }

 private:
  std::map<std::string, Tensor> tensors_;
  UnmodifiedTensors<std::string> unmodified_;
};

}  // namespace

std::optional<std::uint32_t> pipeline_micro_batch() { return micro_batch_now; }
MicroBatchScope::MicroBatchScope(std::uint32_t number) : before_(std::exchange(micro_batch_now, number)) {}
MicroBatchScope::~MicroBatchScope() { micro_batch_now = before_; }

/// Consecutive stages of the model, with the runs of them that are recomputed.
struct StageRun::Part {
  std::uint32_t first = 0, end = 0;
  std::vector<Part> inner = {};                     ///< ascending
  std::vector<std::string> takes = {}, gives = {};  ///< the names of skips
};

class StageRun::Tree : public std::enable_shared_from_this<Tree> {
 public:
  Tree(std::vector<PipelineStage> stages, std::uint32_t first_stage, const RecomputedRuns& recomputed,
       std::vector<std::string> takes, std::vector<std::string> gives)
      : stages_(std::move(stages)),
        root_{first_stage,
              first_stage + static_cast<std::uint32_t>(stages_.size()),
              {},
              std::move(takes),
              std::move(gives)} {
    std::size_t next = 0;
    nest(runs_within(recomputed, {root_.first, root_.end}), next, root_);
    name_skips(root_);
  }

  const std::vector<PipelineStage>& stages() const { return stages_; }
  Tensors run(const Pass& pass, Tensors tensors) const { return run(root_, pass, std::move(tensors)); }

 private:
  const PipelineStage& stage(std::uint32_t number) const { return stages_[number - root_.first]; }

  /// Puts runs from `next` on into the parts in which they lie.
  static void nest(const RecomputedRuns& runs, std::size_t& next, Part& into) {
    while (next < runs.size() && runs[next].first < into.end) {
      Part& part = into.inner.emplace_back(Part{runs[next].first, runs[next].end});
      nest(runs, ++next, part);
    }
  }

  /// Finds what the parts within one take of what is before them, and what they give to what is behind them.
  void name_skips(Part& part) const {
    const auto add = [](const std::string& name, std::vector<std::string>& to) {
      if (std::find(to.begin(), to.end(), name) == to.end()) to.push_back(name);
    };
    std::vector<std::string> taken_behind = part.gives;
    auto inner = part.inner.rbegin();
    for (std::uint32_t end = part.end; end > part.first;) {
      if (inner == part.inner.rend() || inner->end != end) {
        for (const std::string& name : stage(--end).takes) add(name, taken_behind);
        continue;
      }
      std::vector<std::string> given;
      for (std::uint32_t number = inner->first; number < inner->end; ++number) {
        for (const std::string& name : stage(number).takes) {
          if (std::find(given.begin(), given.end(), name) == given.end()) add(name, inner->takes);
        }
        for (const std::string& name : stage(number).gives) {
          given.push_back(name);
          if (std::find(taken_behind.begin(), taken_behind.end(), name) != taken_behind.end())
            inner->gives.push_back(name);
        }
      }
      for (const std::string& name : inner->takes) add(name, taken_behind);
      name_skips(*inner);
      end = inner++->first;
    }
  }

  Tensors run(const Part& part, const Pass& pass, Tensors tensors) const {
    Known known;
    const Tensors taken = take_last(tensors, part.takes.size());
    for (std::size_t i = 0; i < taken.size(); ++i) known.learn(part.takes[i], taken[i]);
    auto inner = part.inner.begin();
    for (std::uint32_t number = part.first; number < part.end;) {
      if (inner == part.inner.end() || inner->first != number) {
        run_stage(number++, pass, tensors, known);
        continue;
      }
      for (const std::string& name : inner->takes) tensors.push_back(known.at(name));
      tensors = at::GradMode::is_enabled() ? run_recomputed(*inner, pass, tensors)
                                           : run(*inner, pass, std::move(tensors));
      const Tensors given = take_last(tensors, inner->gives.size());
      for (std::size_t i = 0; i < given.size(); ++i) known.learn(inner->gives[i], given[i]);
      number = inner++->end;
    }
    known.check();
    for (const std::string& name : part.gives) tensors.push_back(known.at(name));
    return tensors;
  }

  void run_stage(std::uint32_t number, const Pass& pass, Tensors& tensors, Known& known) const {
    const PipelineStage& of = stage(number);
    for (const std::string& name : of.takes) tensors.push_back(known.at(name));
    seed_generators(pass.devices, pass.seed, pass.micro_batch, number);
    tensors = of.run(tensors);
    if (tensors.size() < of.gives.size())
      throw ConfigError("reef::Pipeline: a stage that gives '" + of.gives.front() + "' has returned " +
                        std::to_string(tensors.size()) + " tensors: what it gives comes last among them.");
    const Tensors given = take_last(tensors, of.gives.size());
    // With an alias, the gradients of all takers are summed before they are added to those of other uses,
    // wherever chunks end.
    for (std::size_t i = 0; i < given.size(); ++i)
      known.learn(of.gives[i], given[i].defined() ? at::alias(given[i]) : given[i]);
  }

  /// Runs a part, and has it run once more before its backward pass. Since stages may modify their inputs,
  /// they are given copies, which lie in memory as the inputs do: otherwise kernels could sum in another
  /// order.
  Tensors run_recomputed(const Part& part, const Pass& pass, const Tensors& tensors) const {
    const auto run_again = [tree = shared_from_this(), &part, pass,
                            told = pipeline_micro_batch().value_or(pass.micro_batch)](const Tensors& given) {
      const MicroBatchScope again(told);  // on the thread that computes it once more
      Tensors copies;
      for (const Tensor& tensor : given) {
        Tensor& copy = copies.emplace_back(tensor.defined() ? copy_with_layout(tensor) : tensor);
        if (tensor.defined() && tensor.requires_grad())
          ta::impl::set_gradient_edge(copy, ta::impl::gradient_edge(tensor));
      }
      return tree->run(part, pass, std::move(copies));
    };
    const CheckpointRegion region(run_again, tensors, {.devices = pass.devices});
    return run_again(tensors);
  }

  std::vector<PipelineStage> stages_;
  Part root_;
};

StageRun::StageRun(std::vector<PipelineStage> stages, std::uint32_t first_stage,
                   const RecomputedRuns& recomputed, std::vector<std::string> takes,
                   std::vector<std::string> gives)
    : tree_(std::make_shared<Tree>(std::move(stages), first_stage, recomputed, std::move(takes),
                                   std::move(gives))) {}

const std::vector<PipelineStage>& StageRun::stages() const { return tree_->stages(); }

StageRun::Tensors StageRun::operator()(const Pass& pass, Tensors tensors) const {
  return tree_->run(pass, std::move(tensors));
}

}  // namespace reef
