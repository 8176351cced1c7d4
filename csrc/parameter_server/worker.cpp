#include <ATen/core/grad_mode.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/empty_like.h>
#include <ATen/ops/tensor.h>
#include <ATen/ops/zeros.h>
#include <torch/nn/module.h>

#include <algorithm>
#include <functional>
#include <set>
#include <sstream>
#include <torch/csrc/distributed/c10d/ProcessGroup.hpp>

#include "async_updates/slice.h"
#include "distributed/group_use.h"
#include "distributed/members.h"
#include "parameter_server/bring_up.h"
#include "parameter_server/watch.h"
#include "reef/error.h"
#include "reef/numerics.h"
#include "reef/parameter_server.h"
#include "reef/point_to_point.h"

namespace reef {
namespace {

using at::Tensor;
using Ask = AsyncWire::Ask;

constexpr int kServer = 0;  // in its pair

/// Once each, and those that are exchanged.
AsyncWorker::Named exchanged_of(const torch::nn::Module& module) {
  AsyncWorker::Named named;
  std::set<const void*> seen;
  for (const auto& item : module.named_parameters()) {
    if (item.value().requires_grad() && seen.insert(item.value().unsafeGetTensorImpl()).second)
      named.emplace_back(item.key(), item.value());
  }
  return named;
}

std::vector<int> first_ranks(int count) {
  std::vector<int> ranks;
  for (int rank = 0; rank < count; ++rank) ranks.push_back(rank);
  return ranks;
}

}  // namespace

struct AsyncWorker::State {
  State(const ProcessGroupPtr& of_group, const AsyncOptions& options, const Named& of)
      : group(of_group),
        parameters(of),
        plan(bring_up_async(of_group, options, &parameters)),
        flat(at::zeros({plan.layout.elements(0)}, at::kFloat)) {
    for (const auto& [name, parameter] : parameters) sizes.push_back(parameter.sizes().vec());
    watch = std::make_unique<Watch>(group, first_ranks(options.servers),
                                    [this](Watch::Found found, int rank, const std::string&) {
                                      if (found == Watch::Found::kSilent) state_silence(group, rank);
                                      for (const auto& of_pair : plan.pairs) of_pair->fail();
                                    });
    if (group->getRank() != plan.rank_of_worker(0)) return;
    read_parameters();
    talk("making an AsyncWorker", [&] {
      for (int server = 0; server < options.servers; ++server)
        send(slice(server), kServer, pair(server), AsyncWire::kFirst);
    });
  }

  const ProcessGroupPtr& pair(int server) const {
    return plan.pairs[static_cast<std::size_t>(server)]->group;
  }
  Tensor slice(int server) const {
    return flat.narrow(0, plan.layout.begin(0, server), plan.slice_elements());
  }
  Tensor place(std::size_t parameter) const {
    const ShardPiece& piece = plan.layout.buckets.front().items[parameter];
    return flat.narrow(0, piece.offset, piece.elements).view(sizes[parameter]);
  }

  void read_parameters() const {
    const at::NoGradGuard no_grad;
    for (std::size_t i = 0; i < parameters.size(); ++i) place(i).copy_(parameters[i].second);
  }
  void write_parameters() const {
    const at::NoGradGuard no_grad;
    for (std::size_t i = 0; i < parameters.size(); ++i) parameters[i].second.copy_(place(i));
  }

  void check_parameters(const std::string& call) const {
    for (std::size_t i = 0; i < parameters.size(); ++i) {
      const auto& [name, parameter] = parameters[i];
      if (parameter.sizes() == at::IntArrayRef(sizes[i]) && parameter.scalar_type() == at::kFloat) continue;
      std::ostringstream text;
      text << call << ": parameter " << name << " has become " << parameter.scalar_type() << " "
           << parameter.sizes() << ", and was Float " << at::IntArrayRef(sizes[i])
           << ": make another AsyncWorker, and servers, of the module as it is.";
      throw ConfigError(text.str());
    }
  }

  void read_gradients() const {
    const at::NoGradGuard no_grad;
    bool any = false;
    for (std::size_t i = 0; i < parameters.size(); ++i) {
      const auto& [name, parameter] = parameters[i];
      const Tensor gradient = parameter.grad();
      if (!gradient.defined()) {
        place(i).zero_();
        continue;
      }
      any = true;
      if (gradient.layout() != at::kStrided || gradient.scalar_type() != at::kFloat)
        throw ConfigError("AsyncWorker::push: the gradient of " + name + " is not dense, or not of Float.");
      place(i).copy_(gradient);
    }
    if (!any) throw ConfigError("AsyncWorker::push: no parameter has a gradient: run backward first.");
  }

  void check_finite(const std::string& what) const {
    for (std::size_t i = 0; i < parameters.size(); ++i) {
      const std::int64_t wrong = count_nonfinite(place(i));
      if (wrong == 0) continue;
      throw NonFiniteGradient(
          "AsyncWorker::push: " + std::to_string(wrong) + " elements of " + what + parameters[i].first +
          " are NaN or infinite; nothing has been sent: leave the batch out, or lower the "
          "learning rate.");
    }
  }

  /// What goes wrong on the way is a server that is gone: for all calls from then on.
  void talk(const std::string& call, const std::function<void()>& exchange) {
    if (failed) std::rethrow_exception(failed);
    if (finished) throw ConfigError(call + ": this worker has finished.");
    try {
      exchange();
    } catch (const RankFailed& error) {
      failed = rank_failed(*group, call, error);
      watch.reset();
      for (const auto& of_pair : plan.pairs) of_pair->fail();  // what is still under way
      plan.pairs.clear();
      std::rethrow_exception(failed);
    }
  }

