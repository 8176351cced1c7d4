#include "distributed/comm_lane.h"

#include <ATen/core/grad_mode.h>
#include <ATen/record_function.h>
#include <c10/core/Event.h>
#include <c10/core/StreamGuard.h>
#include <c10/core/impl/VirtualGuardImpl.h>

#include <sched.h>

#include <algorithm>
#include <condition_variable>
#include <deque>
#include <exception>
#include <map>
#include <mutex>
#include <optional>
#include <thread>
#include <torch/csrc/distributed/c10d/ProcessGroup.hpp>
#include <utility>

#include "distributed/call_order.h"

namespace reef {
namespace {

/// What every lane knows of its works.
class CountingLane : public CommLane {
 protected:
  void failed(std::uint64_t ticket) {
    error_ = std::current_exception();
    failed_ = ticket;
  }
  void rethrow(std::uint64_t ticket) const {
    if (error_ && ticket >= failed_) std::rethrow_exception(error_);
  }

  std::mutex mutex_;
  std::uint64_t submitted_count_ = 0;
  std::exception_ptr error_;

 private:
  std::uint64_t failed_ = 0;  ///< whose error it is
};

class ThreadLane final : public CountingLane {
 public:
  ~ThreadLane() override {
    {
      const std::lock_guard lock(mutex_);
      closing_ = true;
      queue_.clear();
    }
    submitted_.notify_all();
    if (thread_.joinable()) thread_.join();
  }

  std::uint64_t submit(std::function<void()> work, c10::ArrayRef<at::Tensor>) override {
    std::uint64_t ticket = 0;
    {
      const std::lock_guard lock(mutex_);
      if (!thread_.joinable()) thread_ = std::thread([this] { serve(); });
      queue_.push_back(std::move(work));
      ticket = ++submitted_count_;
    }
    submitted_.notify_one();
    return ticket;
  }

  void wait(std::uint64_t ticket) override {
    std::unique_lock lock(mutex_);
    ticket = std::min(ticket, submitted_count_);
    finished_.wait(lock, [&] { return finished_count_ >= ticket; });
    rethrow(ticket);
  }

  void wait_on_host(std::uint64_t ticket) override { wait(ticket); }

  bool wait_for(std::uint64_t ticket, std::chrono::milliseconds most) override {
    std::unique_lock lock(mutex_);
    ticket = std::min(ticket, submitted_count_);
    if (!finished_.wait_for(lock, most, [&] { return finished_count_ >= ticket; })) return false;
    rethrow(ticket);
    return true;
  }

  void drain() noexcept override {
    std::unique_lock lock(mutex_);
    finished_.wait(lock, [&] { return finished_count_ >= submitted_count_; });
  }

 private:
  void serve() {
    const ServesProgram serves;
    // Does not take a processor from what computes just because a message has come. If that is refused, it
    // does.
    const sched_param none{};
    sched_setscheduler(0, SCHED_BATCH, &none);
    const at::NoGradGuard no_grad;
    const at::DisableRecordFunctionGuard unobserved;
    std::unique_lock lock(mutex_);
    while (true) {
      submitted_.wait(lock, [&] { return closing_ || !queue_.empty(); });
      if (closing_) return;
      {
        const std::function<void()> work = std::move(queue_.front());
        queue_.pop_front();
        const bool passed_over = error_ != nullptr;
        lock.unlock();
        try {
          if (!passed_over) work();
          lock.lock();
        } catch (...) {
          lock.lock();
          failed(finished_count_ + 1);
        }
      }
      ++finished_count_;
      finished_.notify_all();
    }
  }

  std::condition_variable submitted_;
  std::condition_variable finished_;
  std::deque<std::function<void()>> queue_;
  std::uint64_t finished_count_ = 0;
  bool closing_ = false;
  std::thread thread_;
};

/// On the thread that submits. Streams and events are those that c10 has for every kind of device.
class InlineLane final : public CountingLane {
 public:
  explicit InlineLane(c10::Device device) {
    if (device.is_cpu()) return;
    const c10::impl::VirtualGuardImpl on(device.type());
    if (!device.has_index()) device = on.getDevice();
    stream_ = on.getStreamFromGlobalPool(device);
  }
  ~InlineLane() override { drain(); }

  std::uint64_t submit(std::function<void()> work, c10::ArrayRef<at::Tensor> used) override {
    const at::NoGradGuard no_grad;
    const at::DisableRecordFunctionGuard unobserved;
    const std::lock_guard lock(mutex_);
    ++submitted_count_;
    if (error_) return submitted_count_;
    try {
      if (stream_) {
        c10::Event given(stream_->device_type());
        given.record(current());
        given.block(*stream_);
        const c10::StreamGuard guard(*stream_);
        const c10::impl::VirtualGuardImpl on(stream_->device_type());
        for (const at::Tensor& tensor : used)
          on.recordDataPtrOnStream(tensor.unsafeGetTensorImpl()->unsafe_storage().data_ptr(), *stream_);
        work();
        c10::Event done(stream_->device_type());
        done.record(*stream_);
        done_.emplace(submitted_count_, std::move(done));
      } else {
        work();
      }
    } catch (...) {
      failed(submitted_count_);
    }
    return submitted_count_;
  }

  void wait(std::uint64_t ticket) override {
    const std::lock_guard lock(mutex_);
    ticket = std::min(ticket, submitted_count_);
    rethrow(ticket);
    // What is through says so of all before it.
    const auto reached = done_.lower_bound(ticket);
    if (reached == done_.end()) return;
    reached->second.block(current());
    done_.erase(done_.begin(), reached);
  }

  // Work has been given to the device when it is submitted.
  bool wait_for(std::uint64_t ticket, std::chrono::milliseconds /*most*/) override {
    wait(ticket);
    return true;
  }

  void wait_on_host(std::uint64_t ticket) override {
    const std::lock_guard lock(mutex_);
    ticket = std::min(ticket, submitted_count_);
    rethrow(ticket);
    const auto reached = done_.lower_bound(ticket);
    if (reached != done_.end()) reached->second.synchronize();
  }

  void drain() noexcept override {
    const std::lock_guard lock(mutex_);
    try {
      if (!done_.empty() && !done_.rbegin()->second.query()) done_.rbegin()->second.synchronize();
    } catch (const std::exception&) {
      // The device has failed, and whoever uses it next is told.
    }
  }

 private:
  c10::Stream current() const {
    return c10::impl::VirtualGuardImpl(stream_->device_type()).getStream(stream_->device());
  }

  std::optional<c10::Stream> stream_;
  std::map<std::uint64_t, c10::Event> done_;  ///< by ticket; those that somebody may wait for
};

}  // namespace

bool by_messages(c10d::ProcessGroup& group, c10::Device device) {
  if (!device.is_cpu()) return false;
  return group.getSize() == 1 || group.getBackend(c10::kCPU)->getBackendName() == "gloo";
}

std::unique_ptr<CommLane> make_comm_lane(c10d::ProcessGroup& group, c10::Device device) {
  if (by_messages(group, device)) return std::make_unique<ThreadLane>();
  return std::make_unique<InlineLane>(device);
}

}  // namespace reef
