#pragma once

#include <cstdint>

namespace reef::kernels {

/// How far ahead of what it reads a loop asks for memory. Where there is much to compute, far: the processor
/// does not look ahead so far by itself.
inline constexpr std::uintptr_t kPrefetchBytes = 2048;
/// Where there is little, by the maker of the processor: one core of Intel's does not fill its line buffers
/// by itself, and 2 KiB ahead is worth a tenth; one of AMD's does, and 2 KiB ahead costs it a twentieth.
extern const std::uintptr_t prefetch_bytes;

}  // namespace reef::kernels
