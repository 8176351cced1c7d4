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

/// What one thread's running operators use of one memory's pages. Only its thread reads and writes it; pins
/// are put and taken under the pager's lock.
struct Frame {
  struct Use {
    PagePtr page;
    bool writes = false;
    c10::StorageImpl* owner = nullptr;  ///< while the operator begins
  };
  /// Of an operator without a kernel of its own, or a function of autograd: pinned until it ends, while the
  /// operators within it pin and unpin theirs.
  struct Held {
    const void* call = nullptr;
    PagePtr page;
    const void* unknown = nullptr;  ///< or a storage that is no page
  };

  std::exception_ptr failed;        ///< a page could not be brought in: for the next allocation
  const std::string* op = nullptr;  ///< the outermost operator with a kernel of its own; nullptr outside
  int depth = 0;                    ///< of these
  bool knew = false;                ///< it used a page
  bool oversized = false;           ///< its pages do not fit, and come when it touches them
  /// The outermost reaches no memory but that of its arguments and its own: what it calls is of no interest.
  bool closed = false;
  std::size_t position = StepFollower::kUntraced;  ///< of the outermost, in its step
  std::size_t outermost_uses = 0;                  ///< of `used`, those of the outermost
  c10::SmallVector<Use, 8> used;                   ///< pinned until the outermost ends
  c10::SmallVector<const void*, 4> unknown;        ///< storages in use that are no pages
  std::vector<Held> held;
  c10::SmallVector<const void*, 2> keepers;  ///< calls around that keep what is made within them, too

  /// The calling thread's; made when it is first asked for.
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
