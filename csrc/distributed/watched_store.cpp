#include "distributed/watched_store.h"

#include <c10/util/Exception.h>

#include <algorithm>
#include <thread>
#include <utility>

namespace reef {
namespace {

constexpr milliseconds kLookFirst{5};
constexpr milliseconds kLookLast{200};

}  // namespace

WatchedStore::WatchedStore(const StorePtr& store, std::function<void()> check, Deadline deadline)
    : c10d::PrefixStore("watched", store), check_(std::move(check)), deadline_(deadline) {}

void WatchedStore::set(const std::string& name, const std::vector<uint8_t>& value) {
  remember(name);
  c10d::PrefixStore::set(name, value);
}

void WatchedStore::multiSet(const std::vector<std::string>& names,
                            const std::vector<std::vector<uint8_t>>& values) {
  for (const auto& name : names) remember(name);
  c10d::PrefixStore::multiSet(names, values);
}

void WatchedStore::append(const std::string& name, const std::vector<uint8_t>& value) {
  remember(name);
  c10d::PrefixStore::append(name, value);
}

std::int64_t WatchedStore::add(const std::string& name, std::int64_t value) {
  remember(name);
  return c10d::PrefixStore::add(name, value);
}

std::vector<uint8_t> WatchedStore::get(const std::string& name) { return multiGet({name}).front(); }

// A key that was there may be gone: its rank deletes it when nobody waits for this any more.
std::vector<std::vector<uint8_t>> WatchedStore::multiGet(const std::vector<std::string>& names) {
  for (;;) {
    await(names, deadline_);
    std::vector<std::vector<uint8_t>> values;
    for (const auto& name : names) {
      if (auto value = value_of(*this, name)) values.push_back(std::move(*value));
    }
    if (values.size() == names.size()) return values;
  }
}

void WatchedStore::wait(const std::vector<std::string>& names) { await(names, deadline_); }

void WatchedStore::wait(const std::vector<std::string>& names, const milliseconds& timeout) {
  await(names, std::min(deadline_, std::chrono::steady_clock::now() + timeout));
}

void WatchedStore::delete_own_keys() {
  const std::lock_guard lock(mutex_);
  for (const auto& name : own_keys_) deleteKey(name);
  own_keys_.clear();
}

void WatchedStore::await(const std::vector<std::string>& names, Deadline deadline) {
  for (auto pause = kLookFirst; !check(names); pause = std::min(pause * 2, kLookLast)) {
    check_();
    if (has_passed(deadline)) {
      C10_THROW_ERROR(DistStoreError, "another rank's address did not appear in time");
    }
    std::this_thread::sleep_for(pause);
  }
}

void WatchedStore::remember(const std::string& name) {
  const std::lock_guard lock(mutex_);
  own_keys_.insert(name);
}

}  // namespace reef
