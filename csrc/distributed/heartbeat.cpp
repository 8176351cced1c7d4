#include "distributed/heartbeat.h"

#include <algorithm>
#include <condition_variable>
#include <future>
#include <list>
#include <map>
#include <mutex>
#include <optional>
#include <torch/csrc/distributed/c10d/Backend.hpp>
#include <torch/csrc/distributed/c10d/Store.hpp>
#include <torch/csrc/distributed/c10d/Work.hpp>
#include <unordered_map>
#include <utility>
#include <vector>

#include "distributed/connection.h"

namespace reef {
namespace {

constexpr int kBeats = 10;  // in the time after which a rank counts as silent
constexpr int kWatched = 4;
constexpr const char* kLeft = "left";  // has let its groups go, and will not beat again
constexpr int kUnanswered = 3;         // looks, of two intervals each, after which the store counts as silent

std::string key_of(int rank) { return "beat/" + std::to_string(rank); }

// A beat is its number, and what calls this rank has made, if it stands still.
std::string beat_of(std::int64_t number, const std::string& calls) {
  return std::to_string(number) + '\n' + calls;
}
// Of these ranks, by one question.
std::map<int, std::string> beats_of(c10d::Store& store, const std::vector<int>& ranks) {
  std::vector<std::string> keys;
  for (const int rank : ranks) keys.push_back(key_of(rank));
  const auto values = keys.empty() ? std::vector<std::vector<std::uint8_t>>() : store.multiGet(keys);
  std::map<int, std::string> beats;
  for (std::size_t i = 0; i < ranks.size(); ++i) beats[ranks[i]] = {values[i].begin(), values[i].end()};
  return beats;
}
std::string calls_of(const std::string& beat) {
  const auto end = beat.find('\n');
  return end == std::string::npos ? "" : beat.substr(end + 1);
}

}  // namespace

struct Heartbeat::Shared {
  std::mutex mutex;
  std::condition_variable changed;
  bool closing = false;
  bool failed = false;
  std::string stopped_by;
  std::unordered_map<c10d::Work*, int> messages;  ///< that are waited for, by how many
  std::unordered_map<c10d::Work*, c10d::Backend*>
      collectives;  ///< that are waited for, and gloo of their group
  int waiting = 0;
  int programs = 0;  ///< of these, the program's own

  // A wait begins (1) or is over (-1); with the lock.
  void count(int change) {
    waiting += change;
    if (!ServesProgram::is_on()) programs += change;
  }

  std::mutex looks_mutex;  ///< held while they are called
  std::list<std::function<void()>> looks;

  void fail() {
    const std::lock_guard lock(mutex);
    failed = true;
    for (const auto& [work, count] : messages) work->abort();  // its wait() returns false
    changed.notify_all();
  }
  // Returns whether a rank of such a collective's group has closed its connection. The lock must be held.
  bool collective_is_cut_off() const {
    return std::any_of(collectives.begin(), collectives.end(), [](const auto& each) {
      c10d::Backend& gloo = *each.second;
      for (int rank = 0; rank < gloo.getSize(); ++rank)
        if (rank != gloo.getRank() && !is_connected(gloo, rank)) return true;
      return false;
    });
  }

  [[noreturn]] static void refuse() {
    throw Silence("a rank gives no sign of life, has failed or does not come here");
  }
};

struct Heartbeat::Watch {
  StorePtr store;
  std::string own_key;
  std::string stop_key;
  std::vector<int> ranks;
  milliseconds silence;
  Findings found;
  std::shared_ptr<CallOrder> calls;

  struct Seen {
    std::string stopped_by;
    std::vector<std::string> beats;   ///< of `ranks`; empty if they were not looked at
    std::optional<std::string> text;  ///< of ranks that are out of step
  };
  /// On a thread of its own, since a store may not answer.
  std::future<Seen> ask(const std::string& beat, bool at_others) const {
    std::packaged_task<Seen()> task(
        [store = store, own = own_key, stop = stop_key, ranks = ranks, calls = calls, beat, at_others] {
          Seen seen;
          store->set(own, beat);
          if (!at_others) return seen;
          if (store->check({stop})) seen.stopped_by = store->get_to_str(stop);
          std::vector<int> looked_at = calls->watched();
          looked_at.insert(looked_at.end(), ranks.begin(), ranks.end());
          std::map<int, std::string> beats = beats_of(*store, looked_at);
          seen.text = out_of_step(*store, *calls, beats);
          for (const int rank : ranks) seen.beats.push_back(std::move(beats[rank]));
          return seen;
        });
    auto answer = task.get_future();
    std::thread(std::move(task)).detach();
    return answer;
  }

