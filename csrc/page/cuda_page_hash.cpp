#include "page/cuda_page_hash.h"

#include <c10/cuda/CUDAException.h>
#include <c10/cuda/CUDAStream.h>

#include "kernels/cuda/page_hash.h"
#include "round_up.h"

namespace reef {

using kernels::cuda::PageHashScratch;

namespace {

// LibTorch's pools have 32 streams of each of two priorities; there are the default stream and a few others.
constexpr std::size_t kStreamsOfRoom = 72;

unsigned long long* note_behind(void* slot, std::uint64_t bytes) {
  void* const note = static_cast<char*>(slot) + round_up(bytes, CudaPageHash::kNoteBytes);
  return static_cast<unsigned long long*>(note);
}

}  // namespace

CudaPageHash::~CudaPageHash() {
  for (void* const room : rooms_) (void)cudaFree(room);
}

// Called with the lock held.
void CudaPageHash::take_room() {
  void* room = nullptr;
  constexpr std::size_t kBytes = kStreamsOfRoom * sizeof(PageHashScratch) + sizeof *written_;
  C10_CUDA_CHECK(cudaMalloc(&room, kBytes));
  rooms_.push_back(room);
  C10_CUDA_CHECK(cudaMemsetAsync(room, 0, kBytes, nullptr));
  C10_CUDA_CHECK(cudaStreamSynchronize(nullptr));  // Other streams need not wait for the default one.
  left_ = kStreamsOfRoom;
  if (written_ == nullptr) {
    void* const behind = static_cast<PageHashScratch*>(room) + kStreamsOfRoom;
    written_ = static_cast<unsigned long long*>(behind);
  }
}

void CudaPageHash::reserve() {
  const std::lock_guard lock(mutex_);
  if (rooms_.empty()) take_room();
}

// Called with the lock held.
PageHashScratch* CudaPageHash::scratch_of(cudaStream_t stream) {
  PageHashScratch*& scratch = scratch_[stream];
  if (scratch != nullptr) return scratch;
  if (left_ == 0) take_room();
  scratch = static_cast<PageHashScratch*>(rooms_.back()) + --left_;
  return scratch;
}

void CudaPageHash::note(const void* data, std::uint64_t bytes, void* slot, cudaStream_t stream) {
  const std::lock_guard lock(mutex_);
  C10_CUDA_CHECK(note_page_hash(data, bytes, note_behind(slot, bytes), scratch_of(stream), stream));
}

void CudaPageHash::write_if_changed(const void* data, std::uint64_t bytes, void* slot, cudaStream_t stream) {
  const std::lock_guard lock(mutex_);
  PageHashScratch* const scratch = scratch_of(stream);
  C10_CUDA_CHECK(
      write_page_if_changed(data, bytes, slot, note_behind(slot, bytes), scratch, written_, stream));
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
  unsigned long long hash = 0;
  {
    const std::lock_guard lock(mutex_);
    PageHashScratch* const scratch = scratch_of(stream);
    C10_CUDA_CHECK(hash_page(data, bytes, scratch, stream));
    C10_CUDA_CHECK(cudaMemcpyAsync(&hash, &scratch->hash, sizeof hash, cudaMemcpyDeviceToHost, stream));
  }
  C10_CUDA_CHECK(cudaStreamSynchronize(stream));
  return hash;
}

}  // namespace reef
