#include "distributed/connection.h"

#include <ATen/core/grad_mode.h>
#include <ATen/ops/from_blob.h>
#include <ATen/record_function.h>
#include <c10/util/Exception.h>

#include <chrono>
#include <cstdint>
#include <iterator>
#include <list>
#include <mutex>
#include <string>
#include <thread>
#include <torch/csrc/distributed/c10d/Backend.hpp>
#include <torch/csrc/distributed/c10d/Work.hpp>
#include <vector>

#include "distributed/sigpipe.h"
#include "distributed/tag_space.h"
#include "fork.h"

namespace reef {
namespace {

constexpr std::chrono::milliseconds kInterval{500};
constexpr int kLooksBefore = 2;  // at a wait, before its connection is looked at: most are over by then
constexpr int kBroken = 2;       // looks that find it broken: what had arrived before has been taken by then
constexpr int kIdle = 20;        // looks without a wait, after which the thread ends

/// All waits for messages of this process, and a thread while there are any, which aborts those whose
/// connection is broken.
class ConnectionWatch final : private AtFork {
 public:
  struct Wait {
    c10d::Work* work;
    c10d::Backend* gloo;
    int rank;
    int looks = 0;
    int broken = 0;
  };
  using Place = std::list<Wait>::iterator;

  static ConnectionWatch& of_process() {
    static auto* const watch = new ConnectionWatch;  // its thread may live when the process ends
    return *watch;
  }

  Place begin(c10d::Work& work, c10d::Backend& gloo, int rank) {
    const std::lock_guard lock(mutex_);
    if (!has_thread_) std::thread([this] { serve(); }).detach();
    has_thread_ = true;
    waits_.push_back({&work, &gloo, rank});
    return std::prev(waits_.end());
  }
  /// Whether the connection was found broken.
  bool end(Place wait) {
    const std::lock_guard lock(mutex_);
    const bool broken = wait->broken == kBroken;
    waits_.erase(wait);
    return broken;
  }

 private:
  ConnectionWatch() : AtFork(Order::kTables) {}

  void serve() {
    const at::NoGradGuard no_grad;
    const at::DisableRecordFunctionGuard unobserved;
    for (int idle = 0;;) {
      std::this_thread::sleep_for(kInterval);
      const std::lock_guard lock(mutex_);
      idle = waits_.empty() ? idle + 1 : 0;
      has_thread_ = idle < kIdle;
      if (!has_thread_) return;
      for (Wait& wait : waits_) look_at(wait);
    }
  }

  static void look_at(Wait& wait) {
    if (wait.broken == kBroken || ++wait.looks <= kLooksBefore) return;
    wait.broken = is_connected(*wait.gloo, wait.rank) ? 0 : wait.broken + 1;
    if (wait.broken == kBroken) wait.work->abort();
  }

  void before_fork() override { mutex_.lock(); }
  void after_fork_in_parent() override { mutex_.unlock(); }
  void after_fork_in_child() override {
    waits_.clear();
    has_thread_ = false;
    mutex_.unlock();
  }

  std::mutex mutex_;  ///< held while connections are looked at: what is waited for lives until then
  std::list<Wait> waits_;
  bool has_thread_ = false;
};

}  // namespace

// A receive that is never answered: gloo refuses it at once where the connection is broken, and forgets it
// with its memory.
bool is_connected(c10d::Backend& gloo, int rank) {
  static std::uint8_t never_written = 0;
  const SigpipeBlocked blocked;
  std::vector<at::Tensor> nothing = {at::from_blob(&never_written, {1}, at::kByte)};
  try {
    gloo.recv(nothing, rank, TagSpace::kNeverSent);
    return true;
  } catch (const std::exception&) {
    return false;
  }
}

bool wait_connected(c10d::Work& work, c10d::Backend& gloo, int rank) {
  ConnectionWatch& watch = ConnectionWatch::of_process();
  const auto place = watch.begin(work, gloo, rank);
  bool arrived = false;
  try {
    arrived = work.wait();
  } catch (...) {
    watch.end(place);
    throw;
  }
  if (watch.end(place) && !arrived) {
    C10_THROW_ERROR(DistError, "the connection to rank " + std::to_string(rank) +
                                   " broke while a message was on its way");
  }
  return arrived;
}

}  // namespace reef
