#include "device/runtime/streams.h"

#include <array>
#include <atomic>
#include <cstdio>
#include <cstdlib>
#include <exception>
#include <mutex>
#include <string>
#include <utility>

#include "device/runtime/memory.h"

namespace reef::played {
namespace {

// Never destroyed, because streams work until the process ends.
struct Shared {
  std::mutex mutex;
  std::condition_variable progress;  ///< notified when a stream has done something
  std::vector<Stream*> streams{new Stream(0, true, 0), new Stream(1, true, 1)};  ///< default streams first
  std::vector<std::weak_ptr<Capture>> captures;
  std::uint64_t last_capture = 0;
};
Shared& shared() {
  static auto* const all = new Shared;
  return *all;
}

thread_local int current = 0;
thread_local cudaStreamCaptureMode capture_mode = cudaStreamCaptureModeGlobal;
std::array<std::atomic<unsigned>, 3> mean_delays_us{};
std::atomic<std::uint64_t> seed{1};
// REEF_PLAYED_DELAYS_US="200 0 1000 7" sets the mean delays of a whole run, in the order of Work, and the
// seed. It is read when the first stream works, because a test's process may be forked from one that has
// loaded this library.
void set_delays_of_run() {
  static std::once_flag once;
  std::call_once(once, [] {
    const char* const given = std::getenv("REEF_PLAYED_DELAYS_US");
    if (given == nullptr) return;
    unsigned kernel = 0, copy = 0, communication = 0;
    unsigned long long with = 1;
    if (std::sscanf(given, "%u %u %u %llu", &kernel, &copy, &communication, &with) != 4) std::abort();
    mean_delays_us[0] = kernel;
    mean_delays_us[1] = copy;
    mean_delays_us[2] = communication;
    seed = with;
  });
}
std::array<std::atomic<int>, kDevices> errors{};
std::atomic<std::uint64_t> host_waits{0};

static_assert(kDevices == 2);
Stream& default_stream(int device) { return *shared().streams[static_cast<std::size_t>(device)]; }

}  // namespace

Stream::Stream(int device, bool blocking, std::uint64_t number)
    : device_(device), blocking_(blocking), number_(number) {}

void Stream::push(Task task) {
  if (!thread_.joinable()) {
    thread_ = std::thread([this] { serve(); });
  }
  tasks_.push_back(std::move(task));
  ++given_;
  has_work_.notify_one();
}

cudaError_t Stream::give(Task task) {
  const std::lock_guard lock(shared().mutex);
  if (capture) {
    capture->tasks.push_back(std::move(task));
    return cudaSuccess;
  }
  // The legacy default stream and blocking streams of its device wait for each other.
  if (blocking_) {
    const bool is_default = this == &default_stream(device_);
    for (Stream* const other : shared().streams) {
      if (other == this || other->device_ != device_ || !other->blocking_ || other->done_ == other->given_)
        continue;
      if (!is_default && other != &default_stream(device_)) continue;
      push({Work::kKernel, [other, until = other->given_] {
              std::unique_lock waiting(shared().mutex);
              shared().progress.wait(waiting, [&] { return other->done_ >= until; });
            }});
    }
  }
  push(std::move(task));
  return cudaSuccess;
}

void Stream::serve() {
  current = device_;
  std::unique_lock lock(shared().mutex);
  for (;;) {
    has_work_.wait(lock, [&] { return !tasks_.empty(); });
    const Task task = std::move(tasks_.front());
    tasks_.pop_front();
    const auto delay = delay_before(task.kind);
    lock.unlock();
    if (delay.count() > 0) std::this_thread::sleep_for(delay);
    try {
      if (broken(device_) == cudaSuccess) task.run();
    } catch (const std::exception& error) {
      const std::string text = error.what();
      std::fprintf(stderr, "played cuda:%d: %s\n", device_, text.substr(0, text.find('\n')).c_str());
      played_cuda_break(device_, cudaErrorAssert);
    }
    lock.lock();
    ++done_;
    shared().progress.notify_all();
  }
}

std::chrono::microseconds Stream::delay_before(Work kind) {
  set_delays_of_run();
  const unsigned mean_us = mean_delays_us[static_cast<std::size_t>(kind)];
  if (seeded_ != seed) {
    seeded_ = seed;
    random_.seed(seeded_ * 1'000'003 + number_);
  }
  const unsigned drawn_us =
      mean_us == 0 ? 0 : std::uniform_int_distribution<unsigned>(0, 2 * mean_us)(random_);
  return std::chrono::microseconds(drawn_us + delay_us_);
}

cudaError_t Stream::finish() {
  ++host_waits;
  if (const cudaError_t error = refuse_while_capturing()) return error;
  std::unique_lock lock(shared().mutex);
  if (capture) {
    capture->spoilt = true;
    return cudaErrorStreamCaptureUnsupported;
  }
  shared().progress.wait(lock, [this, until = given_] { return done_ >= until; });
  lock.unlock();
  return broken(device_);
}

bool Stream::finished() const {
  const std::lock_guard lock(shared().mutex);
  return done_ == given_;
}

void Stream::set_delay(unsigned microseconds) {
  const std::lock_guard lock(shared().mutex);
  delay_us_ = microseconds;
}

cudaError_t Event::record(Stream& stream) {
  if (stream.device() != device_) {
    std::fprintf(stderr, "played cuda:%d: an event of this device is recorded on a stream of cuda:%d\n",
                 device_, stream.device());
    return cudaErrorInvalidResourceHandle;
  }
  auto point = std::make_shared<Point>();
  {
    const std::lock_guard lock(shared().mutex);
    point->capture = stream.capture;
    point_ = point;
  }
  return stream.give({Work::kKernel, [point = std::move(point)] {
                        const std::lock_guard lock(shared().mutex);
                        point->reached = true;
                        point->at = std::chrono::steady_clock::now();
                        shared().progress.notify_all();
                      }});
}

cudaError_t Event::hold_back(Stream& stream) const {
  std::shared_ptr<Point> point;
  {
    const std::lock_guard lock(shared().mutex);
    point = point_;
    if (!point) return cudaSuccess;
    if (point->capture) {  // The tasks of a graph run in program order anyway.
      if (!stream.capture) stream.capture = point->capture;
      return stream.capture == point->capture ? cudaSuccess : cudaErrorStreamCaptureIsolation;
    }
    if (stream.capture) {
      stream.capture->spoilt = true;
      return cudaErrorStreamCaptureIsolation;
    }
  }
  return stream.give({Work::kKernel, [point = std::move(point), device = device_] {
                        std::unique_lock lock(shared().mutex);
                        shared().progress.wait(
                            lock, [&] { return point->reached || broken(device) != cudaSuccess; });
                      }});
}

cudaError_t Event::query() const {
  if (const cudaError_t error = refuse_while_capturing()) return error;
  const std::lock_guard lock(shared().mutex);
  if (!point_) return cudaSuccess;
  if (point_->capture) return cudaErrorCapturedEvent;
  if (const cudaError_t error = broken(device_)) return error;
  return point_->reached ? cudaSuccess : cudaErrorNotReady;
}

cudaError_t Event::wait() const {
  ++host_waits;
  if (const cudaError_t error = refuse_while_capturing()) return error;
  std::unique_lock lock(shared().mutex);
  const std::shared_ptr<Point> point = point_;
  if (!point) return cudaSuccess;
  if (point->capture) return cudaErrorCapturedEvent;
  shared().progress.wait(lock, [&] { return point->reached || broken(device_) != cudaSuccess; });
  return broken(device_);
}

cudaError_t Event::milliseconds(const Event& from, const Event& to, float* result) {
  const std::lock_guard lock(shared().mutex);
  if (!from.point_ || !to.point_) return cudaErrorInvalidResourceHandle;
  if (!from.point_->reached || !to.point_->reached) return cudaErrorNotReady;
  *result = std::chrono::duration<float, std::milli>(to.point_->at - from.point_->at).count();
  return cudaSuccess;
}

Stream* new_stream(int device, bool blocking) {
  const std::lock_guard lock(shared().mutex);
  auto* const stream = new Stream(device, blocking, shared().streams.size());
  shared().streams.push_back(stream);
  return stream;
}

Stream& stream_of(cudaStream_t handle) {
  const bool is_default = handle == nullptr || handle == cudaStreamLegacy;
  return is_default ? default_stream(current) : *reinterpret_cast<Stream*>(handle);
}

void finish_device(int device) {
  std::vector<Stream*> streams;
  {
    const std::lock_guard lock(shared().mutex);
    streams = shared().streams;
  }
  for (Stream* const stream : streams)
    if (stream->device() == device && !stream->finished()) (void)stream->finish();
}

cudaError_t begin_capture(Stream& stream, cudaStreamCaptureMode mode) {
  if (&stream == &default_stream(stream.device())) return cudaErrorStreamCaptureUnsupported;
  const std::lock_guard lock(shared().mutex);
  if (stream.capture) return cudaErrorIllegalState;
  stream.capture = std::make_shared<Capture>();
  stream.capture->number = ++shared().last_capture;
  stream.capture->mode = mode;
  stream.capture->begun_by = std::this_thread::get_id();
  std::erase_if(shared().captures, [](const auto& each) { return each.expired(); });
  shared().captures.push_back(stream.capture);
  return cudaSuccess;
}

cudaError_t end_capture(Stream& stream, Graph** graph) {
  const std::lock_guard lock(shared().mutex);
  const std::shared_ptr<Capture> capture = stream.capture;
  *graph = nullptr;
  if (!capture) return cudaErrorIllegalState;
  for (Stream* const each : shared().streams)
    if (each->capture == capture) each->capture.reset();
  std::erase_if(shared().captures,
                [&](const auto& each) { return each.expired() || each.lock() == capture; });
  if (capture->spoilt) return cudaErrorStreamCaptureInvalidated;
  *graph = new Graph{capture->tasks};
  return cudaSuccess;
}

std::shared_ptr<Capture> capture_of(const Stream& stream) {
  const std::lock_guard lock(shared().mutex);
  return stream.capture;
}

cudaError_t refuse_while_capturing() {
  if (capture_mode == cudaStreamCaptureModeRelaxed) return cudaSuccess;
  const std::lock_guard lock(shared().mutex);
  cudaError_t error = cudaSuccess;
  for (const auto& each : shared().captures) {
    const auto capture = each.lock();
    if (!capture || capture->mode == cudaStreamCaptureModeRelaxed) continue;
    const bool of_this_thread = capture->begun_by == std::this_thread::get_id();
    const bool global =
        capture->mode == cudaStreamCaptureModeGlobal && capture_mode == cudaStreamCaptureModeGlobal;
    if (!of_this_thread && !global) continue;
    capture->spoilt = true;
    error = cudaErrorStreamCaptureUnsupported;
  }
  return error;
}

cudaStreamCaptureMode exchange_capture_mode(cudaStreamCaptureMode mode) {
  return std::exchange(capture_mode, mode);
}

cudaError_t broken(int device) {
  return static_cast<cudaError_t>(errors[static_cast<std::size_t>(device)].load());
}
int current_device() { return current; }
void set_current_device(int device) { current = device; }

void enqueue(cudaStream_t stream, Work kind, std::function<void()> work) {
  (void)stream_of(stream).give({kind, std::move(work)});
}

void finish(cudaStream_t stream) { (void)stream_of(stream).finish(); }

void run_kernel(cudaStream_t stream, const std::function<void()>& kernel) {
  static std::mutex one_at_a_time;  // The shared memory of blocks is in static variables.
  const std::lock_guard lock(one_at_a_time);
  DeviceMemory& memory = device_memory(stream_of(stream).device());
  struct Opened {
    explicit Opened(DeviceMemory& opened) : memory(opened) { memory.open(true); }
    ~Opened() { memory.open(false); }
    DeviceMemory& memory;
  };
  const Opened opened(memory);
  kernel();
}

}  // namespace reef::played

using namespace reef::played;

void played_cuda_delay(int kind, unsigned mean_us) {
  set_delays_of_run();
  mean_delays_us.at(static_cast<std::size_t>(kind)) = mean_us;
}
void played_cuda_delay_stream(cudaStream_t stream, unsigned microseconds) {
  stream_of(stream).set_delay(microseconds);
}
void played_cuda_seed(std::uint64_t with) {
  set_delays_of_run();
  seed = with;
}
void played_cuda_break(int device, cudaError_t error) {
  const std::lock_guard lock(shared().mutex);
  errors.at(static_cast<std::size_t>(device)) = error;
  shared().progress.notify_all();
}
std::uint64_t played_cuda_host_waits() { return host_waits; }
