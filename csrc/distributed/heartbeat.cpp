#include "distributed/heartbeat.h"

#include <algorithm>
#include <condition_variable>
#include <future>
#include <mutex>
#include <torch/csrc/distributed/c10d/Store.hpp>
#include <torch/csrc/distributed/c10d/Work.hpp>
#include <unordered_map>
#include <utility>
#include <vector>

namespace reef {
namespace {

constexpr int kBeats = 10;  // in the time after which a rank counts as silent
constexpr int kWatched = 4;
constexpr const char* kLeft = "left";  // has let its groups go, and will not beat again
constexpr int kUnanswered = 3;         // looks, of two intervals each, after which the store counts as silent

std::string key_of(int rank) { return "beat/" + std::to_string(rank); }

}  // namespace

struct Heartbeat::Shared {
  std::mutex mutex;
  std::condition_variable changed;
  bool closing = false;
  bool failed = false;
  std::unordered_map<c10d::Work*, int> messages;  ///< that are waited for, by how many
  int waiting = 0;

  void fail() {
    const std::lock_guard lock(mutex);
    failed = true;
    for (const auto& [work, count] : messages) work->abort();  // its wait() returns false
    changed.notify_all();
  }
  [[noreturn]] static void refuse() { throw Silence("a rank gives no sign of life, or has failed"); }
};

struct Heartbeat::Watch {
  StorePtr store;
  std::string own_key;
  std::string stop_key;
  std::vector<int> ranks;
  milliseconds silence;
  std::function<void(int)> found;

  struct Seen {
    bool stopped = false;
    std::vector<std::string> beats;  ///< of `ranks`; empty if they were not looked at
  };
  /// On a thread of its own, since a store may not answer.
  std::future<Seen> ask(std::int64_t beat, bool at_others) const {
    std::packaged_task<Seen()> task(
        [store = store, own = own_key, stop = stop_key, ranks = ranks, beat, at_others] {
          Seen seen;
          store->set(own, std::to_string(beat));
          if (!at_others) return seen;
          seen.stopped = store->check({stop});
          for (const int rank : ranks) seen.beats.push_back(store->get_to_str(key_of(rank)));
          return seen;
        });
    auto answer = task.get_future();
    std::thread(std::move(task)).detach();
    return answer;
  }
};

Heartbeat::Heartbeat(const StorePtr& store, int rank, int size, milliseconds silence, std::string stop_key,
                     std::function<void(int rank)> found)
    : shared_(std::make_shared<Shared>()) {
  Watch watch{store->clone(), key_of(rank), std::move(stop_key), {}, silence, std::move(found)};
  for (int i = 1; i <= std::min(kWatched, size - 1); ++i) watch.ranks.push_back((rank + i) % size);
  watch.store->set(watch.own_key, "0");
  thread_ = std::thread([this, watch = std::move(watch)] { run(watch); });
}

Heartbeat::~Heartbeat() {
  {
    const std::lock_guard lock(shared_->mutex);
    shared_->closing = true;
    shared_->changed.notify_all();
  }
  thread_.join();
}

// Others may go on in subgroups of their own.
void Heartbeat::say_left(const Watch& watch) {
  try {
    watch.store->set(watch.own_key, kLeft);
  } catch (const std::exception&) {
    // The store is closed.
  }
}

// Silence is counted in looks, not in time: this process may have been the one that slept.
void Heartbeat::run(Watch watch) {
  const milliseconds interval = watch.silence / kBeats;
  std::vector<std::string> last(watch.ranks.size());
  std::vector<int> same(watch.ranks.size());
  std::future<Watch::Seen> answer;
  int unanswered = 0;
  for (std::int64_t beat = 1;; ++beat) {
    bool waits = false;
    {
      std::unique_lock lock(shared_->mutex);
      shared_->changed.wait_for(lock, interval, [&] { return shared_->closing; });
      if (shared_->failed) return;
      if (shared_->closing) {
        lock.unlock();
        const bool answers = !answer.valid() || answer.wait_for(milliseconds{0}) == std::future_status::ready;
        if (answers) say_left(watch);  // else it would be waited for, too
        return;
      }
      waits = shared_->waiting > 0;
    }
    try {
      if (!answer.valid()) answer = watch.ask(beat, waits);
      const bool answered = answer.wait_for(interval) == std::future_status::ready;
      unanswered = answered || !waits ? 0 : unanswered + 1;
      bool failed = unanswered == kUnanswered;
      if (answered) {
        const Watch::Seen seen = answer.get();
        failed = seen.stopped;
        if (!waits || seen.beats.empty()) std::fill(same.begin(), same.end(), 0);
        for (std::size_t i = 0; waits && !failed && i < seen.beats.size(); ++i) {
          same[i] = seen.beats[i] == last[i] && last[i] != kLeft ? same[i] + 1 : 0;
          if (same[i] < kBeats) continue;
          watch.found(watch.ranks[i]);
          failed = true;
        }
        last = seen.beats.empty() ? last : seen.beats;
      }
      if (failed) return shared_->fail();
    } catch (const std::exception&) {
      return;  // the store is closed: ranks end, and those that fail find it out by their connections
    }
  }
}

void Heartbeat::wait_for_message(const WorkPtr& work) {
  {
    const std::lock_guard lock(shared_->mutex);
    if (shared_->failed) Shared::refuse();
    ++shared_->messages[work.get()];
    ++shared_->waiting;
  }
  const auto over = [&] {
    const std::lock_guard lock(shared_->mutex);
    if (--shared_->messages[work.get()] == 0) shared_->messages.erase(work.get());
    --shared_->waiting;
    return shared_->failed;
  };
  bool arrived = false;
  try {
    arrived = work->wait();
  } catch (...) {
    over();
    throw;
  }
  if (over() && !arrived) Shared::refuse();
}

void Heartbeat::wait_for_collective(const WorkPtr& work) {
  const auto done = std::make_shared<bool>(false);
  c10::intrusive_ptr<c10::ivalue::Future> future;
  try {
    future = work->getFuture();
  } catch (const std::exception&) {
    work->wait();
    return;
  }
  future->addCallback([shared = shared_, done](c10::ivalue::Future&) {
    const std::lock_guard lock(shared->mutex);
    *done = true;
    shared->changed.notify_all();
  });
  {
    std::unique_lock lock(shared_->mutex);
    ++shared_->waiting;
    shared_->changed.wait(lock, [&] { return *done || shared_->failed; });
    --shared_->waiting;
    if (!*done) Shared::refuse();
  }
  work->wait();
}

void Heartbeat::fail() { shared_->fail(); }

}  // namespace reef
