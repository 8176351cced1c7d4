#include "pipeline_run/executor.h"

#include <ATen/ops/ones.h>

#include <future>
#include <optional>
#include <torch/csrc/distributed/c10d/ProcessGroup.hpp>

#include "distributed/bytes_over_ranks.h"
#include "pipeline/progress.h"
#include "pipeline/segments.h"
#include "pipeline_run/deliveries.h"
#include "reef/error.h"

namespace reef {
namespace {

using at::Tensor;
using Kind = PipelineAction::Kind;

/// Something has failed on another rank, in these words.
struct FailedElsewhere {
  std::string text;
};

/// Shares memory with `tensor`, and its count of modifications, so that autograd finds them, but no graph.
Tensor without_graph(const Tensor& tensor) {
  auto* const impl = tensor.unsafeGetTensorImpl();
  return Tensor(
      impl->shallow_copy_and_detach(impl->version_counter(), /*allow_tensor_metadata_change=*/true));
}

// The first letter of what ranks tell each other at the end of a run.
constexpr char kDone = 'd', kFailed = 'f', kFailedElsewhere = 'e';

}  // namespace

PipelineExecutor::PipelineExecutor(PipelineSchedule schedule, std::vector<PipelineSkip> skips,
                                   ProcessGroupPtr group, std::uint32_t replicas, int tag)
    : group_(std::move(group)),
      replicas_(replicas),
      replica_(static_cast<std::uint32_t>(group_->getRank()) % replicas),
      rank_(static_cast<std::uint32_t>(group_->getRank()) / replicas),
      skips_(std::move(skips)),
      training_(course(std::move(schedule))),
      serving_(course(serving_schedule(training_.schedule()))),
      mail_(group_, tag) {
  mail_.connect(training_.messages());
}

PipelineCourse PipelineExecutor::course(PipelineSchedule schedule, std::uint32_t lanes) const {
  return {std::move(schedule), skips_, replica_, replicas_, lanes};
}

std::vector<std::string> PipelineExecutor::run(const Run& run) {
  now_ = run.course;
  handed_over_.clear();
  passed_on_.clear();
  mail_.begin(now_->messages());
  std::exception_ptr failed;
  std::string why;
  for (const PipelineAction& action : now_->schedule().actions[rank_]) {
    if (why.empty()) {
      try {
        perform(action, run);
        continue;
      } catch (const FailedElsewhere& other) {
        why = other.text;
      } catch (const PassAbandoned& other) {
        why = message_of(other);
      } catch (const RankFailed&) {
        throw;
      } catch (const RanksOutOfStep&) {
        throw;
      } catch (const std::exception& error) {
        failed = std::current_exception();
        why = place_of(action) + ": " + message_of(error);
      }
      for (auto& [number, chunk] : chunks_) chunk.forget();
      run.failed();
    } else if (action.kind == Kind::kUpdate) {
      run.leave_update(action.chunk, action.micro_batch, why);
    }
    pass_on(action, {}, why);
  }
  mail_.end(run.meanwhile);
  std::string own;
  if (why.empty()) {
    try {
      run.settle();
      check_passed_on();
      own = kDone + run.report();
    } catch (const std::exception& error) {
      failed = std::current_exception();
      why = message_of(error);
    }
  }
  if (!why.empty()) own = (failed ? kFailed : kFailedElsewhere) + why;
  return agree(own, failed, run.meanwhile);
}

void PipelineExecutor::perform(const PipelineAction& action, const Run& run) {
  const auto [kind, number, micro_batch] = action;
  if (kind == Kind::kUpdate) return run.update(number, micro_batch);
  PipelineChunk& chunk = chunks_.at(number);
  const auto pass = chunk.begin(kind, micro_batch);
  const bool is_last = number + 1 == now_->schedule().chunks();
  PassTensors needed = take(action, run), made;
  if (kind == Kind::kForward) {
    if (now_->lanes() > 0 && needed.tensors.empty()) return pass_on(action, {});  // the lane has ended
    const MicroBatchScope told(micro_batch % run.seed.micro_batches_per_call);
    made = chunk.forward(micro_batch, std::move(needed), run.seed);
    if (is_last) made.tensors = run.finish(micro_batch, made.tensors);
    if (run.trains) chunk.keep(micro_batch, made);
  } else if (kind == Kind::kWeight) {
    chunk.backward_to_weights(micro_batch);
  } else {
    if (is_last) needed.tensors = {at::ones({})};
    made = kind == Kind::kInput ? chunk.backward_to_inputs(micro_batch, needed)
                                : chunk.backward(micro_batch, needed);
  }
  pass_on(action, made);
}

PassTensors PipelineExecutor::take(const PipelineAction& action, const Run& run) {
  PassTensors needed;
  const auto deliveries = now_->needed_by(action);
  if (action.kind == Kind::kForward && deliveries.empty()) needed.tensors = run.input(action.micro_batch);
  for (const PipelineCourse::Delivery& delivery : deliveries) {
    const PipelineMessage& message = delivery.message;
    TensorListMessage content = message.to == message.from
                                    ? std::move(handed_over_.extract(PipelineMail::key_of(message)).mapped())
                                    : mail_.receive(message, run.meanwhile);
    if (!content.failed.empty()) throw FailedElsewhere{content.failed};
    unpack(delivery, std::move(content), chunks_.at(action.chunk).device(), needed);
  }
  return needed;
}

void PipelineExecutor::pass_on(const PipelineAction& action, const PassTensors& made,
                               const std::string& failed) {
  for (const auto& [number, tensor] : made.skips) passed_on_.add(tensor, action);
  for (const PipelineCourse::Delivery& delivery : now_->made_by(action)) {
    const PipelineMessage& message = delivery.message;
    TensorListMessage content = packed(delivery, made);
    content.failed = failed;
    if (message.to == message.from) {
      for (Tensor& tensor : content.tensors) {
        if (tensor.defined()) tensor = without_graph(tensor);
      }
      handed_over_[PipelineMail::key_of(message)] = std::move(content);
      continue;
    }
    content.check("reef::Pipeline, " + place_of(action));
    for (const Tensor& tensor : content.tensors) passed_on_.add(tensor, action);
    mail_.send(message, std::move(content));
  }
}

std::string PipelineExecutor::place_of(const PipelineAction& action) const {
  return "rank " + std::to_string(group_->getRank()) + ", " + pass_of(action.kind) + " of chunk " +
         std::to_string(action.chunk) + " for micro-batch " + std::to_string(action.micro_batch);
}

void PipelineExecutor::check_passed_on() const {
  const PipelineAction* const action = passed_on_.find_modified();
  if (action == nullptr) return;
  throw ConfigError(place_of(*action) +
                    ": what it gave to another chunk was modified in place before it was used there; give a "
                    "clone, which is not modified.");
}

std::vector<std::string> PipelineExecutor::agree(const std::string& own, const std::exception_ptr& failed,
                                                 const Meanwhile& meanwhile) {
  const auto policy = meanwhile ? std::launch::async : std::launch::deferred;
  auto told = std::async(policy, [&] { return gather_texts(own, group_, c10::kCPU); });
  std::vector<std::string> reports = wait_for(told, meanwhile);
  if (failed) std::rethrow_exception(failed);
  for (std::size_t rank = 0; rank < reports.size(); ++rank) {
    if (reports[rank].front() == kFailed)
      throw PassAbandoned(reports[rank].substr(1) + " (thrown on rank " + std::to_string(rank) +
                              "; gradients are what they were before)",
                          static_cast<int>(rank));
  }
  for (std::string& report : reports) report.erase(0, 1);
  return reports;
}

}  // namespace reef
