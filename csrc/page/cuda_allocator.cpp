#include "page/cuda_allocator.h"

#include <c10/core/Allocator.h>
#include <c10/cuda/CUDACachingAllocator.h>
#include <c10/cuda/CUDAFunctions.h>

#include <utility>

#include "compat.h"
#include "page/pager.h"
#include "reef/bytes.h"
#include "reef/error.h"

namespace reef {
namespace {

namespace caching = c10::cuda::CUDACachingAllocator;
using c10::MempoolId_t;
using caching::CUDAAllocator;

Pager* running_on(c10::DeviceIndex device) { return Pager::running(c10::Device(c10::kCUDA, device)); }

/// An allocation that the pager has been asked for.
class Asked {
 public:
  Asked(Pager& pager, std::size_t bytes)
      : pager_(pager), bytes_(bytes), asked_(pager.before_allocate(bytes)) {}
  ~Asked() {
    if (asked_) pager_.after_allocate(bytes_);
  }
  Asked(const Asked&) = delete;
  Asked& operator=(const Asked&) = delete;

 private:
  Pager& pager_;
  std::size_t bytes_;
  bool asked_;
};

/// LibTorch's own allocator, whose every allocation is asked for. All else is passed on.
class AskingAllocator final : public CUDAAllocator {
 public:
  explicit AskingAllocator(CUDAAllocator& base) : base_(base) {}

  c10::DataPtr allocate(std::size_t bytes) override {
    return asking(bytes, [&] { return base_.allocate(bytes); });
  }
  void* raw_alloc(std::size_t bytes) override {
    return asking(bytes, [&] { return base_.raw_alloc(bytes); });
  }
  void* raw_alloc_with_stream(std::size_t bytes, cudaStream_t stream) override {
    return asking(bytes, [&] { return base_.raw_alloc_with_stream(bytes, stream); });
  }
  void beginAllocateToPool(c10::DeviceIndex device, MempoolId_t pool,
                           std::function<bool(cudaStream_t)> filter) override {
    if (running_on(device) != nullptr) {
      throw ConfigError("a budget for cuda:" + std::to_string(device) +
                        " is in force, so a CUDA graph cannot be captured and no memory pool used there: a "
                        "graph keeps the addresses of tensors that the budget moves; end the budget first");
    }
    base_.beginAllocateToPool(device, pool, std::move(filter));
  }

