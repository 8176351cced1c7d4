// Counts the bytes of the C library's heap that are alive, exactly, for any program, C++ or Python:
// LD_PRELOAD it and call the two functions at the end. What is mapped past malloc is not in it.
#include <malloc.h>

#include <atomic>
#include <cerrno>
#include <cstddef>

#include "high_water.h"

extern "C" {
void* __libc_malloc(std::size_t) noexcept;
void* __libc_calloc(std::size_t, std::size_t) noexcept;
void* __libc_realloc(void*, std::size_t) noexcept;
void* __libc_memalign(std::size_t, std::size_t) noexcept;
void __libc_free(void*) noexcept;
}

namespace {

constinit std::atomic<long> live_bytes{0};
constinit std::atomic<long> peak_bytes{0};

void* born(void* data) {
  if (data == nullptr) return data;
  const auto bytes = static_cast<long>(malloc_usable_size(data));
  reef::raise(peak_bytes, live_bytes.fetch_add(bytes, std::memory_order_relaxed) + bytes);
  return data;
}

void dies(void* data) {
  if (data != nullptr)
    live_bytes.fetch_sub(static_cast<long>(malloc_usable_size(data)), std::memory_order_relaxed);
}

}  // namespace

extern "C" {

void* malloc(std::size_t bytes) noexcept { return born(__libc_malloc(bytes)); }
void* calloc(std::size_t count, std::size_t bytes) noexcept { return born(__libc_calloc(count, bytes)); }
void* realloc(void* data, std::size_t bytes) noexcept {
  const long before = data == nullptr ? 0 : static_cast<long>(malloc_usable_size(data));
  void* const moved = __libc_realloc(data, bytes);
  if (moved != nullptr || bytes == 0) live_bytes.fetch_sub(before, std::memory_order_relaxed);
  return born(moved);
}
void* memalign(std::size_t alignment, std::size_t bytes) noexcept {
  return born(__libc_memalign(alignment, bytes));
}
void* aligned_alloc(std::size_t alignment, std::size_t bytes) noexcept { return memalign(alignment, bytes); }
int posix_memalign(void** data, std::size_t alignment, std::size_t bytes) noexcept {
  *data = memalign(alignment, bytes);
  return *data == nullptr && bytes > 0 ? ENOMEM : 0;
}
void free(void* data) noexcept {
  dies(data);
  __libc_free(data);
}

long heap_live_bytes() { return live_bytes; }
/// The most since the last call.
long heap_take_peak_bytes() { return reef::take_peak(peak_bytes, live_bytes); }

}  // extern "C"
