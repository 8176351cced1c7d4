#include <ATen/record_function.h>
#include <c10/cuda/CUDACachingAllocator.h>
#include <c10/cuda/CUDAException.h>
#include <c10/cuda/CUDAFunctions.h>
#include <c10/cuda/CUDAGuard.h>

#include <algorithm>
#include <array>
#include <atomic>
#include <mutex>
#include <optional>
#include <unordered_map>
#include <utility>

#include "high_water.h"
#include "ledger/blocks.h"
#include "page/cuda_allocator.h"
#include "page/cuda_page_hash.h"
#include "page/cuda_slots.h"
#include "page/cuda_stream_copy.h"
#include "page/memory.h"
#include "page/own_allocation.h"
#include "page/pager.h"
#include "reef/error.h"
#include "round_up.h"

namespace reef {
namespace {

namespace caching = c10::cuda::CUDACachingAllocator;
using c10::CachingDeviceAllocator::TraceEntry;

class CudaMemory;
std::array<std::atomic<CudaMemory*>, kDeviceSlots> memories{};  ///< that count, by device index
void observe_allocator();

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
  explicit Side(c10::DeviceIndex index) : stream(c10::cuda::getStreamFromPool(false, index)) {}

  c10::cuda::CUDAStream stream;
  std::mutex mutex;  ///< for `staging`: whoever needs a page at once copies it beside the lane
  Staging staging;
  TransferLane lane{1};  ///< the last: its thread uses the others
};

class CudaMemory final : public Memory {
 public:
  explicit CudaMemory(c10::DeviceIndex index) : device_(c10::kCUDA, index), out_(index), in_(index) {}
  ~CudaMemory() override {
    CudaMemory* mine = this;
    memories[static_cast<std::uint8_t>(device_.index())].compare_exchange_strong(mine, nullptr);
  }

  c10::Device device() const override { return device_; }

  bool counts(c10::StorageImpl& storage) override {
    const c10::DataPtr& block = storage._mutable_data_ptr_no_checks();
    return block.get_deleter() == caching::get()->raw_deleter();
  }
  std::uint64_t alive_bytes() const override { return alive_; }
  std::uint64_t peak_bytes() const override { return peak_; }
  std::uint64_t take_peak() override { return reef::take_peak(peak_, alive_); }

  // Only the memory of a pager counts: a lane of a chain's tier has one of its own, beside it.
  void open(Pager& pager) override {
    if (!can_ask_before_allocations() || pager_.exchange(&pager) != nullptr) return;
    observe_allocator();
    note_streams();
    const auto stats = caching::getDeviceStats(device_.index());
    alive_ = peak_ = static_cast<std::uint64_t>(stats.requested_bytes[0].current);
    memories[static_cast<std::uint8_t>(device_.index())] = this;
    ask_before_allocations();
  }

  // The caching allocator holds whole segments, of which parts are free: what it has reserved is what the
  // device has less of.
  void limit(std::uint64_t budget_bytes) override {
    const std::lock_guard lock(limit_mutex_);
    const c10::cuda::CUDAGuard guard(device_.index());
    const std::uint64_t total = total_bytes();
    if (budget_bytes >= total) return lift_limit();
    if (!limit_) fraction_before_ = caching::getMemoryFraction(device_.index());
    caching::emptyCache();
    set_limit(std::max(budget_bytes + budget_bytes / kFragmentedPart, kLeastReservedBytes), total);
  }
  void unlimit() noexcept override {
    const std::lock_guard lock(limit_mutex_);
    try {
      lift_limit();
    } catch (const c10::Error&) {  // the device is broken: nobody will reserve any more
    }
  }
  bool reserve_more(std::uint64_t bytes) override {
    const std::lock_guard lock(limit_mutex_);
    const c10::cuda::CUDAGuard guard(device_.index());
    const std::uint64_t total = total_bytes();
    if (!limit_ || *limit_ >= total) return false;
    set_limit(*limit_ + bytes + kLeastSegmentBytes, total);
    return true;
  }
  void prepare_budget() override {
    check_budget_may_begin(device_.index());
    const c10::cuda::CUDAGuard guard(device_.index());
    hashes_.reserve();
  }

  std::vector<const void*> take_freed() override {
    const std::lock_guard lock(blocks_mutex_);
    return std::exchange(freed_, {});
  }
  bool finish_frees() override {
    if (freeing_ <= 0) return false;
    const c10::cuda::CUDAGuard guard(device_.index());
    caching::emptyCache();
    return true;
  }
  std::uint64_t stream() const override {
    return number_of(c10::cuda::getCurrentCUDAStream(device_.index()).stream());
  }
  std::uint64_t stream_of(const void* data) const override {
    const std::lock_guard lock(blocks_mutex_);
    const auto found = streams_.find(data);
    return found != streams_.end() ? number_of(found->second) : number_of(nullptr);
  }

  c10::DataPtr allocate(std::uint64_t bytes, std::uint64_t stream) override {
    const c10::cuda::CUDAStreamGuard guard(stream_numbered(stream));
    return caching::get()->allocate(bytes);
  }

