#pragma once

#include <condition_variable>
#include <cstdint>
#include <deque>
#include <exception>
#include <functional>
#include <mutex>
#include <thread>

namespace reef {

/// A thread that communicates beside the program: runs what it is given in order, one after another. When
/// something has thrown, what comes after it is passed over: a rank no longer knows what the others send.
/// The thread starts with the first work; its operators are recorded by neither autograd nor observers.
class CommLane {
 public:
  CommLane() = default;
  /// Waits for what is running; the rest is dropped.
  ~CommLane();
  CommLane(const CommLane&) = delete;
  CommLane& operator=(const CommLane&) = delete;

  /// Gives its number, counted from 1.
  std::uint64_t submit(std::function<void()> work);
  /// Until work number `ticket` and all before it are through. Throws what one of them has thrown.
  void wait(std::uint64_t ticket);
  /// The same of all that has been submitted.
  void wait_all();

 private:
  void serve();

  std::mutex mutex_;
  std::condition_variable submitted_;
  std::condition_variable finished_;
  std::deque<std::function<void()>> queue_;
  std::uint64_t submitted_count_ = 0;
  std::uint64_t finished_count_ = 0;
  std::exception_ptr error_;
  std::uint64_t failed_ = 0;  ///< whose
  bool closing_ = false;
  std::thread thread_;
};

}  // namespace reef