  struct Answers {
    bool removed = false;
    std::int64_t clock = 0;  ///< the highest
  };
  /// Asks all servers, and takes all their answers: `brings` a slice each, into `to`.
  Answers ask(const std::string& call, Ask what, bool brings = false, const Tensor& to = {}) {
    Answers answers;
    talk(call, [&] {
      const Tensor asked = at::tensor({static_cast<std::int64_t>(what), clock}, at::kLong);
      std::vector<Message> sent;
      for (int server = 0; server < plan.options.servers; ++server) {
        sent.push_back(isend(asked, kServer, pair(server), AsyncWire::kAsk));
        if (what == Ask::kPush)
          sent.push_back(isend(slice(server), kServer, pair(server), AsyncWire::kSlice));
      }
      for (int server = 0; server < plan.options.servers; ++server) {
        const Tensor answer = at::empty({2}, at::kLong);
        receive_into(answer, kServer, pair(server), AsyncWire::kAnswer);
        const auto* numbers = answer.const_data_ptr<std::int64_t>();
        const bool done = numbers[0] == static_cast<std::int64_t>(AsyncWire::Answer::kDone);
        answers.removed |= !done;
        answers.clock = std::max(answers.clock, numbers[1]);
        if (done && brings)
          receive_into(to.narrow(0, plan.layout.begin(0, server), plan.slice_elements()), kServer,
                       pair(server), AsyncWire::kSlice);
      }
      for (const Message& message : sent) message.wait();
    });
    return answers;
  }

  /// Of those that only a worker that is there may do.
  void refuse_if_removed(const std::string& call, const Answers& answers) {
    if (!answers.removed) return;
    standing = Standing::kAway;
    throw WorkerRemoved(
        "rank " + std::to_string(group->getRank()) + " of " + std::to_string(group->getSize()) + ": " + call +
        " came from a worker that the servers go on without, as it had given no sign of life: "
        "call join() and pull(), and go on with the next batch.");
  }

  void check_standing(const std::string& call) const {
    if (standing == Standing::kAway && !failed)
      throw ConfigError(call + ": this worker has left: call join() first.");
  }

  enum class Standing : std::uint8_t { kToPull, kToPush, kAway };

  const ProcessGroupPtr group;
  const Named parameters;
  AsyncPlan plan;
  Tensor flat;
  std::vector<std::vector<std::int64_t>> sizes;
  Standing standing = Standing::kToPull;
  std::int64_t clock = 0;
  bool finished = false;
  std::exception_ptr failed;
  std::unique_ptr<Watch> watch;
};

WorkerRemoved::WorkerRemoved(const std::string& message)
    : c10::DistError(c10::SourceLocation{"WorkerRemoved", "reef", 0}, message) {}

using Standing = AsyncWorker::State::Standing;

AsyncWorker::AsyncWorker(const torch::nn::Module& module, const ProcessGroupPtr& group,
                         const AsyncOptions& options)
    : AsyncWorker(exchanged_of(module), group, options) {}
AsyncWorker::AsyncWorker(const Named& parameters, const ProcessGroupPtr& group, const AsyncOptions& options)
    : state_(std::make_unique<State>(group, options, parameters)) {}

AsyncWorker::~AsyncWorker() {
  if (state_->finished || state_->failed) return;
  try {
    finish();
  } catch (const std::exception&) {
    // Nobody is left to hear it.
  }
}

void AsyncWorker::pull() {
  const std::string call = "AsyncWorker::pull";
  State& own = *state_;
  own.check_standing(call);
  own.check_parameters(call);
  own.refuse_if_removed(call, own.ask(call, Ask::kPull, /*brings=*/true, own.flat));
  own.write_parameters();
  own.standing = Standing::kToPush;
}

void AsyncWorker::push() {
  const std::string call = "AsyncWorker::push";
  State& own = *state_;
  own.check_standing(call);
  if (own.standing == Standing::kToPull && !own.failed && !own.finished)
    throw ConfigError(call + ": what is pushed is made of what was pulled, once: call pull() first.");
  own.check_parameters(call);
  const bool elastic = own.plan.options.rule == AsyncRule::kElastic;
  if (elastic) {
    own.read_parameters();
    own.check_finite("");
    const Tensor center = at::empty_like(own.flat);
    own.refuse_if_removed(call, own.ask(call, Ask::kPush, /*brings=*/true, center));
    const auto count = static_cast<std::size_t>(own.flat.numel());
    exchange_elastically(elasticity_of(own.plan.options, own.plan.workers),
                         {own.flat.mutable_data_ptr<float>(), count},
                         {center.const_data_ptr<float>(), count});
    own.write_parameters();
  } else {
    own.read_gradients();
    own.check_finite("the gradient of ");
    const State::Answers answers = own.ask(call, Ask::kPush);
    for (const auto& [name, parameter] : own.parameters) parameter.mutable_grad().reset();
    own.refuse_if_removed(call, answers);
    own.standing = Standing::kToPull;
  }
  ++own.clock;
}

void AsyncWorker::leave() {
  state_->check_standing("AsyncWorker::leave");
  state_->ask("AsyncWorker::leave", Ask::kLeave);
  state_->standing = Standing::kAway;
}

void AsyncWorker::join() {
  const std::string call = "AsyncWorker::join";
  State& own = *state_;
  own.clock = std::max(own.clock, own.ask(call, Ask::kJoin).clock);
  own.refuse_if_removed(call, own.ask(call, Ask::kClock));
  own.standing = Standing::kToPull;
}

void AsyncWorker::finish() {
  if (state_->finished) return;
  state_->ask("AsyncWorker::finish", Ask::kFinish);
  state_->finished = true;
  state_->watch.reset();
}

std::int64_t AsyncWorker::clock() const { return state_->clock; }

}  // namespace reef
