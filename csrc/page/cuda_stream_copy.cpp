#include "page/cuda_stream_copy.h"

#include <c10/cuda/CUDAException.h>
#include <c10/cuda/CUDAGuard.h>

#include <mutex>
#include <utility>

namespace reef {
namespace {

class FailedTransfer final : public Transfer {
 public:
  explicit FailedTransfer(std::exception_ptr why) { error = std::move(why); }
  bool done() override { return true; }
  bool cancel() override { return false; }
  void wait() override {}
};

class StreamTransfer final : public Transfer {
 public:
  StreamTransfer(const PageCopy& copy, void* address, c10::cuda::CUDAStream side, cudaStream_t used_on,
                 std::shared_ptr<CudaEvent> finished)
      : tier_(copy.tier), used_on_(used_on), finished_(std::move(finished)) {
    started_.record(side.stream());
    const bool out = copy.direction == PageCopy::Direction::kOut;
    C10_CUDA_CHECK(cudaMemcpyAsync(out ? address : copy.data, out ? copy.data : address, copy.bytes,
                                   out ? cudaMemcpyDeviceToHost : cudaMemcpyHostToDevice, side.stream()));
    finished_->record(side.stream());
    device_ = side.device_index();
  }

  bool done() override {
    const std::lock_guard lock(mutex_);
    if (error) return true;
    try {
      if (!finished_->reached()) return false;
      seconds = finished_->seconds_since(started_);
    } catch (const c10::Error&) {
      error = std::current_exception();
    }
    return true;
  }
  bool cancel() override { return false; }
  void wait() override {
    const std::lock_guard lock(mutex_);
    if (error) return;
    try {
      const c10::cuda::CUDAGuard guard(device_);  // a default stream is that of the current device
      const cudaStream_t current = c10::cuda::getCurrentCUDAStream(device_).stream();
      finished_->hold_back(used_on_);
      if (current != used_on_) finished_->hold_back(current);
    } catch (const c10::Error&) {
      error = std::current_exception();
    }
  }

 private:
  std::mutex mutex_;            ///< for the results: any thread may ask for them
  std::shared_ptr<Tier> tier_;  // its memory is being copied
  cudaStream_t used_on_;
  c10::DeviceIndex device_ = 0;
  CudaEvent started_{cudaEventDefault};
  const std::shared_ptr<CudaEvent> finished_;
};

}  // namespace

std::shared_ptr<Transfer> start_on_stream(const PageCopy& copy, void* address, c10::cuda::CUDAStream side,
                                          cudaStream_t used_on, std::shared_ptr<CudaEvent> finished) {
  return std::make_shared<StreamTransfer>(copy, address, side, used_on, std::move(finished));
}

std::shared_ptr<Transfer> failed_transfer(std::exception_ptr why) {
  return std::make_shared<FailedTransfer>(std::move(why));
}

CudaEvent::CudaEvent(unsigned flags) { C10_CUDA_CHECK(cudaEventCreateWithFlags(&event_, flags)); }
CudaEvent::~CudaEvent() { (void)cudaEventDestroy(event_); }
void CudaEvent::record(cudaStream_t stream) { C10_CUDA_CHECK(cudaEventRecord(event_, stream)); }
void CudaEvent::hold_back(cudaStream_t stream) const {
  C10_CUDA_CHECK(cudaStreamWaitEvent(stream, event_, 0));
}

bool CudaEvent::reached() const {
  const cudaError_t status = cudaEventQuery(event_);
  if (status == cudaErrorNotReady) {
    (void)cudaGetLastError();
    return false;
  }
  C10_CUDA_CHECK(status);
  return true;
}

void CudaEvent::wait() const noexcept {
  if (cudaEventSynchronize(event_) != cudaSuccess) (void)cudaGetLastError();
}

double CudaEvent::seconds_since(const CudaEvent& earlier) const {
  float milliseconds = 0;
  if (cudaEventElapsedTime(&milliseconds, earlier.event_, event_) == cudaSuccess) return milliseconds / 1e3;
  (void)cudaGetLastError();
  return 0;
}

}  // namespace reef
