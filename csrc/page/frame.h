#pragma once

#include <c10/util/SmallVector.h>

#include <array>
#include <cstddef>
#include <exception>
#include <string>
#include <vector>

#include "ledger/blocks.h"
#include "page/page.h"
#include "page/step_follower.h"

namespace reef {

/// The pages of one memory that one thread's running operators use. Only that thread reads and writes it;
/// pages are pinned and unpinned under the pager's lock.
struct Frame {
  struct Use {
    PagePtr page;
    bool writes = false;
    c10::StorageImpl* owner = nullptr;  ///< the page's storage, only while the operator begins
  };
  /// What an operator without a kernel of its own, or a function of autograd, was given: pinned until that
  /// ends, while the operators within it pin and unpin theirs.
  struct Held {
    const void* call = nullptr;
    PagePtr page;
    const void* unknown = nullptr;  ///< instead of a page: a storage that is none
  };

  std::exception_ptr failed;        ///< why a page did not come, for the next allocation to throw
  std::exception_ptr refused;       ///< what an allocation within the outermost operator was refused with
  const std::string* op = nullptr;  ///< the outermost operator with a kernel of its own; nullptr outside
  int depth = 0;                    ///< of operators with a kernel of their own
  bool knew = false;                ///< the outermost used a page
  bool oversized = false;           ///< its pages do not fit, and come when it touches them
  /// The outermost touches only the memory of its arguments and its own, so what it calls need not be seen.
  bool closed = false;
  std::size_t position = StepFollower::kUntraced;  ///< of the outermost, in its step
  std::size_t outermost_uses = 0;                  ///< how many of `used` are the outermost's
  c10::SmallVector<Use, 8> used;                   ///< pinned until the outermost ends
  c10::SmallVector<const void*, 4> unknown;        ///< storages in use that are no pages
  std::vector<Held> held;
  c10::SmallVector<const void*, 2> keepers;  ///< calls that also keep what is made within them

  /// Returns the calling thread's frame, and makes it at the first call.
  static Frame& of_this_thread(std::size_t device_slot) {
    Frame* const frame = known_[device_slot];
    return frame != nullptr ? *frame : make(device_slot);
  }

 private:
  static Frame& make(std::size_t device_slot);

  // Small enough for the static block, which is found without a call. Owned by frame.cpp.
  [[gnu::tls_model("initial-exec")]] static inline constinit thread_local std::array<Frame*, kDeviceSlots>
      known_{};
};

}  // namespace reef
