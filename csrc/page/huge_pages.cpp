#include "page/huge_pages.h"

#include <c10/core/CPUAllocator.h>
#include <sys/mman.h>

#include <cstdint>

#include "ledger/allocation_gate.h"

namespace reef {
namespace {

constexpr std::int64_t kHugePageBytes = std::int64_t{2} << 20;
constexpr std::int64_t kLeastBytes = 2 * kHugePageBytes;

// Whether memory is from LibTorch's own allocator, counted or not. While a gate provides memory, counted
// memory may be the gate's.
bool is_plain(const c10::DataPtr& fresh) {
  const c10::DeleterFnPtr deleter = fresh.get_deleter();
  if (deleter == c10::GetDefaultCPUAllocator()->raw_deleter()) return true;
  return deleter != nullptr && deleter == counted_deleter.load() && !gate_gives_memory();
}

}  // namespace

at::Tensor on_huge_pages(at::Tensor fresh) {
  const c10::Storage& storage = fresh.storage();
  const auto bytes = static_cast<std::int64_t>(storage.nbytes());
  if (!fresh.is_cpu() || bytes < kLeastBytes || !is_plain(storage.data_ptr())) return fresh;
  auto* const begin = static_cast<char*>(storage.mutable_data());
  const std::int64_t before = -reinterpret_cast<std::intptr_t>(begin) & (kHugePageBytes - 1);
  const std::int64_t inside = (bytes - before) / kHugePageBytes * kHugePageBytes;
  ::madvise(begin + before, static_cast<std::size_t>(inside), MADV_HUGEPAGE);  // Only advice; it may fail.
  return fresh;
}

}  // namespace reef
