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

/// The work that was enqueued on captured streams, in program order.
struct Capture {
  std::uint64_t number = 0;
  cudaStreamCaptureMode mode = cudaStreamCaptureModeGlobal;
  std::thread::id begun_by;
  bool spoilt = false;  ///< whether a function was called that a capture cannot contain
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
  /// Waits until all work of the stream is done.
  cudaError_t finish();
  bool finished() const;
  void set_delay(unsigned microseconds);

  std::shared_ptr<Capture> capture;  ///< null unless captured; guarded by the mutex of all streams

 private:
  friend class Event;
  void push(Task task);  // The caller holds the mutex of all streams.
  void serve();
  std::chrono::microseconds delay_before(Work kind);

  int device_;
  bool blocking_;  // Whether this stream and the default stream of its device wait for each other.
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
    std::shared_ptr<Capture> capture;  // Not null for a point in a graph.
  };
  int device_;
  std::shared_ptr<Point> point_;
};

/// Returns the stream of a handle, or the default stream of the current device if the handle is null.
Stream& stream_of(cudaStream_t handle);
Stream* new_stream(int device, bool blocking);
void finish_device(int device);

cudaError_t begin_capture(Stream& stream, cudaStreamCaptureMode mode);
/// Ends a capture. `graph` becomes null if the capture was spoilt.
cudaError_t end_capture(Stream& stream, Graph** graph);
/// Returns the capture of a stream, or null.
std::shared_ptr<Capture> capture_of(const Stream& stream);
/// Must be called by functions that may wait for a device. Spoils all captures that forbid this in the
/// calling thread, and returns an error if there are any.
cudaError_t refuse_while_capturing();
cudaStreamCaptureMode exchange_capture_mode(cudaStreamCaptureMode mode);

/// Returns the error that has broken the device, or success. A broken device never recovers.
cudaError_t broken(int device);
int current_device();
void set_current_device(int device);

}  // namespace reef::played
