#include <ATen/record_function.h>
#include <c10/core/CPUAllocator.h>
#include <c10/util/ThreadLocalDebugInfo.h>

#include <limits>
#include <memory>
#include <string>

#include "ledger/allocation_gate.h"
#include "ledger/blocks.h"
#include "ledger/counting_allocator.h"
#include "page/memory.h"
#include "page/pager.h"
#include "reef/bytes.h"
#include "reef/ledger.h"
#include "tier/hash.h"

namespace reef {
namespace {

// The state that makes another thread record in this thread's profile. It is not the whole thread-local state
// that LibTorch passes between threads, because that may own Python objects, and threads that drop a transfer
// must not wait for Python's lock.
struct Profiled {
  at::RecordFunctionTLS callbacks = at::get_record_function_tls_();
  std::shared_ptr<c10::ThreadLocalDebugInfo> info = c10::ThreadLocalDebugInfo::current();
};
class ProfiledHere {
 public:
  explicit ProfiledHere(const Profiled& there) { set(there); }
  ~ProfiledHere() { set(before_); }
  ProfiledHere(const ProfiledHere&) = delete;
  ProfiledHere& operator=(const ProfiledHere&) = delete;

 private:
  static void set(const Profiled& profiled) {
    at::set_record_function_tls_(profiled.callbacks);
    c10::ThreadLocalDebugInfo::_forceCurrentDebugInfo(profiled.info);
  }
  const Profiled before_;
};

void move(const PageCopy& copy, Transfer& transfer) {
  void* const data = copy.open ? copy.open(transfer) : copy.data;
  if (data == nullptr || copy.kept) return;
  if (copy.direction == PageCopy::Direction::kIn) return copy.tier->read(copy.slot, data);
  if (copy.hashed) transfer.hash = hash_bytes(data, copy.bytes);
  transfer.same = copy.known_hash && copy.known_hash == transfer.hash;
  if (!transfer.same) copy.tier->write(copy.slot, data);
}

// Makes the function that copies. If the submitting thread is being profiled, the copy is a range in torch's
// profiler. A copy out returns the hash of the bytes that it has read; if something writes at the same time,
// this is not the hash of the page, which then stays.
TransferLane::Copy copy_of(PageCopy copy) {
  copy.ended = nullptr;
  if (!at::hasThreadLocalCallbacks()) return [copy](Transfer& transfer) { move(copy, transfer); };
  return [copy, profiled = Profiled()](Transfer& transfer) {
    const ProfiledHere here(profiled);
    at::RecordFunction range(at::RecordScope::USER_SCOPE);
    if (range.isActive()) range.before(name_of(copy));
    move(copy, transfer);
  };
}

class HostMemory final : public Memory {
 public:
  HostMemory() { install_counting_allocator(); }

  c10::Device device() const override { return c10::kCPU; }

  bool counts(c10::StorageImpl& storage) override {
    const void* const data = storage._mutable_data_ptr_no_checks().get();
    return Blocks::instance().category_of(data).has_value() || adopt(storage);
  }
  std::uint64_t alive_bytes() const override { return static_cast<std::uint64_t>(allocator_live_bytes()); }
  std::uint64_t peak_bytes() const override { return static_cast<std::uint64_t>(allocator_peak_bytes()); }
  std::uint64_t take_peak() override { return static_cast<std::uint64_t>(take_allocator_peak()); }

  void open(Pager& pager) override { allocation_gate.store(&pager, std::memory_order_release); }

  c10::DataPtr take_over(const void* data) override { return given_back_later(data); }
  c10::DataPtr allocate(std::uint64_t bytes, std::uint64_t) override {
    return c10::GetCPUAllocator()->allocate(bytes);
  }
  std::shared_ptr<Transfer> prepare(const PageCopy& copy) override {
    TransferLane& lane = copy.direction == PageCopy::Direction::kOut ? out_ : in_;
    return lane.prepare(copy_of(copy), copy.ended, /*at_once=*/copy.kept);
  }
  bool is_in_slot(const PageCopy& copy, std::optional<std::uint64_t> hash) override {
    return hash_bytes(copy.data, copy.bytes) == hash.value_or(0);
  }

 private:
  // Two threads each, so that one page is hashed and copied while the disk works on another.
  TransferLane out_{2};
  TransferLane in_{2};
};

}  // namespace

std::string name_of(const PageCopy& copy) {
  const bool out = copy.direction == PageCopy::Direction::kOut;
  return (out ? "reef::evict to " : "reef::fetch from ") + copy.tier->name() + ", " +
         format_bytes(static_cast<std::int64_t>(copy.bytes));
}

std::unique_ptr<Memory> host_memory() { return std::make_unique<HostMemory>(); }

}  // namespace reef
