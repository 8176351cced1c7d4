#include <ATen/record_function.h>
#include <c10/cuda/CUDACachingAllocator.h>
#include <c10/cuda/CUDAException.h>
#include <c10/cuda/CUDAFunctions.h>
#include <c10/cuda/CUDAGuard.h>

#include <algorithm>
#include <array>
#include <atomic>
#include <mutex>
#include <utility>

#include "high_water.h"
#include "ledger/blocks.h"
#include "page/cuda_stream_copy.h"
#include "page/memory.h"
#include "page/own_allocation.h"
#include "page/pager.h"
#include "reef/error.h"

namespace reef {
namespace {

namespace caching = c10::cuda::CUDACachingAllocator;
using c10::CachingDeviceAllocator::TraceEntry;

class CudaMemory;
std::array<std::atomic<CudaMemory*>, kDeviceSlots> memories{};  ///< by device index

// Page-locked memory of one lane's thread, through which pages pass to a tier that the device cannot reach.
class Staging {
 public:
  ~Staging() { (void)cudaFreeHost(data_); }
  void* of(std::size_t bytes) {
    if (bytes > bytes_) {
      C10_CUDA_CHECK(cudaFreeHost(std::exchange(data_, nullptr)));
      bytes_ = 0;
      C10_CUDA_CHECK(cudaHostAlloc(&data_, bytes, cudaHostAllocPortable));
      bytes_ = bytes;
    }
    return data_;
  }

 private:
  void* data_ = nullptr;
  std::size_t bytes_ = 0;
};

struct Side {
  c10::cuda::CUDAStream stream;
  Staging staging;
  TransferLane lane{1};  ///< the last: its thread uses the others
};

class CudaMemory final : public Memory {
 public:
  explicit CudaMemory(c10::DeviceIndex index)
      : device_(c10::kCUDA, index),
        out_{c10::cuda::getStreamFromPool(false, index), {}},
        in_{c10::cuda::getStreamFromPool(false, index), {}} {
    const auto stats = caching::getDeviceStats(index);
    alive_ = peak_ = static_cast<std::uint64_t>(stats.requested_bytes[0].current);
  }

  c10::Device device() const override { return device_; }

  bool counts(c10::StorageImpl& storage) override {
    const c10::DataPtr& block = storage._mutable_data_ptr_no_checks();
    return block.get_deleter() == caching::get()->raw_deleter();
  }
  std::uint64_t alive_bytes() const override { return alive_; }
  std::uint64_t peak_bytes() const override { return peak_; }
  std::uint64_t take_peak() override { return reef::take_peak(peak_, alive_); }

  void open(Pager& pager) override { pager_ = &pager; }

  // The caching allocator holds whole segments: what it has reserved is what the device has less of.
  void limit(std::uint64_t budget_bytes) override {
    if (limit_ == ~std::uint64_t{0}) fraction_before_ = caching::getMemoryFraction(device_.index());
    limit_ = budget_bytes;
    const c10::cuda::CUDAGuard guard(device_.index());
    std::size_t free_bytes = 0;
    std::size_t total_bytes = 0;
    C10_CUDA_CHECK(cudaMemGetInfo(&free_bytes, &total_bytes));
    if (budget_bytes >= total_bytes) return caching::setMemoryFraction(fraction_before_, device_.index());
    caching::emptyCache();
    budget_bytes = std::max(budget_bytes, kLeastReservedBytes);
    caching::setMemoryFraction(static_cast<double>(budget_bytes) / static_cast<double>(total_bytes),
                               device_.index());
  }
  bool asks_before_allocations() const override { return false; }

  std::vector<const void*> take_freed() override {
    const std::lock_guard lock(freed_mutex_);
    return std::exchange(freed_, {});
  }
  std::uint64_t stream() const override {
    return static_cast<std::uint64_t>(c10::cuda::getCurrentCUDAStream(device_.index()).id()) + 1;
  }

  c10::DataPtr allocate(std::uint64_t bytes) override {
    const c10::cuda::CUDAGuard guard(device_.index());
    return caching::get()->allocate(bytes);
  }

  c10::DataPtr take_over(const void*) override { return {}; }  // the allocator keeps its blocks by streams

  // Begins at once, behind what the program's stream has been given so far.
  std::shared_ptr<Transfer> prepare(const PageCopy& copy) override {
    const c10::cuda::CUDAGuard guard(device_.index());
    at::RecordFunction range(at::RecordScope::USER_SCOPE);
    if (range.isActive()) range.before(name_of(copy));
    const bool out = copy.direction == PageCopy::Direction::kOut;
    Side& side = out ? out_ : in_;
    void* const address = copy.tier->address(copy.slot, out ? Tier::Access::kWrite : Tier::Access::kRead);
    if (address != nullptr) return start_on_stream(copy, address, side.stream);
    const auto ready = std::make_shared<CudaEvent>();
    ready->record(c10::cuda::getCurrentCUDAStream(device_.index()).stream());
    auto transfer =
        side.lane.prepare([this, copy, ready, &side](Transfer&) { copy_through(copy, *ready, side); });
    transfer->start();
    return transfer;
  }
  // The device's memory would have to be read for it, and by the device.
  std::uint64_t hash(const void*, std::uint64_t) const override { return 0; }