  c10::DataPtr take_over(const void*) override { return {}; }  // the allocator keeps its blocks by streams

  // Behind what the stream of the memory has been given so far; by itself, a device begins at once.
  std::shared_ptr<Transfer> prepare(const PageCopy& copy) override {
    try {
      return prepared(copy);
    } catch (const c10::Error&) {
      return failed_transfer(std::current_exception());
    }
  }
  std::optional<Tier::Slot> take_slot(Tier& tier, std::uint64_t bytes) override {
    return slots_.take(tier, bytes);
  }
  void give_back(const std::shared_ptr<Tier>& tier, Tier::Slot slot) noexcept override {
    slots_.give_back(tier, slot);
  }
  void finish_copies() noexcept override { slots_.finish(); }

  std::uint64_t slot_bytes(std::uint64_t page_bytes) const override {
    return round_up(page_bytes, CudaPageHash::kNoteBytes) + CudaPageHash::kNoteBytes;
  }
  bool is_in_slot(const PageCopy& copy, std::optional<std::uint64_t> hash) override {
    try {
      const c10::cuda::CUDAGuard guard(device_.index());
      const cudaStream_t used_on = stream_numbered(copy.stream).stream();
      void* const address = address_of(copy, Tier::Access::kCheck);
      if (address == nullptr) return hash && hashes_.of(copy.data, copy.bytes, used_on) == *hash;
      hashes_.write_if_changed(copy.data, copy.bytes, address, used_on);
      const auto end = std::make_shared<CudaEvent>();
      end->record(used_on);
      slots_.used_until(end, copy.tier, copy.slot);
      return true;
    } catch (const c10::Error&) {  // The device is broken: the page stays, and its next use throws.
      return false;
    }
  }
  std::uint64_t rewritten() noexcept override { return rewrites() - rewrites_before_; }
  void reset_rewritten() noexcept override { rewrites_before_ = rewrites(); }

  // Under the allocator's lock.
  void traced(const TraceEntry& entry) {
    // NOLINTNEXTLINE(performance-no-int-to-ptr): the trace gives addresses as integers.
    const auto* const data = reinterpret_cast<const void*>(entry.addr_);
    if (entry.action_ == TraceEntry::ALLOC) {
      raise<std::uint64_t>(peak_, alive_ += entry.size_);
      if (entry.stream_ == nullptr) return;
      const std::lock_guard lock(blocks_mutex_);
      streams_[data] = static_cast<cudaStream_t>(entry.stream_);
    } else if (entry.action_ == TraceEntry::FREE_COMPLETED) {
      alive_ -= entry.size_;
      freeing_ -= entry.size_;
      if (entry.stream_ == nullptr) return;
      const std::lock_guard lock(blocks_mutex_);
      streams_.erase(data);
    } else if (entry.action_ == TraceEntry::FREE_REQUESTED) {
      freeing_ += entry.size_;
      if (running() == nullptr) return;
      const std::lock_guard lock(blocks_mutex_);
      freed_.push_back(data);
    }
  }

 private:
  std::shared_ptr<Transfer> prepared(const PageCopy& copy) {
    const c10::cuda::CUDAGuard guard(device_.index());
    at::RecordFunction range(at::RecordScope::USER_SCOPE);
    if (range.isActive()) range.before(name_of(copy));
    const bool out = copy.direction == PageCopy::Direction::kOut;
    Side& side = out ? out_ : in_;
    void* const address = address_of(copy, out ? Tier::Access::kWrite : Tier::Access::kRead);
    const cudaStream_t used_on = stream_numbered(copy.stream).stream();
    const auto ready = std::make_shared<CudaEvent>();
    ready->record(used_on);
    if (address != nullptr) {
      const auto finished = std::make_shared<CudaEvent>(cudaEventDefault);
      ready->hold_back(side.stream);
      if (out && copy.hashed) hashes_.note(copy.data, copy.bytes, address, side.stream);
      auto transfer = start_on_stream(copy, address, side.stream, used_on, finished);
      slots_.used_until(finished, copy.tier, copy.slot);
      return transfer;
    }
    return side.lane.prepare(
        [this, copy, ready, &side](Transfer& transfer) { copy_through(copy, *ready, side, transfer); });
  }

  static constexpr std::uint64_t kLeastReservedBytes = std::uint64_t{64} << 20;  // a few segments
  static constexpr std::uint64_t kLeastSegmentBytes = std::uint64_t{20}
                                                      << 20;  // for a block of 1 MiB or more
  static constexpr std::uint64_t kFragmentedPart = 8;  // an eighth beside the budget lies between blocks

  static std::uint64_t total_bytes() {
    std::size_t free = 0;
    std::size_t total = 0;
    C10_CUDA_CHECK(cudaMemGetInfo(&free, &total));
    return total;
  }
  void lift_limit() {
    if (!std::exchange(limit_, std::nullopt)) return;
    caching::setMemoryFraction(fraction_before_, device_.index());
  }
  void set_limit(std::uint64_t bytes, std::uint64_t total) {
    limit_ = std::min(bytes, total);
    const double part = static_cast<double>(*limit_) / static_cast<double>(total);
    caching::setMemoryFraction(std::min(part, fraction_before_), device_.index());
  }

