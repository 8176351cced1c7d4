#pragma once

#include <c10/core/StorageImpl.h>

#include <string>

namespace reef {

/// Makes every access to the memory of `storage` throw a c10::Error with `message` until allow_access(). With
/// `others_read`, another thread may be reading an earlier message, which is then kept.
void refuse_access(c10::StorageImpl& storage, const std::string& message, bool others_read = false);
void allow_access(c10::StorageImpl& storage);

/// Refuses access to memory that is in place but out of date, until unmark_stale(), even after
/// allow_access(). Must be ended before the storage is destroyed.
void mark_stale(c10::StorageImpl& storage, const std::string& message);
/// Ends mark_stale(). Returns false if the storage was not marked.
bool unmark_stale(c10::StorageImpl& storage);

/// Makes a weak reference to a storage that somebody else owns. Neither making nor dropping it takes a lock
/// of Python's.
c10::weak_intrusive_ptr<c10::StorageImpl> weak(c10::StorageImpl& storage);

}  // namespace reef
