#include "fork.h"

#include <pthread.h>

#include <algorithm>
#include <vector>

namespace reef {
namespace {

struct Registry {
  struct Entry {
    AtFork::Order order;
    AtFork* what;
  };
  std::mutex mutex;
  std::vector<Entry> entries;  ///< by order
};

// Never destroyed: a process may fork until its very end.
Registry& registry() {
  static auto* const all = [] {
    auto* const made = new Registry;
    pthread_atfork(
        [] {
          registry().mutex.lock();
          for (const auto& entry : registry().entries) entry.what->before_fork();
        },
        [] {
          auto& entries = registry().entries;
          std::for_each(entries.rbegin(), entries.rend(),
                        [](const auto& entry) { entry.what->after_fork_in_parent(); });
          registry().mutex.unlock();
        },
        [] {
          auto& entries = registry().entries;
          std::for_each(entries.rbegin(), entries.rend(),
                        [](const auto& entry) { entry.what->after_fork_in_child(); });
          registry().mutex.unlock();
        });
    return made;
  }();
  return *all;
}

}  // namespace

AtFork::AtFork(Order order) {
  Registry& all = registry();
  const std::lock_guard lock(all.mutex);
  const auto after = std::upper_bound(all.entries.begin(), all.entries.end(), order,
                                      [](Order mine, const auto& entry) { return mine < entry.order; });
  all.entries.insert(after, {order, this});
}

AtFork::~AtFork() {
  Registry& all = registry();
  const std::lock_guard lock(all.mutex);
  std::erase_if(all.entries, [this](const auto& entry) { return entry.what == this; });
}

}  // namespace reef
