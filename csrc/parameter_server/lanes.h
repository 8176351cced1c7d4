#pragma once

#include <ATen/core/Tensor.h>

#include <condition_variable>
#include <cstdint>
#include <deque>
#include <functional>
#include <future>
#include <memory>
#include <mutex>
#include <string>
#include <thread>
#include <vector>

#include "parameter_server/bring_up.h"

namespace reef {

/// What a worker is told.
struct AsyncAnswer {
  AsyncWire::Answer answer = AsyncWire::Answer::kDone;
  std::int64_t clock = 0;
  at::Tensor slice;  ///< undefined: none
};

/// Something that a server has to deal with.
struct AsyncArrival {
  enum class Kind : std::uint8_t {
    kAsked,
    kGone,        ///< a worker's connection has broken
    kSilent,      ///< a worker is silent
    kServerGone,  ///< another server has ended, or is silent
  };
  Kind kind = Kind::kAsked;
  int worker = 0;  ///< among the workers; kServerGone: a rank, or -1
  AsyncWire::Ask ask = AsyncWire::Ask::kPull;
  std::int64_t clock = 0;
  at::Tensor pushed;
  std::shared_ptr<std::promise<AsyncAnswer>> answer;
  std::string text;
};

/// A server's threads, one for each worker: each takes what its worker asks, waits for the answer, and sends
/// it. So all that is asked comes to the server's own thread in one order, which is that of its log.
class AsyncLanes {
 public:
  AsyncLanes(const ProcessGroupPtr& group, const AsyncPlan& plan);
  /// Sends the answers that there are, and closes the connections: whoever waits for another is told so.
  ~AsyncLanes();
  AsyncLanes(const AsyncLanes&) = delete;
  AsyncLanes& operator=(const AsyncLanes&) = delete;

  /// Waits for it.
  AsyncArrival next();
  void put(AsyncArrival arrival);

 private:
  void serve(int worker);
  void sent(int worker);

  const ProcessGroupPtr group_;
  AsyncPlan plan_;
  std::mutex mutex_;
  std::condition_variable changed_;
  std::deque<AsyncArrival> arrivals_;
  /// By worker: what it waits for, until that has been sent.
  std::vector<std::shared_ptr<std::promise<AsyncAnswer>>> asked_;
  bool closing_ = false;
  std::vector<std::thread> threads_;
};

}  // namespace reef