  // Under the allocator's lock.
  void traced(const TraceEntry& entry) {
    if (entry.action_ == TraceEntry::ALLOC) {
      raise<std::uint64_t>(peak_, alive_ += entry.size_);
      raise<std::uint64_t>(largest_, entry.size_);
    } else if (entry.action_ == TraceEntry::FREE_COMPLETED) {
      alive_ -= entry.size_;
    } else if (entry.action_ == TraceEntry::FREE_REQUESTED && running() != nullptr) {
      const std::lock_guard lock(freed_mutex_);
      // NOLINTNEXTLINE(performance-no-int-to-ptr): the trace gives addresses as integers.
      freed_.push_back(reinterpret_cast<const void*>(entry.addr_));
    }
  }

  // Nothing kept fits, and the allocator will ask the driver next. How much is wanted nobody says: the most
  // that was ever wanted at once is made free, where the limit leaves less.
  bool ran_short() {
    Pager* const pager = running();
    if (pager == nullptr) return false;
    const auto reserved =
        static_cast<std::uint64_t>(caching::getDeviceStats(device_.index()).reserved_bytes[0].current);
    const std::uint64_t wanted = std::max<std::uint64_t>(largest_, kLeastSegmentBytes);
    if (limit_ > reserved && limit_ - reserved >= wanted) return false;
    return pager->free_some(wanted);
  }

  void ran_out(std::size_t bytes) {
    std::uint64_t largest = largest_;
    while (bytes > largest && !largest_.compare_exchange_weak(largest, bytes)) {
    }
    if (Pager* const pager = OwnAllocation::is_being_made() ? nullptr : running())
      pager->refuse_allocation(bytes);
  }

 private:
  static constexpr std::uint64_t kLeastReservedBytes = std::uint64_t{64} << 20;  // a few segments
  static constexpr std::uint64_t kLeastSegmentBytes = std::uint64_t{20}
                                                      << 20;  // what the allocator asks for at once

  Pager* running() const {
    Pager* const pager = pager_;
    return pager != nullptr && pager->running() ? pager : nullptr;
  }

  void copy_through(const PageCopy& copy, const CudaEvent& ready, Side& side) const {
    C10_CUDA_CHECK(cudaSetDevice(device_.index()));
    void* const staged = side.staging.of(copy.bytes);
    const cudaStream_t stream = side.stream.stream();
    ready.hold_back(stream);
    if (copy.direction == PageCopy::Direction::kIn) {
      copy.tier->read(copy.slot, staged);
      C10_CUDA_CHECK(cudaMemcpyAsync(copy.data, staged, copy.bytes, cudaMemcpyHostToDevice, stream));
      C10_CUDA_CHECK(cudaStreamSynchronize(stream));
    } else {
      C10_CUDA_CHECK(cudaMemcpyAsync(staged, copy.data, copy.bytes, cudaMemcpyDeviceToHost, stream));
      C10_CUDA_CHECK(cudaStreamSynchronize(stream));
      copy.tier->write(copy.slot, staged);
    }
  }

  c10::Device device_;
  std::atomic<Pager*> pager_ = nullptr;
  std::atomic<std::uint64_t> limit_ = ~std::uint64_t{0};
  std::atomic<std::uint64_t> alive_ = 0;
  std::atomic<std::uint64_t> peak_ = 0;
  std::atomic<std::uint64_t> largest_ = 0;
  double fraction_before_ = 1;
  std::mutex freed_mutex_;
  std::vector<const void*> freed_;
  Side out_;
  Side in_;
};

CudaMemory* memory_of(std::int64_t index) {
  if (index < 0 || index + 1 >= static_cast<std::int64_t>(kDeviceSlots)) return nullptr;
  return memories[static_cast<std::size_t>(index)].load(std::memory_order_acquire);
}

// Called with the allocator's lock held.
class FreePages final : public c10::FreeMemoryCallback {
 public:
  bool Execute() override {
    CudaMemory* const memory = memory_of(c10::cuda::current_device());
    return memory != nullptr && memory->ran_short();
  }
};

void observe_allocator() {
  static const bool observed = [] {
    caching::init(c10::cuda::device_count());
    c10::FreeCudaMemoryCallbacksRegistry()->Register("reef", [] { return std::make_unique<FreePages>(); });
    caching::attachAllocatorTraceTracker([](const TraceEntry& entry) {
      if (CudaMemory* const memory = memory_of(entry.device_)) memory->traced(entry);
    });
    // Throws in the allocator's place.
    caching::attachOutOfMemoryObserver([](std::int64_t index, std::size_t bytes, std::size_t, std::size_t) {
      if (CudaMemory* const memory = memory_of(index)) memory->ran_out(bytes);
    });
    return true;
  }();
  (void)observed;
}

}  // namespace

std::unique_ptr<Memory> cuda_memory(c10::DeviceIndex index) {
  const c10::DeviceIndex count = c10::cuda::device_count();
  if (index >= count) {
    throw ConfigError(
        "there is no budget for cuda:" + std::to_string(index) + ": " +
        (count == 0 ? "no CUDA device was found" : std::to_string(count) + " devices were found"));
  }
  observe_allocator();
  auto memory = std::make_unique<CudaMemory>(index);
  memories[static_cast<std::uint8_t>(index)] = memory.get();  // its pager is never destroyed
  return memory;
}

}  // namespace reef
