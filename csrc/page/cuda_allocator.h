#pragma once

#include <c10/core/Device.h>

namespace reef {

/// Makes LibTorch's caching allocator ask the pager of a device, while it has a budget, for room before every
/// allocation there, with the bytes that are wanted and outside the allocator's locks, from now on. Where the
/// allocator runs short all the same, because what is free does not lie side by side in what it may reserve,
/// pages leave until the allocation succeeds, and when none is left it may reserve more.
///
/// What keeps addresses for longer than operators run is refused while the budget is in force: CUDA graphs
/// that are captured, and memory pools.
void ask_before_allocations();

/// Whether the process has LibTorch's caching allocator, not cudaMallocAsync or a pluggable one.
bool can_ask_before_allocations();

/// Throws ConfigError if a budget cannot begin: the allocator is another, or a CUDA graph or a memory pool of
/// the device is alive.
void check_budget_may_begin(c10::DeviceIndex device);

}  // namespace reef
