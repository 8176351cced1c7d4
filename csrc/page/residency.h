#pragma once

#include <c10/core/Allocator.h>
#include <c10/core/StorageImpl.h>
#include <c10/util/intrusive_ptr.h>

#include "page/page.h"

namespace reef {

/// How the bytes of a page become accessible and inaccessible: one way for each means. What decides that they
/// shall (the pager), and what copies them (the mover, a Memory), do not know which.
class Residency {
 public:
  virtual ~Residency() = default;

  /// What keeps the owner of a page's memory alive while the page leaves or comes. Taken and dropped outside
  /// every lock: where only Python has a reference to a storage, LibTorch takes the interpreter's lock for
  /// both.
  using Hold = c10::intrusive_ptr<c10::StorageImpl>;
  /// nullptr: the owner is being freed by another thread, which will tell.
  virtual Hold hold(const Page& page) const = 0;

  /// Whether the owner's memory is still the page's alone, so that it may lose it. Under the pager's lock.
  virtual bool may_leave(const Page& page, c10::StorageImpl& owner) const = 0;
  /// From now on whoever asks the owner for the memory is refused. Gives the block, to be dropped outside the
  /// lock. Under the pager's lock.
  virtual c10::DataPtr take_away(Page& page, c10::StorageImpl& owner) = 0;
  /// `block` has the page's bytes, and is the owner's from now on. Gives what it had instead, to be dropped
  /// outside the lock. Under the pager's lock.
  virtual c10::DataPtr put_back(Page& page, c10::StorageImpl& owner, c10::DataPtr block) = 0;
  /// The page's owner that this data pointer says it is of, or nullptr.
  virtual Page* page_of(const c10::DataPtr& block) const = 0;
};

/// An evicted storage keeps its size and has no address: its data pointer is null and owns the page, and
/// LibTorch refuses whoever asks for the memory.
Residency& no_address();

}  // namespace reef
