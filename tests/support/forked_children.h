#pragma once

namespace reef {

/// Whether a child that was forked beside running threads may allocate. GCC 12's AddressSanitizer does not
/// hold its own locks during a fork, so a child can wait for ever for one that another thread of its parent
/// had.
#ifdef __SANITIZE_ADDRESS__
constexpr bool kForkedChildrenMayAllocate = false;
#else
constexpr bool kForkedChildrenMayAllocate = true;
#endif
constexpr const char* kForkedChildrenMayHang =
    "under AddressSanitizer a forked child may wait for ever for a lock of the allocator";

}  // namespace reef
