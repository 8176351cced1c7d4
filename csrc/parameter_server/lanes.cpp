#include "parameter_server/lanes.h"

#include <ATen/ops/empty.h>
#include <ATen/ops/tensor.h>

#include <algorithm>
#include <chrono>
#include <torch/csrc/distributed/c10d/ProcessGroup.hpp>
#include <utility>

#include "distributed/group_use.h"
#include "parameter_server/watch.h"
#include "reef/error.h"
#include "reef/point_to_point.h"

namespace reef {
namespace {

using Kind = AsyncArrival::Kind;
using Wire = AsyncWire;

constexpr int kWorker = 1;                         // in its pair
constexpr std::chrono::seconds kSendingTakes{10};  // to a worker that is there

/// Of a request or an answer: which, and a clock.
std::pair<std::int64_t, std::int64_t> numbers_of(const at::Tensor& message) {
  if (message.scalar_type() != at::kLong || message.numel() != 2)
    throw ConfigError("what a worker asks is not what this version of Reef asks: run the same on all ranks.");
  const auto* numbers = message.const_data_ptr<std::int64_t>();
  return {numbers[0], numbers[1]};
}

}  // namespace

AsyncLanes::AsyncLanes(const ProcessGroupPtr& group, const AsyncPlan& plan)
    : group_(group), plan_(plan), asked_(plan.pairs.size()) {
  for (int worker = 0; worker < plan.workers; ++worker)
    threads_.emplace_back([this, worker] { serve(worker); });
}

AsyncLanes::~AsyncLanes() {
  {
    std::unique_lock lock(mutex_);
    closing_ = true;
    for (const auto& answer : asked_) {
      if (!answer) continue;
      try {
        answer->set_exception(std::make_exception_ptr(ConfigError("the server has ended.")));
      } catch (const std::future_error&) {
        // It has its answer.
      }
    }
    changed_.wait_for(lock, kSendingTakes, [this] {
      return std::none_of(asked_.begin(), asked_.end(), [](const auto& answer) { return answer != nullptr; });
    });
  }
  for (const auto& pair : plan_.pairs) pair->fail();
  for (auto& thread : threads_) thread.join();
}

void AsyncLanes::put(AsyncArrival arrival) {
  const std::lock_guard lock(mutex_);
  if (arrival.answer) {
    if (closing_) throw ConfigError("the server has ended.");
    asked_[static_cast<std::size_t>(arrival.worker)] = arrival.answer;
  }
  arrivals_.push_back(std::move(arrival));
  changed_.notify_all();
}

void AsyncLanes::sent(int worker) {
  const std::lock_guard lock(mutex_);
  asked_[static_cast<std::size_t>(worker)].reset();
  changed_.notify_all();
}

AsyncArrival AsyncLanes::next() {
  std::unique_lock lock(mutex_);
  changed_.wait(lock, [this] { return !arrivals_.empty(); });
  AsyncArrival first = std::move(arrivals_.front());
  arrivals_.pop_front();
  return first;
}

void AsyncLanes::serve(int worker) {
  const ProcessGroupPtr& pair = plan_.pairs[static_cast<std::size_t>(worker)]->group;
  try {
    for (;;) {
      const auto [number, clock] = numbers_of(receive(kWorker, pair, Wire::kAsk));
      AsyncArrival arrival{Kind::kAsked, worker, static_cast<Wire::Ask>(number), clock, {}, {}, {}};
      if (arrival.ask == Wire::Ask::kPush) {
        arrival.pushed = at::empty({plan_.slice_elements()}, at::kFloat);
        receive_into(arrival.pushed, kWorker, pair, Wire::kSlice);
      }
      arrival.answer = std::make_shared<std::promise<AsyncAnswer>>();
      auto coming = arrival.answer->get_future();
      const bool last = arrival.ask == Wire::Ask::kFinish;
      put(std::move(arrival));
      const AsyncAnswer answer = coming.get();
      send(at::tensor({static_cast<std::int64_t>(answer.answer), answer.clock}, at::kLong), kWorker, pair,
           Wire::kAnswer);
      if (answer.slice.defined()) send(answer.slice, kWorker, pair, Wire::kSlice);
      sent(worker);
      if (last) return;
    }
  } catch (const std::exception& error) {
    sent(worker);
    {
      const std::lock_guard lock(mutex_);
      if (closing_) return;
    }
    const bool rank_gone = dynamic_cast<const RankFailed*>(&error) != nullptr;
    put({Kind::kGone,
         worker,
         {},
         0,
         {},
         {},
         rank_gone ? text_of_gone(group_, plan_.rank_of_worker(worker)) : message_of(error)});
  }
}

}  // namespace reef
