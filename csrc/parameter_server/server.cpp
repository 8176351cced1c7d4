#include <ATen/core/grad_mode.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/zeros.h>
#include <c10/util/Exception.h>
#include <torch/optim/optimizer.h>

#include <algorithm>
#include <chrono>
#include <torch/csrc/distributed/c10d/ProcessGroup.hpp>

#include "async_updates/slice.h"
#include "distributed/group_use.h"
#include "distributed/members.h"
#include "parameter_server/bring_up.h"
#include "parameter_server/lanes.h"
#include "parameter_server/watch.h"
#include "reef/error.h"
#include "reef/parameter_server.h"
#include "reef/point_to_point.h"

namespace reef {
namespace {

using Ask = AsyncWire::Ask;
using Kind = AsyncArrival::Kind;

std::span<float> values_of(const at::Tensor& tensor) {
  return {tensor.mutable_data_ptr<float>(), static_cast<std::size_t>(tensor.numel())};
}

at::Tensor tensor_of(const std::vector<float>& values) {
  at::Tensor tensor = at::empty({static_cast<std::int64_t>(values.size())}, at::kFloat);
  std::copy(values.begin(), values.end(), tensor.mutable_data_ptr<float>());
  return tensor;
}

/// The first worker's, as it sends them when it has come up.
at::Tensor first_values(const AsyncPlan& plan, const ProcessGroupPtr& group) {
  at::Tensor values = at::zeros({plan.slice_elements()}, at::kFloat);
  try {
    receive_into(values, 1, plan.pairs.front()->group, AsyncWire::kFirst);
  } catch (const RankFailed& error) {
    std::rethrow_exception(rank_failed(*group, "making a ParameterServer", error));
  }
  return values.requires_grad_();
}

std::vector<int> ranks_between(int first, int end, int but) {
  std::vector<int> ranks;
  for (int rank = first; rank < end; ++rank) {
    if (rank != but) ranks.push_back(rank);
  }
  return ranks;
}

}  // namespace

struct ParameterServer::State {
  State(const ProcessGroupPtr& of_group, const AsyncOptions& options)
      : group(of_group),
        plan(bring_up_async(of_group, options, nullptr)),
        parameter(first_values(plan, of_group)),
        gradient(at::zeros({plan.slice_elements()}, at::kFloat)),
        slice(options, plan.workers, plan.slice_elements()),
        workers(static_cast<std::size_t>(plan.workers)),
        lanes(std::make_unique<AsyncLanes>(of_group, plan)),
        watch_workers(std::make_unique<Watch>(
            of_group, ranks_between(options.servers, of_group->getSize(), -1),
            [this](Watch::Found found, int rank, const std::string& text) {
              // Where one has ended, its connection tells.
              if (found == Watch::Found::kSilent && rank >= 0)
                lanes->put({Kind::kSilent, rank - plan.options.servers, {}, 0, {}, {}, text});
            })),
        watch_servers(std::make_unique<Watch>(of_group,
                                              ranks_between(0, options.servers, of_group->getRank()),
                                              [this](Watch::Found found, int rank, const std::string& text) {
                                                if (found == Watch::Found::kSilent)
                                                  state_silence(group, rank);
                                                lanes->put({Kind::kServerGone, rank, {}, 0, {}, {}, text});
                                              })) {}

  enum class Standing : std::uint8_t { kPresent, kAway, kSilent, kFinished, kGone };
  struct Worker {
    Standing standing = Standing::kPresent;
    std::shared_ptr<std::promise<AsyncAnswer>> waits;  ///< for its turn
  };

  Worker& of(int worker) { return workers[static_cast<std::size_t>(worker)]; }
  AsyncSlice::Values values() const { return {values_of(parameter), values_of(gradient)}; }
  bool any(Standing standing) const {
    return std::any_of(workers.begin(), workers.end(),
                       [=](const Worker& each) { return each.standing == standing; });
  }

  std::optional<double> next() {
    if (failed) std::rethrow_exception(failed);
    if (step_due) slice.stepped();
    step_due = false;
    for (;;) {
      answer_those_whose_turn_it_is();
      if (!any(Standing::kPresent) && !any(Standing::kAway)) return end();
      const AsyncArrival arrival = lanes->next();
      const std::chrono::duration<double> seconds = std::chrono::steady_clock::now() - begin;
      slice.set_seconds(seconds.count());
      if (const auto rate = take(arrival)) {
        const at::NoGradGuard no_grad;
        step_due = true;
        parameter.mutable_grad() = gradient;
        return rate;
      }
    }
  }

  std::optional<double> end() {
    if (any(Standing::kFinished)) return std::nullopt;
    // They may have failed as another server is gone: whoever found that out has said so in the store.
    fail(rank_failed(
        *group, "ParameterServer::serve",
        std::runtime_error("no worker is left, and none has finished: " + removed.front().second)));
  }

  [[noreturn]] void fail(std::exception_ptr error) {
    failed = std::move(error);
    watch_workers.reset();
    watch_servers.reset();
    lanes.reset();
    plan.pairs.clear();
    std::rethrow_exception(failed);
  }

