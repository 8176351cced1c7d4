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

/// The pages of one memory that the running operators of one thread use. Only that thread reads and writes
/// the frame; pages are pinned and unpinned under the pager's lock.
struct Frame {
  struct Use {
    PagePtr page;
    bool writes = false;
    c10::StorageImpl* owner = nullptr;  ///< the page's storage; valid only while the operator begins
  };
  /// A page that was passed to an operator without a kernel of its own, or to a function of autograd. It is
  /// pinned until that call ends, while the operators inside the call pin and unpin their own pages.
  struct Held {
    const void* call = nullptr;
    PagePtr page;
    const void* unknown = nullptr;  ///< a storage that is no page; `page` is null then
  };

  std::exception_ptr failed;        ///< why a page did not come; the next allocation throws it
  std::exception_ptr refused;       ///< the error of an allocation inside the outermost operator
  const std::string* op = nullptr;  ///< the outermost operator with a kernel of its own, or nullptr
  int depth = 0;                    ///< how many operators with kernels of their own are nested
  bool knew = false;                ///< whether the outermost operator used a page
  bool oversized = false;           ///< its pages do not fit, and come when it touches them
  /// Whether the outermost operator touches only the memory of its arguments and memory that it allocates, so
  /// that the operators it calls need not be observed.
  bool closed = false;
  std::size_t position = StepFollower::kUntraced;  ///< of the outermost operator in its step
  std::size_t outermost_uses = 0;            ///< how many elements of `used` are the outermost operator's
  c10::SmallVector<Use, 8> used;             ///< pages that are pinned until the outermost operator ends
  c10::SmallVector<const void*, 4> unknown;  ///< storages in use that are no pages
  std::vector<Held> held;
  c10::SmallVector<const void*, 2> keepers;  ///< calls that may keep pointers to what is made inside them

  /// Returns the calling thread's frame, which is made at the first call.
  static Frame& of_this_thread(std::size_t device_slot) {
    Frame* const frame = known_[device_slot];
    return frame != nullptr ? *frame : make(device_slot);
  }

 private:
  static Frame& make(std::size_t device_slot);

  // Small enough for the static TLS block, which is accessed without a function call. frame.cpp owns the
  // frames.
  [[gnu::tls_model("initial-exec")]] static inline constinit thread_local std::array<Frame*, kDeviceSlots>
      known_{};
};

}  // namespace reef
