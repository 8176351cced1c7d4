#pragma once

#include <c10/core/Allocator.h>
#include <c10/core/Storage.h>

namespace reef {

/// Puts the counting allocator in front of LibTorch's CPU allocator, once in the process and for good. Throws
/// ConfigError if the allocator in place cannot be wrapped.
void install_counting_allocator();

/// The most that allocator_live_bytes() has been since take_allocator_peak(), which begins anew.
std::int64_t allocator_peak_bytes();
std::int64_t take_allocator_peak();

/// So many bytes of memory that counts itself (AllocationGate::counts_itself()) have become alive; negative:
/// no longer are.
void count_alive(std::int64_t bytes);

/// Gives a block back that stayed where AllocationGate::freed() wanted it.
c10::DataPtr given_back_later(const void* data);

/// Starts counting a block that is older than the counting allocator: from now on its deleter is ours. False
/// if it is not a block of LibTorch's CPU allocator (from_blob, shared memory, another device) or is counted
/// already.
bool adopt(c10::StorageImpl& storage);

}  // namespace reef
