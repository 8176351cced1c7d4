#include "ledger/cuda.h"

#include <c10/cuda/CUDACachingAllocator.h>
#include <c10/cuda/CUDAFunctions.h>

#include "ledger/blocks.h"

namespace reef {
namespace {

using c10::CachingDeviceAllocator::TraceEntry;

// The caching allocator calls this with its own lock held, so the order of locks is its, then ours; Blocks
// never calls an allocator. Sizes are those requested. FREE_COMPLETED, not FREE_REQUESTED: a block that
// another stream still reads stays alive until that stream is done.
void count(const TraceEntry& entry) {
  // NOLINTNEXTLINE(performance-no-int-to-ptr): the trace gives addresses as integers.
  const auto* data = reinterpret_cast<const void*>(entry.addr_);
  const auto slot = slot_of(c10::Device(c10::kCUDA, entry.device_));
  if (!slot) return;
  if (entry.action_ == TraceEntry::ALLOC && entry.size_ > 0)
    Blocks::instance().born(data, entry.size_, *slot);
  if (entry.action_ == TraceEntry::FREE_COMPLETED) Blocks::instance().died(data);
}

// Installs the tracker at the first call. Returns false if there is no device, or another allocator.
bool tracks() {
  static const bool installed = [] {
    if (c10::cuda::device_count() == 0) return false;
    if (c10::cuda::CUDACachingAllocator::get()->name() != "native") return false;  // it tells of no blocks
    c10::cuda::CUDACachingAllocator::init(c10::cuda::device_count());
    c10::cuda::CUDACachingAllocator::attachAllocatorTraceTracker(&count);
    return true;
  }();
  return installed;
}

}  // namespace

void install_cuda_tracker() { tracks(); }

bool adopt_cuda(c10::StorageImpl& storage) {
  if (!storage.device().is_cuda() || storage.nbytes() == 0 || !tracks()) return false;
  const c10::DataPtr& block = storage._mutable_data_ptr_no_checks();
  const auto slot = slot_of(storage.device());
  if (!slot || block.get() == nullptr || block.get_context() != block.get() ||
      block.get_deleter() != c10::cuda::CUDACachingAllocator::get()->raw_deleter())
    return false;
  Blocks::instance().born(block.get(), storage.nbytes(), *slot);
  return true;
}

}  // namespace reef
