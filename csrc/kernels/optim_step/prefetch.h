#pragma once

#include <cstdint>

namespace reef::kernels {

/// The prefetch distance of loops that compute much. The processor does not look that far ahead by itself.
inline constexpr std::uintptr_t kPrefetchBytes = 2048;
/// The prefetch distance of loops that compute little. It depends on the processor's vendor: an Intel core
/// does not fill its line buffers by itself, and prefetching 2 KiB ahead makes it a tenth faster; an AMD core
/// does, and prefetching 2 KiB ahead makes it a twentieth slower.
extern const std::uintptr_t prefetch_bytes;

}  // namespace reef::kernels
