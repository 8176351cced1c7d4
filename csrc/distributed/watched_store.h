#pragma once

#include <functional>
#include <mutex>
#include <set>
#include <string>
#include <torch/csrc/distributed/c10d/PrefixStore.hpp>
#include <vector>

#include "deadline.h"
#include "distributed/store.h"

namespace reef {

/// For a backend that is coming up: waits for keys in small steps, and looks between them whether there is
/// still something to wait for. Remembers the keys that this process has set.
class WatchedStore final : public c10d::PrefixStore {
 public:
  /// `check` throws when it is of no use to wait any longer.
  WatchedStore(const StorePtr& store, std::function<void()> check, Deadline deadline);

  using c10d::PrefixStore::set;
  void set(const std::string& name, const std::vector<uint8_t>& value) override;
  void multiSet(const std::vector<std::string>& names,
                const std::vector<std::vector<uint8_t>>& values) override;
  void append(const std::string& name, const std::vector<uint8_t>& value) override;
  std::int64_t add(const std::string& name, std::int64_t value) override;
  std::vector<uint8_t> get(const std::string& name) override;
  std::vector<std::vector<uint8_t>> multiGet(const std::vector<std::string>& names) override;
  void wait(const std::vector<std::string>& names) override;
  void wait(const std::vector<std::string>& names, const milliseconds& timeout) override;

  /// When every rank has read what it wanted.
  void delete_own_keys();

 private:
  void await(const std::vector<std::string>& names, Deadline deadline);
  void remember(const std::string& name);

  std::function<void()> check_;
  Deadline deadline_;
  std::mutex mutex_;
  std::set<std::string> own_keys_;
};

}  // namespace reef
