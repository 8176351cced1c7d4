#pragma once

#include <c10/core/StorageImpl.h>

#include <string>

namespace reef {

/// Makes whoever asks for the memory of `storage` get a c10::Error with `message` until allow_access(). Where
/// others may be reading an earlier message, the error has that.
void refuse_access(c10::StorageImpl& storage, const std::string& message, bool others_read = false);
void allow_access(c10::StorageImpl& storage);

/// Refuses access to memory that is there but out of date, until unmark_stale(), whatever allow_access()
/// says. To be ended before the storage is destroyed.
void mark_stale(c10::StorageImpl& storage, const std::string& message);
/// Returns false if it was not marked.
bool unmark_stale(c10::StorageImpl& storage);

/// Makes a weak reference to a storage that somebody else owns. Neither making nor dropping it needs a lock
/// of Python's.
c10::weak_intrusive_ptr<c10::StorageImpl> weak(c10::StorageImpl& storage);

}  // namespace reef