  static std::uint64_t number_of(cudaStream_t stream) { return reinterpret_cast<std::uint64_t>(stream) + 1; }
  c10::cuda::CUDAStream stream_numbered(std::uint64_t number) const {
    if (number == 0) return c10::cuda::getCurrentCUDAStream(device_.index());
    // NOLINTNEXTLINE(performance-no-int-to-ptr): by number_of.
    return c10::cuda::getStreamFromExternal(reinterpret_cast<cudaStream_t>(number - 1), device_.index());
  }

  Pager* running() const {
    Pager* const pager = pager_;
    return pager != nullptr && pager->running() ? pager : nullptr;
  }

  // Of the blocks that there are.
  void note_streams() {
    const auto snapshot = caching::snapshot();
    const std::lock_guard lock(blocks_mutex_);
    for (const auto& segment : snapshot.segments) {
      if (segment.stream == nullptr || segment.device != device_.index()) continue;
      std::size_t address = segment.address;
      for (const auto& block : segment.blocks) {
        // NOLINTNEXTLINE(performance-no-int-to-ptr): the snapshot gives addresses as integers.
        const auto* const data = reinterpret_cast<const void*>(address);
        if (block.allocated) streams_[data] = static_cast<cudaStream_t>(segment.stream);
        address += block.size;
      }
    }
  }

  // Returns where the slot is, or nullptr if the device cannot reach it or it is not aligned for kernels.
  static void* address_of(const PageCopy& copy, Tier::Access access) {
    constexpr std::uintptr_t kAlignment = 16;
    void* const address = copy.tier->address(copy.slot, access);
    return reinterpret_cast<std::uintptr_t>(address) % kAlignment == 0 ? address : nullptr;
  }

  std::uint64_t rewrites() noexcept {
    try {
      const c10::cuda::CUDAGuard guard(device_.index());
      known_rewrites_ = hashes_.written();
    } catch (const c10::Error&) {  // the device is broken
    }
    return known_rewrites_;
  }

  void copy_through(const PageCopy& copy, const CudaEvent& ready, Side& side, Transfer& transfer) {
    const std::lock_guard lock(side.mutex);
    const c10::cuda::CUDAGuard guard(device_.index());
    void* const staged = side.staging.of(copy.hashed ? slot_bytes(copy.bytes) : copy.bytes);
    const cudaStream_t stream = side.stream.stream();
    ready.hold_back(stream);
    if (copy.direction == PageCopy::Direction::kIn) {
      copy.tier->read(copy.slot, staged);
      C10_CUDA_CHECK(cudaMemcpyAsync(copy.data, staged, copy.bytes, cudaMemcpyHostToDevice, stream));
      C10_CUDA_CHECK(cudaStreamSynchronize(stream));
    } else {
      // The hash is taken before the copy: a write between the two then makes the memory's hash another one.
      if (copy.hashed) transfer.hash = hashes_.of(copy.data, copy.bytes, stream);
      C10_CUDA_CHECK(cudaMemcpyAsync(staged, copy.data, copy.bytes, cudaMemcpyDeviceToHost, stream));
      C10_CUDA_CHECK(cudaStreamSynchronize(stream));
      copy.tier->write(copy.slot, staged);
    }
  }

  c10::Device device_;
  std::atomic<Pager*> pager_ = nullptr;
  std::atomic<std::uint64_t> alive_ = 0;
  std::atomic<std::uint64_t> peak_ = 0;
  std::atomic<std::int64_t> freeing_ = 0;  ///< bytes of blocks that were freed while other streams used them
  std::mutex limit_mutex_;
  std::optional<std::uint64_t> limit_;  ///< of what may be reserved
  double fraction_before_ = 1;
  mutable std::mutex blocks_mutex_;
  std::vector<const void*> freed_;
  std::unordered_map<const void*, cudaStream_t> streams_;  ///< of blocks that the default stream has not
  CudaSlots slots_;
  CudaPageHash hashes_;
  std::atomic<std::uint64_t> known_rewrites_ = 0;
  std::atomic<std::uint64_t> rewrites_before_ = 0;
  Side out_;
  Side in_;
};

CudaMemory* memory_of(std::int64_t index) {
  if (index < 0 || index + 1 >= static_cast<std::int64_t>(kDeviceSlots)) return nullptr;
  return memories[static_cast<std::size_t>(index)].load(std::memory_order_acquire);
}

void observe_allocator() {
  static const bool observed = [] {
    caching::init(c10::cuda::device_count());
    caching::attachAllocatorTraceTracker([](const TraceEntry& entry) {
      if (CudaMemory* const memory = memory_of(entry.device_)) memory->traced(entry);
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
  return std::make_unique<CudaMemory>(index);
}

}  // namespace reef
