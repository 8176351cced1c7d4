// Streams, events and captured graphs of played devices.
#pragma once

#include <cuda_runtime_api.h>

#include <chrono>
#include <condition_variable>
#include <cstdint>
#include <deque>
#include <functional>
#include <memory>
#include <random>
#include <thread>
#include <vector>

#include "device/runtime/played_cuda.h"

namespace reef::played {

struct Task {
  Work kind;
  std::function<void()> run;
};

/// What streams have been given while they were captured, in the order in which the program gave it.
struct Capture {
  std::uint64_t number = 0;
  cudaStreamCaptureMode mode = cudaStreamCaptureModeGlobal;
  std::thread::id begun_by;
  bool spoilt = false;  ///< something was called that a capture cannot contain
  std::vector<Task> tasks;
};

struct Graph {
  std::vector<Task> tasks;
};

class Stream {
 public:
  Stream(int device, bool blocking, std::uint64_t number);
  int device() const { return device_; }

  cudaError_t give(Task task);
  /// Waits until all is done that the stream has been given.
  cudaError_t finish();
  bool finished() const;
  void set_delay(unsigned microseconds);

  std::shared_ptr<Capture> capture;  ///< null most of the time; guarded by the lock of streams

 private:
  friend class Event;
  void push(Task task);  // under the lock
  void serve();
  std::chrono::microseconds delay_before(Work kind);

  int device_;
  bool blocking_;  // waits for the default stream of its device, and that one for it
  std::uint64_t number_;
  std::deque<Task> tasks_;
  std::uint64_t given_ = 0;
  std::uint64_t done_ = 0;
  unsigned delay_us_ = 0;
  std::uint64_t seeded_ = 0;
  std::mt19937_64 random_;
  std::condition_variable has_work_;
  std::thread thread_;
};

class Event {
 public:
  explicit Event(int device) : device_(device) {}
  cudaError_t record(Stream& stream);
  cudaError_t hold_back(Stream& stream) const;
  cudaError_t query() const;
  cudaError_t wait() const;
  static cudaError_t milliseconds(const Event& from, const Event& to, float* result);

 private:
  struct Point {
    bool reached = false;
    std::chrono::steady_clock::time_point at;
    std::shared_ptr<Capture> capture;  // of a point in a graph
  };
  int device_;
  std::shared_ptr<Point> point_;
};

/// The stream of a handle; the default stream of the current device, if it is null.
Stream& stream_of(cudaStream_t handle);
Stream* new_stream(int device, bool blocking);
void finish_device(int device);

cudaError_t begin_capture(Stream& stream, cudaStreamCaptureMode mode);
/// Gives null where the capture was spoilt.
cudaError_t end_capture(Stream& stream, Graph** graph);
/// The capture of a stream, or null.
std::shared_ptr<Capture> capture_of(const Stream& stream);
/// Spoils captures that forbid the calling thread what may wait for the device, and returns the error for it.
cudaError_t refuse_while_capturing();
cudaStreamCaptureMode exchange_capture_mode(cudaStreamCaptureMode mode);

/// The device's error from which nothing recovers, or success.
cudaError_t broken(int device);
int current_device();
void set_current_device(int device);

}  // namespace reef::played
