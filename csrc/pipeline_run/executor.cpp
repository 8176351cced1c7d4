#include "pipeline_run/executor.h"

#include <ATen/ops/ones.h>

#include <future>
#include <optional>
#include <torch/csrc/distributed/c10d/ProcessGroup.hpp>

#include "distributed/bytes_over_ranks.h"
#include "distributed/members.h"
#include "pipeline/progress.h"
#include "pipeline/segments.h"
#include "reef/error.h"

namespace reef {
namespace {

using at::Tensor;
using Kind = PipelineAction::Kind;
using MessageKind = PipelineMessage::Kind;

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

PipelineExecutor::PipelineExecutor(PipelineSchedule schedule, ProcessGroupPtr group, std::uint32_t replicas,
                                   int tag)
    : group_(std::move(group)),
      replica_(static_cast<std::uint32_t>(group_->getRank()) % replicas),
      rank_(static_cast<std::uint32_t>(group_->getRank()) / replicas),
      training_(std::move(schedule), replica_, replicas),
      serving_(serving_schedule(training_.schedule()), replica_, replicas),
      mail_(group_, tag) {}

std::vector<std::string> PipelineExecutor::run(const Run& run) {
  now_ = run.course;
  handed_over_.clear();
  sent_.clear();
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
      run.leave_update(action.chunk, why);
    }
    pass_on(action, {.failed = why});
  }
  mail_.end(run.meanwhile);
  std::string own;
  if (why.empty()) {
    try {
      run.settle();
      check_sent();
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
  TensorListMessage made;
  if (kind == Kind::kForward) {
    ChunkInput input = input_of(action, run);
    if (now_->lanes() > 0 && input.tensors.empty()) return pass_on(action, {});  // the lane has ended
    const MicroBatchScope told(micro_batch % run.seed.micro_batches_per_call);
    made.tensors = chunk.forward(micro_batch, std::move(input), run.seed);
    if (is_last) made.tensors = run.finish(micro_batch, made.tensors);
    if (run.trains) chunk.keep(micro_batch, made.tensors);
    for (const Tensor& tensor : made.tensors)
      made.requires_grad.push_back(run.trains && tensor.defined() && tensor.requires_grad());
  } else if (kind == Kind::kWeight) {
    chunk.backward_to_weights(micro_batch);
  } else {
    const Tensors gradients =
        is_last ? Tensors{at::ones({})}
                : take({MessageKind::kGradient, number + 1, micro_batch}, run.meanwhile).tensors;
    made.tensors = kind == Kind::kInput ? chunk.backward_to_inputs(micro_batch, gradients)
                                        : chunk.backward(micro_batch, gradients);
  }
  pass_on(action, std::move(made));
}

ChunkInput PipelineExecutor::input_of(const PipelineAction& action, const Run& run) {
  const auto [kind, number, micro_batch] = action;
  const std::optional<PipelineMessage> before =
      number > 0 ? PipelineMessage{MessageKind::kOutput, number - 1, micro_batch}
                 : now_->leads_to(micro_batch);
  TensorListMessage given;
  if (before) {
    given = take(*before, run.meanwhile);
    for (Tensor& tensor : given.tensors) {
      if (tensor.defined()) tensor = tensor.to(chunks_.at(number).device());
    }
  } else {
    given.tensors = run.input(micro_batch);
  }
  given.requires_grad.resize(given.tensors.size());
  return {std::move(given.tensors), std::move(given.requires_grad)};
}

TensorListMessage PipelineExecutor::take(const PipelineMessage& message, const Meanwhile& meanwhile) {
  const PipelineMail::Key key{message.kind, message.chunk, message.micro_batch};
  const bool is_here = now_->schedule().rank(message.chunk, message.micro_batch) == rank_;
  TensorListMessage taken =
      is_here ? std::move(handed_over_.extract(key).mapped()) : mail_.receive(message, meanwhile);
  if (!taken.failed.empty()) throw FailedElsewhere{taken.failed};
  return taken;
}

void PipelineExecutor::pass_on(const PipelineAction& action, TensorListMessage content) {
  const std::optional<PipelineMessage> message = now_->message_of(action);
  if (!message) return;
  if (message->to == message->from) {
    for (Tensor& tensor : content.tensors) {
      if (tensor.defined()) tensor = without_graph(tensor);
    }
    handed_over_[{message->kind, message->chunk, message->micro_batch}] = std::move(content);
    return;
  }
  content.check("reef::Pipeline, " + place_of(action));
  for (const Tensor& tensor : content.tensors) {
    if (!tensor.defined() || tensor.is_inference()) continue;
    const c10::VariableVersion& counter = tensor.unsafeGetTensorImpl()->version_counter();
    sent_.push_back({counter, counter.current_version(), action});
  }
  mail_.send(*message, std::move(content));
}

std::string PipelineExecutor::place_of(const PipelineAction& action) const {
  return "rank " + std::to_string(group_->getRank()) + ", " + pass_of(action.kind) + " of chunk " +
         std::to_string(action.chunk) + " for micro-batch " + std::to_string(action.micro_batch);
}

void PipelineExecutor::check_sent() const {
  for (const Sent& sent : sent_) {
    if (sent.counter.current_version() == sent.version) continue;
    throw ConfigError(place_of(sent.action) +
                      ": what it gave to the next rank was modified in place while it was being sent; give a "
                      "clone, which is not modified.");
  }
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