  void answer_those_whose_turn_it_is() {
    for (int worker = 0; worker < plan.workers; ++worker) {
      auto& waits = of(worker).waits;
      if (!waits) continue;
      const auto given = slice.pull(worker, values());
      if (!given) continue;
      waits->set_value({AsyncWire::Answer::kDone, slice.clocks().clock(worker), tensor_of(given->values)});
      waits.reset();
    }
  }

  /// The rate of a step that is due.
  std::optional<double> take(const AsyncArrival& arrival) {
    switch (arrival.kind) {
      case Kind::kAsked:
        return answer(arrival);
      case Kind::kGone:
        return remove(arrival, Standing::kGone);
      case Kind::kSilent:
        return remove(arrival, Standing::kSilent);
      case Kind::kServerGone:
        fail(rank_failed(*group, "ParameterServer::serve", std::runtime_error(arrival.text)));
    }
    return std::nullopt;
  }

  std::optional<double> remove(const AsyncArrival& arrival, Standing standing) {
    Worker& worker = of(arrival.worker);
    const Standing before = worker.standing;
    if (before == Standing::kFinished || before == Standing::kGone) return std::nullopt;
    if (standing == Standing::kSilent && before != Standing::kPresent) return std::nullopt;
    worker.standing = standing;
    if (worker.waits) worker.waits->set_value({AsyncWire::Answer::kRemoved, 0, {}});
    worker.waits.reset();
    if (before == Standing::kPresent || before == Standing::kAway) {
      removed.emplace_back(plan.rank_of_worker(arrival.worker), arrival.text);
      TORCH_WARN("reef::ParameterServer on rank ", group->getRank(),
                 " goes on without a worker: ", arrival.text, ".");
    }
    if (before != Standing::kPresent) return std::nullopt;
    return slice.leave(arrival.worker, values());
  }

  std::optional<double> answer(const AsyncArrival& asked) {
    Worker& worker = of(asked.worker);
    const bool present = worker.standing == Standing::kPresent;
    std::optional<double> rate;
    AsyncAnswer answer;
    switch (asked.ask) {
      case Ask::kPull:
        if (present) worker.waits = asked.answer;
        break;
      case Ask::kPush:
        if (!present) break;
        rate = slice.push(asked.worker, values_of(asked.pushed), values());
        if (plan.options.rule == AsyncRule::kElastic) worker.waits = asked.answer;
        break;
      case Ask::kLeave:
      case Ask::kFinish:
        worker.standing = asked.ask == Ask::kLeave ? Standing::kAway : Standing::kFinished;
        if (present) rate = slice.leave(asked.worker, values());
        break;
      case Ask::kJoin:
        if (!present) slice.join(asked.worker);
        worker.standing = Standing::kPresent;
        break;
      case Ask::kClock:
        if (present) rate = slice.set_clock(asked.worker, asked.clock, values());
        break;
    }
    if (worker.waits) return rate;
    const bool needs_presence =
        asked.ask == Ask::kPull || asked.ask == Ask::kPush || asked.ask == Ask::kClock;
    if (needs_presence && !present) answer.answer = AsyncWire::Answer::kRemoved;
    answer.clock = slice.clocks().clock(asked.worker);
    asked.answer->set_value(answer);
    return rate;
  }

  const ProcessGroupPtr group;
  AsyncPlan plan;
  at::Tensor parameter;
  at::Tensor gradient;
  AsyncSlice slice;
  bool step_due = false;
  std::vector<Worker> workers;
  std::vector<std::pair<int, std::string>> removed;
  std::chrono::steady_clock::time_point begin = std::chrono::steady_clock::now();
  std::exception_ptr failed;
  std::unique_ptr<AsyncLanes> lanes;  // ends after who tells it, and before what they look at
  std::unique_ptr<Watch> watch_workers;
  std::unique_ptr<Watch> watch_servers;
};

ParameterServer::ParameterServer(const ProcessGroupPtr& group, const AsyncOptions& options)
    : state_(std::make_unique<State>(group, options)) {}
ParameterServer::~ParameterServer() = default;

const at::Tensor& ParameterServer::parameter() const { return state_->parameter; }
const AsyncLog& ParameterServer::log() const { return state_->slice.log(); }
const std::vector<std::pair<int, std::string>>& ParameterServer::removed() const { return state_->removed; }

std::optional<double> ParameterServer::next() { return state_->next(); }

void ParameterServer::serve(torch::optim::Optimizer& optimizer) {
  if (state_->plan.options.rule == AsyncRule::kElastic)
    throw ConfigError(
        "ParameterServer::serve was given an optimizer, and the rule is elastic: workers have theirs, and "
        "the "
        "server none.");
  while (const auto rate = next()) {
    std::vector<double> rates;
    for (auto& of : optimizer.param_groups()) {
      rates.push_back(of.options().get_lr());
      if (*rate != 1.0) of.options().set_lr(rates.back() * *rate);
    }
    optimizer.step();
    for (std::size_t i = 0; i < rates.size() && *rate != 1.0; ++i)
      optimizer.param_groups()[i].options().set_lr(rates[i]);
  }
}

void ParameterServer::serve() {
  if (state_->plan.options.rule != AsyncRule::kElastic)
    throw ConfigError("ParameterServer::serve was given no optimizer: only the elastic rule needs none.");
  while (next()) {
  }
}

}  // namespace reef
