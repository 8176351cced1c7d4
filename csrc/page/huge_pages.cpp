#include "page/huge_pages.h"

#include <c10/core/CPUAllocator.h>
#include <sys/mman.h>

#include <cstdint>

namespace reef {
namespace {

constexpr std::int64_t kHugePageBytes = std::int64_t{2} << 20;
constexpr std::int64_t kLeastBytes = 2 * kHugePageBytes;

}  // namespace

at::Tensor on_huge_pages(at::Tensor fresh) {
  const c10::Storage& storage = fresh.storage();
  const auto bytes = static_cast<std::int64_t>(storage.nbytes());
  const bool is_plain =
      fresh.is_cpu() && storage.data_ptr().get_deleter() == c10::GetDefaultCPUAllocator()->raw_deleter();
  if (!is_plain || bytes < kLeastBytes) return fresh;
  auto* const begin = static_cast<char*>(storage.mutable_data());
  const std::int64_t before = -reinterpret_cast<std::intptr_t>(begin) & (kHugePageBytes - 1);
  const std::int64_t inside = (bytes - before) / kHugePageBytes * kHugePageBytes;
  ::madvise(begin + before, static_cast<std::size_t>(inside), MADV_HUGEPAGE);  // an advice, which may fail
  return fresh;
}

}  // namespace reef
