#include "distributed/heartbeat.h"

#include <algorithm>
#include <condition_variable>
#include <map>
#include <mutex>
#include <optional>
#include <torch/csrc/distributed/c10d/Store.hpp>
#include <torch/csrc/distributed/c10d/Work.hpp>
#include <unordered_map>
#include <utility>
#include <vector>

namespace reef {
namespace {

constexpr int kBeats = 10;  // in the time after which a rank counts as silent
constexpr int kWatched = 4;

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
    std::vector<std::string> beats;  ///< of `ranks`
  };
  /// Nullopt: the store does not answer. It is asked twice: this process may have been the one that slept.
  std::optional<Seen> look(std::int64_t beat, bool at_others) const {
    const auto ask = [store = store, own = own_key, stop = stop_key, ranks = ranks, beat, at_others] {
      Seen seen;
      store->set(own, std::to_string(beat));
      if (!at_others) return seen;
      seen.stopped = store->check({stop});
      for (const int rank : ranks) seen.beats.push_back(store->get_to_str(key_of(rank)));
      return seen;
    };
    for (int attempt = 0; attempt < 2; ++attempt) {
      if (auto seen = within(std::chrono::steady_clock::now() + silence * 3 / 10, ask)) return seen;
    }
    return std::nullopt;
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

void Heartbeat::run(Watch watch) {
  std::vector<std::string> last(watch.ranks.size());
  std::vector<int> same(watch.ranks.size());
  for (std::int64_t beat = 1;; ++beat) {
    bool waits = false;
    {
      std::unique_lock lock(shared_->mutex);
      shared_->changed.wait_for(lock, watch.silence / kBeats, [&] { return shared_->closing; });
      if (shared_->closing || shared_->failed) return;
      waits = shared_->waiting > 0;
    }
    try {
      const auto seen = watch.look(beat, waits);
      if (!waits) {
        std::fill(same.begin(), same.end(), 0);
        continue;
      }
      bool failed = !seen || seen->stopped;
      for (std::size_t i = 0; !failed && i < watch.ranks.size(); ++i) {
        same[i] = seen->beats[i] == last[i] ? same[i] + 1 : 0;
        if (same[i] < kBeats) continue;
        watch.found(watch.ranks[i]);
        failed = true;
      }
      if (failed) return shared_->fail();
      last = seen->beats;
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

}  // namespace reef