  // ---- passed on
  c10::DeleterFnPtr raw_deleter() const override { return base_.raw_deleter(); }
  bool is_simple_data_ptr(const c10::DataPtr& data) const override { return base_.is_simple_data_ptr(data); }
  void copy_data(void* to, const void* from, std::size_t bytes) const override {
    base_.copy_data(to, from, bytes);
  }
  bool initialized() override { return base_.initialized(); }
  void emptyCache(MempoolId_t pool) override { base_.emptyCache(pool); }
  void recordStream(const c10::DataPtr& data, c10::cuda::CUDAStream stream) override {
    base_.recordStream(data, stream);
  }
  c10::CachingDeviceAllocator::DeviceStats getDeviceStats(c10::DeviceIndex device) override {
    return base_.getDeviceStats(device);
  }
  void resetAccumulatedStats(c10::DeviceIndex device) override { base_.resetAccumulatedStats(device); }
  void resetPeakStats(c10::DeviceIndex device) override { base_.resetPeakStats(device); }
  std::pair<std::size_t, std::size_t> getMemoryInfo(c10::DeviceIndex device) override {
    return base_.getMemoryInfo(device);
  }
  void raw_delete(void* data) override { base_.raw_delete(data); }
  void init(int devices) override { base_.init(devices); }
  double getMemoryFraction(c10::DeviceIndex device) override { return base_.getMemoryFraction(device); }
  void setMemoryFraction(double fraction, c10::DeviceIndex device) override {
    base_.setMemoryFraction(fraction, device);
  }
  std::vector<caching::StreamSegmentSize> getExpandableSegmentSizes(c10::DeviceIndex device) override {
    return base_.getExpandableSegmentSizes(device);
  }
  void enable(bool value) override { base_.enable(value); }
  bool isEnabled() const override { return base_.isEnabled(); }
  void cacheInfo(c10::DeviceIndex device, std::size_t* largest) override { base_.cacheInfo(device, largest); }
  void* getBaseAllocation(void* data, std::size_t* bytes) override {
    return base_.getBaseAllocation(data, bytes);
  }
  caching::SnapshotInfo snapshot(MempoolId_t pool, bool include_traces) override {
    return base_.snapshot(pool, include_traces);
  }
  void endAllocateToPool(c10::DeviceIndex device, MempoolId_t pool) override {
    base_.endAllocateToPool(device, pool);
  }
  void releasePool(c10::DeviceIndex device, MempoolId_t pool) override { base_.releasePool(device, pool); }
  int getPoolUseCount(c10::DeviceIndex device, MempoolId_t pool) override {
    return base_.getPoolUseCount(device, pool);
  }
  void createOrIncrefPool(c10::DeviceIndex device, MempoolId_t pool,
                          std::shared_ptr<CUDAAllocator> allocator) override {
    base_.createOrIncrefPool(device, pool, std::move(allocator));
  }
  void setUseOnOOM(c10::DeviceIndex device, MempoolId_t pool, bool use) override {
    base_.setUseOnOOM(device, pool, use);
  }
  void setNoSplit(c10::DeviceIndex device, MempoolId_t pool) override { base_.setNoSplit(device, pool); }
  bool checkPoolLiveAllocations(c10::DeviceIndex device, MempoolId_t pool,
                                const std::unordered_set<void*>& expected) override {
    return base_.checkPoolLiveAllocations(device, pool, expected);
  }
  caching::ShareableHandle shareIpcHandle(void* data) override { return base_.shareIpcHandle(data); }
  std::shared_ptr<void> getIpcDevPtr(std::string handle) override {
    return base_.getIpcDevPtr(std::move(handle));
  }
  bool isHistoryEnabled() override { return base_.isHistoryEnabled(); }
  void recordHistory(bool enabled, caching::CreateContextFn recorder, std::size_t most_entries,
                     caching::RecordContext when, bool clear,
                     const std::vector<std::string>& skipped) override {
    base_.recordHistory(enabled, recorder, most_entries, when, clear, skipped);
  }
  void recordAnnotation(const std::vector<std::pair<std::string, std::string>>& annotation) override {
    base_.recordAnnotation(annotation);
  }
  void pushCompileContext(std::string& context) override { base_.pushCompileContext(context); }
  void popCompileContext() override { base_.popCompileContext(); }
  void setUserMetadata(const std::string& metadata) override { base_.setUserMetadata(metadata); }
  std::string getUserMetadata() override { return base_.getUserMetadata(); }
  void attachOutOfMemoryObserver(caching::OutOfMemoryObserver observer) override {
    base_.attachOutOfMemoryObserver(std::move(observer));
  }
  void attachAllocatorTraceTracker(caching::AllocatorTraceTracker tracker) override {
    base_.attachAllocatorTraceTracker(std::move(tracker));
  }
  void enablePeerAccess(c10::DeviceIndex device, c10::DeviceIndex other) override {
    base_.enablePeerAccess(device, other);
  }
  cudaError_t memcpyAsync(void* to, int to_device, const void* from, int from_device, std::size_t bytes,
                          cudaStream_t stream, bool peers) override {
    return base_.memcpyAsync(to, to_device, from, from_device, bytes, stream, peers);
  }
  std::shared_ptr<caching::AllocatorState> getCheckpointState(c10::DeviceIndex device,
                                                              MempoolId_t pool) override {
    return base_.getCheckpointState(device, pool);
  }
  caching::CheckpointDelta setCheckpointPoolState(c10::DeviceIndex device,
                                                  std::shared_ptr<caching::AllocatorState> state) override {
    return base_.setCheckpointPoolState(device, std::move(state));
  }
  std::string name() override { return base_.name(); }
#if REEF_TORCH >= 212
  std::shared_ptr<c10::GatheredContext> getContextForPointer(const void* data) override {
    return base_.getContextForPointer(data);
  }
  void attachOomRejectionObserver(caching::OomRejectionObserver observer) override {
    base_.attachOomRejectionObserver(std::move(observer));
  }
#endif
#if REEF_TORCH >= 213
  void markCaptureBegin(c10::DeviceIndex device) override { base_.markCaptureBegin(device); }
  void markCaptureEnd(c10::DeviceIndex device) override { base_.markCaptureEnd(device); }
  c10::DataPtr allocateWithAddress(std::size_t bytes, void* address) override {
    return asking(bytes, [&] { return base_.allocateWithAddress(bytes, address); });
  }
#endif
#if REEF_TORCH >= 214
  bool supportsUserMetadata() override { return base_.supportsUserMetadata(); }
  void annotateMemory(const void* data, const std::string& metadata) override {
    base_.annotateMemory(data, metadata);
  }
#endif

 private:
  template <class Allocate>
  auto asking(std::size_t bytes, const Allocate& allocate) -> decltype(allocate()) {
    Pager* const pager = running_on(c10::cuda::current_device());
    if (pager == nullptr) return allocate();
    const Asked asked(*pager, bytes);
    for (;;) {
      try {
        return allocate();
      } catch (c10::OutOfMemoryError& error) {
        if (pager->free_some(bytes) || pager->reserve_more(bytes)) continue;
        error.add_context("No page can leave any more, and the budget of " +
                          format_bytes(static_cast<std::int64_t>(pager->budget_bytes())) +
                          " has room for it: the device itself has none");
        pager->refuse(std::current_exception());
      }
    }
  }

  CUDAAllocator& base_;
};

}  // namespace

bool can_ask_before_allocations() { return caching::get()->name() == "native"; }

void check_budget_may_begin(c10::DeviceIndex device) {
  if (!can_ask_before_allocations()) {
    throw ConfigError("there is no budget where the allocator of CUDA memory is '" + caching::get()->name() +
                      "': only LibTorch's own caching allocator (backend:native) can be asked");
  }
  for (const auto& segment : caching::snapshot().segments) {
    const MempoolId_t pool = segment.owner_private_pool_id;
    if (segment.device != device || pool == MempoolId_t{0, 0}) continue;
    if (caching::get()->getPoolUseCount(device, pool) == 0) continue;
    throw ConfigError("there is a CUDA graph, or a memory pool, on cuda:" + std::to_string(device) +
                      ": it keeps the addresses of tensors, which a budget moves; let go of it before the "
                      "budget begins, or capture it after the budget has ended");
  }
}

void ask_before_allocations() {
  static const bool installed = [] {
    // Never destroyed: allocations are made until the process ends.
    auto* const asking = new AskingAllocator(*caching::get());
    caching::allocator.store(asking);
    if (c10::GetAllocator(c10::kCUDA) != nullptr) c10::SetAllocator(c10::kCUDA, asking, 0);
    return true;
  }();
  (void)installed;
}

}  // namespace reef
