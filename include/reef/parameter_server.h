#pragma once

#include <ATen/core/Tensor.h>
#include <c10/util/Exception.h>

#include <cstdint>
#include <memory>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "reef/async_updates.h"
#include "reef/collectives.h"
#include "reef/export.h"

namespace torch::nn {
class Module;
}  // namespace torch::nn
namespace torch::optim {
class Optimizer;
}  // namespace torch::optim

namespace reef {

/// One server of asynchronous training: a rank of `group` that has a slice of the workers' parameters and
/// steps it with what they push. All ranks of the group make a ParameterServer or an AsyncWorker at the same
/// time; ranks 0 to options.servers - 1 are servers. Those that disagree about options, or about the
/// parameters, all throw the same ConfigError. The parameters are at first those of the first worker.
///
///   reef::ParameterServer server(group, {.staleness = 2});
///   torch::optim::Adam adam({server.parameter()}, 1e-3);
///   server.serve(adam);
///
/// A worker that has ended, or has given no sign of life for the group's heartbeat, leaves: the others go on.
/// A server that is gone is RankFailed on all ranks. Memory beside the parameter and its gradient: the slice
/// once per worker for what it pushes, and once more with kDelayCompensated or kElastic.
class REEF_API ParameterServer {
 public:
  /// Throws ConfigError, RankFailed, and ProcessGroupError where ranks cannot connect: on all ranks.
  explicit ParameterServer(const ProcessGroupPtr& group, const AsyncOptions& options = {});
  ~ParameterServer();
  ParameterServer(const ParameterServer&) = delete;
  ParameterServer& operator=(const ParameterServer&) = delete;

  /// The slice: float32, one-dimensional, on the CPU, a multiple of 256 elements. The workers' parameters lie
  /// in one flat vector, each from a multiple of 256 elements on, with zeros between, and every server has an
  /// equal part of it. For optimizers that treat elements one by one.
  const at::Tensor& parameter() const;

  /// Serves until no worker is left: all have finished, or are gone. Each time a step is due, the optimizer
  /// takes it, kStalenessAware with its learning rate divided meanwhile. Throws RankFailed if a server is
  /// gone, or every worker before it had finished.
  void serve(torch::optim::Optimizer& optimizer);
  /// kElastic: the server needs none.
  void serve();
  /// What serve() repeats: answers workers until parameter() has the gradient for a step, which the caller
  /// takes before the next call, with the learning rate times what is returned. nullopt: no worker is left.
  std::optional<double> next();

  /// What has been done so far, by which replay_async() does it again.
  const AsyncLog& log() const;
  /// Whom the server has removed: a worker's rank in the group, and why. One that comes back stays here.
  const std::vector<std::pair<int, std::string>>& removed() const;

  struct State;

 private:
  std::unique_ptr<State> state_;
};

/// The servers have taken this worker for gone, as it gave no sign of life, and have gone on without it: what
/// it wanted to push is dropped on a server that has. AsyncWorker::join() brings it back.
class REEF_API WorkerRemoved : public c10::DistError {
 public:
  explicit WorkerRemoved(const std::string& message);
};

/// A worker of asynchronous training; see ParameterServer.
///
///   reef::AsyncWorker worker(*model, group, {.staleness = 2});
///   for (...) {
///     worker.pull();
///     loss(*model, batch).backward();
///     worker.push();
///   }
///   worker.finish();
///
/// Parameters that require a gradient are exchanged: float32, dense. All calls throw RankFailed, from then
/// on, if a server is gone. Memory: the parameters once.
class REEF_API AsyncWorker {
 public:
  using Named = std::vector<std::pair<std::string, at::Tensor>>;
  AsyncWorker(const torch::nn::Module& module, const ProcessGroupPtr& group,
              const AsyncOptions& options = {});
  AsyncWorker(const Named& parameters, const ProcessGroupPtr& group, const AsyncOptions& options = {});
  /// finish(), and what that throws is lost.
  ~AsyncWorker();
  AsyncWorker(const AsyncWorker&) = delete;
  AsyncWorker& operator=(const AsyncWorker&) = delete;

  /// Writes the servers' present values into the parameters; waits where this worker is more than
  /// options.staleness pushes ahead of the slowest. Throws WorkerRemoved.
  void pull();
  /// Sends the gradients and takes them away (undefined ones count as zero), once after each pull. kElastic:
  /// exchanges parameters instead, as AsyncRule says, and needs no other pull; gradients are not touched, and
  /// it waits as pull() does. Throws ConfigError if there is no gradient or the parameters have changed in
  /// size or dtype, and NonFiniteGradient (kElastic: of parameters), both before anything is sent;
  /// WorkerRemoved.
  void push();

  /// Nobody waits for this worker until it joins again; the servers wait for that. What it has been given is
  /// forgotten: pull() comes first then.
  void leave();
  /// Comes back, after leave() or WorkerRemoved, at the clock of the slowest, or at its own if that is
  /// higher.
  void join();
  /// Nothing more will be pushed. The servers are done when all workers have said so.
  void finish();

  /// How often this worker has pushed, and more if it has joined later.
  std::int64_t clock() const;

  struct State;

 private:
  std::unique_ptr<State> state_;
};

}  // namespace reef
