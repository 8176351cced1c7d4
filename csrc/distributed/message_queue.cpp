#include "distributed/message_queue.h"

#include "distributed/message_threads.h"

namespace reef {

void MessageQueue::run(const std::function<void()>& work) {
  std::unique_lock lock(mutex_);
  take_turn(lock, given_++, work);
}

void MessageQueue::start(std::function<void()> work, const std::shared_ptr<void>& owner) {
  const std::lock_guard lock(mutex_);
  if (!has_thread_) {
    MessageThreads::all().start([this, owner] { serve(); });
    has_thread_ = true;
  }
  waiting_.emplace_back(given_++, std::move(work));
}

bool MessageQueue::is_idle() const {
  const std::lock_guard lock(mutex_);
  return over_ == given_;
}

void MessageQueue::serve() {
  std::unique_lock lock(mutex_);
  while (!waiting_.empty()) {
    auto [turn, work] = std::move(waiting_.front());
    waiting_.pop_front();
    take_turn(lock, turn, work);
    lock.unlock();
    work = nullptr;  // frees tensors
    lock.lock();
  }
  has_thread_ = false;
}

void MessageQueue::take_turn(std::unique_lock<std::mutex>& lock, std::uint64_t turn,
                             const std::function<void()>& work) {
  changed_.wait(lock, [&] { return over_ == turn; });
  lock.unlock();
  const auto end = [&] {
    lock.lock();
    ++over_;
    changed_.notify_all();
  };
  try {
    work();
  } catch (...) {
    end();
    throw;
  }
  end();
}

}  // namespace reef
