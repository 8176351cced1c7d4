#include "page/cuda_page_hash.h"

#include <c10/cuda/CUDAException.h>
#include <c10/cuda/CUDAStream.h>

#include <array>
#include <numeric>

#include "kernels/cuda/page_hash.h"
#include "round_up.h"

namespace reef {
namespace {

using kernels::cuda::kHashSums;
constexpr std::size_t kStreamsOfRoom =
    72;  // 32 of each of two priorities, the default one, and a few of others

unsigned long long* note_behind(void* slot, std::uint64_t bytes) {
  void* const note = static_cast<char*>(slot) + round_up(bytes, CudaPageHash::kNoteBytes);
  return static_cast<unsigned long long*>(note);
}

}  // namespace

CudaPageHash::~CudaPageHash() {
  for (void* const room : rooms_) (void)cudaFree(room);
}

// With the lock.
void CudaPageHash::take_room() {
  constexpr std::size_t kNumbers = kStreamsOfRoom * kHashSums;
  void* room = nullptr;
  C10_CUDA_CHECK(cudaMalloc(&room, (kNumbers + 1) * sizeof(unsigned long long)));
  rooms_.push_back(room);
  left_ = kStreamsOfRoom;
  if (written_ != nullptr) return;
  written_ = static_cast<unsigned long long*>(room) + kNumbers;
  C10_CUDA_CHECK(cudaMemsetAsync(written_, 0, sizeof *written_, nullptr));
  C10_CUDA_CHECK(cudaStreamSynchronize(nullptr));  // other streams need not wait for the default one
}

void CudaPageHash::reserve() {
  const std::lock_guard lock(mutex_);
  if (rooms_.empty()) take_room();
}

// With the lock.
unsigned long long* CudaPageHash::sums_of(cudaStream_t stream) {
  unsigned long long*& sums = sums_[stream];
  if (sums != nullptr) return sums;
  if (left_ == 0) take_room();
  sums = static_cast<unsigned long long*>(rooms_.back()) + --left_ * kHashSums;
  return sums;
}

void CudaPageHash::note(const void* data, std::uint64_t bytes, void* slot, cudaStream_t stream) {
  const std::lock_guard lock(mutex_);
  C10_CUDA_CHECK(
      kernels::cuda::note_page_hash(data, bytes, note_behind(slot, bytes), sums_of(stream), stream));
}

void CudaPageHash::write_if_changed(const void* data, std::uint64_t bytes, void* slot, cudaStream_t stream) {
  const std::lock_guard lock(mutex_);
  unsigned long long* const sums = sums_of(stream);
  C10_CUDA_CHECK(kernels::cuda::write_page_if_changed(data, bytes, slot, note_behind(slot, bytes), sums,
                                                      written_, stream));
}

std::uint64_t CudaPageHash::written() const {
  {
    const std::lock_guard lock(mutex_);
    if (written_ == nullptr) return 0;
  }
  unsigned long long written = 0;
  const auto stream = c10::cuda::getStreamFromPool();
  C10_CUDA_CHECK(cudaMemcpyAsync(&written, written_, sizeof written, cudaMemcpyDeviceToHost, stream));
  C10_CUDA_CHECK(cudaStreamSynchronize(stream));
  return written;
}

std::uint64_t CudaPageHash::of(const void* data, std::uint64_t bytes, cudaStream_t stream) {
  std::array<unsigned long long, kHashSums> sums{};
  {
    const std::lock_guard lock(mutex_);
    unsigned long long* const on_device = sums_of(stream);
    int count = 0;
    C10_CUDA_CHECK(kernels::cuda::hash_page(data, bytes, on_device, count, stream));
    C10_CUDA_CHECK(cudaMemcpyAsync(sums.data(), on_device, static_cast<std::size_t>(count) * sizeof sums[0],
                                   cudaMemcpyDeviceToHost, stream));
  }
  C10_CUDA_CHECK(cudaStreamSynchronize(stream));
  return std::accumulate(sums.begin(), sums.end(), std::uint64_t{0});
}

}  // namespace reef
