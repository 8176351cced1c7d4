#pragma once

#include <ATen/core/Tensor.h>

namespace reef {

/// Asks for huge pages under the memory of a tensor that was just allocated and is about to be written whole,
/// and gives the tensor back. The kernel then faults memory in by 2 MiB; by 4 KiB that takes longer than to
/// copy the bytes. Does nothing for less than 4 MiB, for other memory than that of LibTorch's own allocator
/// for the CPU, counted or not, while a budget for the CPU is in force (its memory has frames of its own),
/// and where the kernel has no huge pages.
at::Tensor on_huge_pages(at::Tensor fresh);

}  // namespace reef
