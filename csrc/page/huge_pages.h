#pragma once

#include <ATen/core/Tensor.h>

namespace reef {

/// Asks the kernel for huge pages for a tensor that was just allocated and is about to be written completely,
/// and returns the tensor. The kernel then faults memory in by 2 MiB; by 4 KiB this takes longer than copying
/// the bytes. Does nothing for less than 4 MiB, for memory that is not from LibTorch's own CPU allocator
/// (counted or not), while a budget for the CPU is in force (its memory has frames of its own), and if the
/// kernel has no huge pages.
at::Tensor on_huge_pages(at::Tensor fresh);

}  // namespace reef
