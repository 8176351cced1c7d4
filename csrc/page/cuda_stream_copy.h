#pragma once

#include <c10/cuda/CUDAStream.h>
#include <cuda_runtime_api.h>

#include <exception>
#include <memory>

#include "page/memory.h"
#include "page/transfer.h"

namespace reef {

/// Marks a point in a stream.
class CudaEvent {
 public:
  explicit CudaEvent(unsigned flags = cudaEventDisableTiming);
  ~CudaEvent();
  CudaEvent(const CudaEvent&) = delete;
  CudaEvent& operator=(const CudaEvent&) = delete;

  void record(cudaStream_t stream);
  void hold_back(cudaStream_t stream) const;
  bool reached() const;
  /// Waits on the host until it is reached, or the device is broken.
  void wait() const noexcept;
  /// 0 if either has not been reached.
  double seconds_since(const CudaEvent& earlier) const;

 private:
  cudaEvent_t event_ = nullptr;
};

/// Copies between a device's memory and page-locked memory at `address`, on `side`, which the caller has held
/// back until the memory is ready. The memory belongs to the stream `used_on`, on which it is used next:
/// wait() holds back that stream and the current one, not the host. `finished` is recorded behind the copy,
/// and must measure time.
std::shared_ptr<Transfer> start_on_stream(const PageCopy& copy, void* address, c10::cuda::CUDAStream side,
                                          cudaStream_t used_on, std::shared_ptr<CudaEvent> finished);

/// A transfer that could not begin, and is over.
std::shared_ptr<Transfer> failed_transfer(std::exception_ptr why);

}  // namespace reef
