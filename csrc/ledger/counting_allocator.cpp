#include "ledger/counting_allocator.h"

#include <c10/core/CPUAllocator.h>
#include <c10/core/StorageImpl.h>

#include <atomic>
#include <mutex>

#include "high_water.h"
#include "ledger/allocation_gate.h"
#include "ledger/blocks.h"
#include "reef/error.h"
#include "reef/ledger.h"

namespace reef {
namespace {

// Deleters are plain functions, so what they need is of the process, not of an object.
std::atomic<std::int64_t> live_bytes{0};
std::atomic<std::int64_t> peak_bytes{0};
c10::Allocator* wrapped = nullptr;
c10::DeleterFnPtr wrapped_delete = nullptr;

void give_back(void* data) {
  AllocationGate* const closed = allocation_gate.load(std::memory_order_acquire);
  if (closed == nullptr || !closed->counts_itself(data)) count_alive(-Blocks::instance().died(data));
  if (closed == nullptr || !closed->take_back(data)) wrapped_delete(data);
}

// Also meets pointers it never issued: libraries free through the allocator of the day what was allocated
// before.
void count_and_delete(void* data) {
  AllocationGate* const closed = allocation_gate.load(std::memory_order_acquire);
  if (closed == nullptr || !closed->freed(data)) give_back(data);
}

void count_birth(const void* data, std::size_t bytes) {
  count_alive(static_cast<std::int64_t>(bytes) - Blocks::instance().born(data, bytes, 0));
}

class CountingAllocator final : public c10::Allocator {
 public:
  c10::DataPtr allocate(std::size_t bytes) override {
    AllocationGate* const closed = bytes > 0 ? allocation_gate.load(std::memory_order_acquire) : nullptr;
    const Reservation reservation(closed, bytes);
    void* const own = closed == nullptr ? nullptr : closed->allocate(bytes);
    if (own == nullptr) return counted(bytes);
    if (!closed->counts_itself(own)) count_birth(own, bytes);
    return {own, own, &count_and_delete, c10::Device(c10::kCPU)};
  }
  c10::DeleterFnPtr raw_deleter() const override { return &count_and_delete; }
  void copy_data(void* to, const void* from, std::size_t bytes) const override {
    default_copy_data(to, from, bytes);
  }

 private:
  // What the gate let through, until it is counted or has failed.
  struct Reservation {
    Reservation(AllocationGate* closed, std::size_t size)
        : gate_of(closed != nullptr && closed->before_allocate(size) ? closed : nullptr), bytes(size) {}
    ~Reservation() {
      if (gate_of != nullptr) gate_of->after_allocate(bytes);
    }
    Reservation(const Reservation&) = delete;
    Reservation& operator=(const Reservation&) = delete;
    AllocationGate* gate_of;
    std::size_t bytes;
  };

  static c10::DataPtr counted(std::size_t bytes) {
    c10::DataPtr block = wrapped->allocate(bytes);
    void* const data = block.get();
    if (data == nullptr || bytes == 0) return block;
    // raw_allocate() asserts that context and data are one pointer, so nothing can be stored beside the
    // block.
    const c10::Device device = block.device();
    block.release_context();
    count_birth(data, bytes);
    return {data, data, &count_and_delete, device};
  }
};

}  // namespace

void install_counting_allocator() {
  static const bool installed = [] {
    wrapped = c10::GetCPUAllocator();
    wrapped_delete = wrapped->raw_deleter();
    if (wrapped_delete == nullptr) {
      throw ConfigError(
          "Reef cannot count CPU memory: the CPU allocator in place has no raw deleter; "
          "make the first reef::Ledger before the library that installs it");
    }
    constexpr std::uint8_t kPriority = 255;
    auto* const allocator = new CountingAllocator;  // owned by c10 from the next line on, never destroyed
    c10::SetCPUAllocator(allocator, kPriority);
    if (wrapped == c10::GetDefaultCPUAllocator()) counted_deleter = allocator->raw_deleter();
    return true;
  }();
  (void)installed;
}

c10::DataPtr given_back_later(const void* data) {
  void* const block = const_cast<void*>(data);
  return {block, block, &give_back, c10::Device(c10::kCPU)};
}

void count_alive(std::int64_t bytes) {
  raise(peak_bytes, live_bytes.fetch_add(bytes, std::memory_order_relaxed) + bytes);
}

std::int64_t allocator_live_bytes() { return live_bytes.load(std::memory_order_relaxed); }
std::int64_t allocator_peak_bytes() { return peak_bytes.load(std::memory_order_relaxed); }
std::int64_t take_allocator_peak() { return take_peak(peak_bytes, live_bytes); }

bool adopt(c10::StorageImpl& storage) {
  if (storage.device_type() != c10::kCPU || storage.nbytes() == 0 || wrapped == nullptr) return false;
  c10::DataPtr& block = storage._mutable_data_ptr_no_checks();
  if (block.get() == nullptr || block.get_context() != block.get()) return false;
  if (!block.compare_exchange_deleter(wrapped_delete, &count_and_delete)) return false;
  count_birth(block.get(), storage.nbytes());
  return true;
}

}  // namespace reef
