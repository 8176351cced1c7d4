#pragma once

#include <cstdint>

namespace reef::kernels {

/// How far ahead of what it reads a loop asks for memory, by the maker of the processor. One core of Intel's
/// does not fill its line buffers by itself: 2 KiB ahead is worth a tenth. One of AMD's does, and 2 KiB ahead
/// costs it a twentieth and more.
extern const std::uintptr_t prefetch_bytes;

}  // namespace reef::kernels
