#pragma once

#include <condition_variable>
#include <cstdint>
#include <deque>
#include <functional>
#include <memory>
#include <mutex>
#include <utility>

namespace reef {

/// Does what it is given in the order of the calls, one after another. Has a thread only while there is
/// something to do that nobody waits for.
class MessageQueue {
 public:
  /// On the calling thread, in its turn. Throws what `work` throws.
  void run(const std::function<void()>& work);
  /// On a thread beside the program. `work` throws nothing; `owner` keeps this queue.
  void start(std::function<void()> work, const std::shared_ptr<void>& owner);

  /// Returns whether all is done that was given. A caller who alone gives it things may rely on that.
  bool is_idle() const;

 private:
  void serve();
  void take_turn(std::unique_lock<std::mutex>& lock, std::uint64_t turn, const std::function<void()>& work);

  mutable std::mutex mutex_;
  std::condition_variable changed_;
  std::uint64_t given_ = 0;  ///< turns
  std::uint64_t over_ = 0;
  std::deque<std::pair<std::uint64_t, std::function<void()>>> waiting_;  ///< for the thread, with their turns
  bool has_thread_ = false;
};

}  // namespace reef