  static std::optional<std::string> out_of_step(c10d::Store& store, const CallOrder& calls,
                                                const std::map<int, std::string>& beats) {
    for (const auto& [rank, beat] : beats) {
      const auto difference = calls.difference(calls_of(beat));
      if (!difference) continue;
      std::map<int, std::string> records;
      for (const auto& [of, theirs] : beats_of(store, difference->ranks)) records[of] = calls_of(theirs);
      return calls.text(*difference, records);
    }
    return std::nullopt;
  }
};

Heartbeat::Heartbeat(const StorePtr& store, int rank, int size, milliseconds silence, std::string stop_key,
                     Findings found)
    : shared_(std::make_shared<Shared>()),
      calls_(std::make_shared<CallOrder>(rank)),
      silence_(silence),
      store_(store->clone()) {
  Watch watch{store_, key_of(rank), std::move(stop_key), {}, silence, std::move(found), calls_};
  for (int i = 1; i <= std::min(kWatched, size - 1); ++i) watch.ranks.push_back((rank + i) % size);
  watch.store->set(watch.own_key, beat_of(0, ""));
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
  std::string calls;
  bool program_waits = false;
  bool out_of_step = false;  // at the last look: by the next one others have told where they are
  for (std::int64_t beat = 1;; ++beat) {
    bool waits = false;
    const bool program_waited = program_waits;
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
      program_waits = shared_->programs > 0;
    }
    if (program_waits && program_waited) {
      const std::lock_guard lock(shared_->looks_mutex);
      for (const auto& look : shared_->looks) look();
    }
    try {
      const std::string before = std::exchange(calls, watch.calls->record());
      if (!answer.valid()) answer = watch.ask(beat_of(beat, calls == before ? calls : ""), waits);
      const bool answered = answer.wait_for(interval) == std::future_status::ready;
      unanswered = answered || !waits ? 0 : unanswered + 1;
      bool failed = unanswered == kUnanswered;
      if (answered) {
        const Watch::Seen seen = answer.get();
        std::string stopped_by = seen.stopped_by;
        if (!waits || seen.beats.empty()) std::fill(same.begin(), same.end(), 0);
        for (std::size_t i = 0; waits && stopped_by.empty() && i < seen.beats.size(); ++i) {
          same[i] = seen.beats[i] == last[i] && last[i] != kLeft ? same[i] + 1 : 0;
          if (same[i] < kBeats) continue;
          stopped_by = watch.found.silent(watch.ranks[i]);
        }
        if (waits && stopped_by.empty() && seen.text && out_of_step) {
          stopped_by = watch.found.out_of_step(*seen.text);
        }
        failed = !stopped_by.empty();
        if (failed) {
          const std::lock_guard lock(shared_->mutex);
          shared_->stopped_by = stopped_by;
        }
        out_of_step = seen.text.has_value();
        last = seen.beats.empty() ? last : seen.beats;
      }
      if (failed) return shared_->fail();
    } catch (const std::exception&) {
      return run_without_store(interval);  // it is closed: the rank that served it has ended
    }
  }
}

// Who waits for a message hears of a rank that fails by the connection. A collective may go on without a rank
// that has done its part of it and ended, but not for long.
void Heartbeat::run_without_store(milliseconds interval) {
  for (int cut_off = 0; cut_off < kBeats;) {
    std::unique_lock lock(shared_->mutex);
    shared_->changed.wait_for(lock, interval, [&] { return shared_->closing; });
    if (shared_->closing || shared_->failed) return;
    cut_off = shared_->collective_is_cut_off() ? cut_off + 1 : 0;
  }
  shared_->fail();
}

void Heartbeat::wait_for_message(const WorkPtr& work, c10d::Backend& gloo, int rank) {
  {
    const std::lock_guard lock(shared_->mutex);
    if (shared_->failed) Shared::refuse();
    ++shared_->messages[work.get()];
    shared_->count(1);
  }
  const auto over = [&] {
    const std::lock_guard lock(shared_->mutex);
    if (--shared_->messages[work.get()] == 0) shared_->messages.erase(work.get());
    shared_->count(-1);
    return shared_->failed;
  };
  bool arrived = false;
  try {
    arrived = wait_connected(*work, gloo, rank);
  } catch (...) {
    over();
    throw;
  }
  if (over() && !arrived) Shared::refuse();
}

void Heartbeat::wait_for_collective(const WorkPtr& work, c10d::Backend& gloo) {
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
    shared_->count(1);
    shared_->collectives[work.get()] = &gloo;
    shared_->changed.wait(lock, [&] { return *done || shared_->failed; });
    shared_->collectives.erase(work.get());
    shared_->count(-1);
    if (!*done) Shared::refuse();
  }
  work->wait();
}

void Heartbeat::fail() { shared_->fail(); }

std::string Heartbeat::stopped_by() const {
  const std::lock_guard lock(shared_->mutex);
  return shared_->stopped_by;
}

std::shared_ptr<void> Heartbeat::while_waiting(std::function<void()> look) {
  const std::lock_guard lock(shared_->looks_mutex);
  const auto at = shared_->looks.insert(shared_->looks.end(), std::move(look));
  return {nullptr, [shared = shared_, at](void*) {
            const std::lock_guard locked(shared->looks_mutex);
            shared->looks.erase(at);
          }};
}

std::function<std::vector<std::string>()> Heartbeat::beats_reader(std::vector<int> ranks) const {
  return [store = store_, ranks = std::move(ranks)] {
    std::vector<std::string> beats;
    for (auto& [rank, beat] : beats_of(*store, ranks)) beats.push_back(beat == kLeft ? "" : beat);
    return beats;
  };
}

void Heartbeat::check() const {
  const std::lock_guard lock(shared_->mutex);
  if (shared_->failed) Shared::refuse();
}

}  // namespace reef
