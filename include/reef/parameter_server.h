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

/// One server of asynchronous training: a rank of `group` that keeps a slice of the workers' parameters and
/// steps it with what they push. All ranks of the group construct a ParameterServer or an AsyncWorker at the
/// same time; ranks 0 to options.servers - 1 are servers. If they disagree about options or parameters, all
/// of them throw the same ConfigError. The parameters start with the first worker's values.
///
///   reef::ParameterServer server(group, {.staleness = 2});
///   torch::optim::Adam adam({server.parameter()}, 1e-3);
///   server.serve(adam);
///
/// A worker that has ended, or has given no sign of life for the group's heartbeat, is removed, and the
/// others go on. If a server is gone, all ranks throw RankFailed. Memory beside the parameter and its
/// gradient: the bytes of the slice once for each worker, and once more with kDelayCompensated or kElastic.
class REEF_API ParameterServer {
 public:
  /// Throws ConfigError, RankFailed, or ProcessGroupError if ranks cannot connect, on all ranks.
  explicit ParameterServer(const ProcessGroupPtr& group, const AsyncOptions& options = {});
  ~ParameterServer();
  ParameterServer(const ParameterServer&) = delete;
  ParameterServer& operator=(const ParameterServer&) = delete;

  /// Gives the slice: float32, of one dimension, on the CPU, with a multiple of 256 elements. The workers'
  /// parameters lie in one flat vector, each at a multiple of 256 elements and with zeros between them, of
  /// which every server has an equal part. Its optimizer must treat elements one by one.
  const at::Tensor& parameter() const;

  /// Serves until all workers have finished or are gone, and lets the optimizer take each step that is due;
  /// with kStalenessAware its learning rate is divided for that step. Throws RankFailed if a server is gone,
  /// or if every worker is gone before it has finished.
  void serve(torch::optim::Optimizer& optimizer);
  /// The same for kElastic, which needs no optimizer.
  void serve();
  /// Answers workers until parameter() has the gradient for a step, which is what serve() repeats. The caller
  /// takes that step before the next call, with the learning rate times what is returned. Gives nullopt when
  /// no worker is left.
  std::optional<double> next();

  /// Gives what this server has done so far; replay_async() repeats it.
  const AsyncLog& log() const;
  /// Gives the workers that the server has removed, by rank in the group, and the reason of each. A worker
  /// that comes back stays in this list.
  const std::vector<std::pair<int, std::string>>& removed() const;

  struct State;

 private:
  std::unique_ptr<State> state_;
};

/// Thrown on a worker that gave no sign of life, so that servers have removed it and gone on without it. What
/// it wanted to push is dropped on every server that has. AsyncWorker::join() brings the worker back.
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
/// Exchanges the parameters that require a gradient, which must be dense float32. When a server is gone, this
/// and all later calls throw RankFailed. Memory: the bytes of the parameters once.
class REEF_API AsyncWorker {
 public:
  using Named = std::vector<std::pair<std::string, at::Tensor>>;
  AsyncWorker(const torch::nn::Module& module, const ProcessGroupPtr& group,
              const AsyncOptions& options = {});
  AsyncWorker(const Named& parameters, const ProcessGroupPtr& group, const AsyncOptions& options = {});
  /// Calls finish() and drops what that throws.
  ~AsyncWorker();
  AsyncWorker(const AsyncWorker&) = delete;
  AsyncWorker& operator=(const AsyncWorker&) = delete;

  /// Writes the servers' present values into the parameters. Waits while this worker is more than
  /// options.staleness pushes ahead of the slowest. Throws WorkerRemoved.
  void pull();
  /// Sends the gradients and makes them undefined; undefined ones count as zero. Call it once after each
  /// pull. With kElastic it exchanges parameters instead, as AsyncRule says: it needs no pull before it,
  /// leaves gradients alone, and waits as pull() does. Throws WorkerRemoved; and before anything is sent,
  /// ConfigError if there is no gradient or a parameter has changed its size or dtype, and NonFiniteGradient
  /// if a gradient (kElastic: a parameter) is not finite.
  void push();

  /// Leaves for a while: no worker waits for this one until it joins again, but the servers keep serving.
  /// Call pull() first after joining, as the parameters that it was given are forgotten.
  void leave();
  /// Comes back after leave() or WorkerRemoved, at the clock of the slowest worker, or at its own if that is
  /// higher.
  void join();
  /// Says that this worker will push no more. The servers are done when all workers have said so.
  void finish();

  /// Gives the number of times that this worker has pushed, and more if join() has set it forward.
  std::int64_t clock() const;

  struct State;

 private:
  std::unique_ptr<State> state_;
};

}  // namespace reef
