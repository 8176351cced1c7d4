#pragma once

#include <c10/core/StorageImpl.h>

#include <string>

namespace reef {

/// From now on, until allow_access(), whoever asks for the memory of `storage` gets a c10::Error with
/// `message`; where others may be reading the one that it has had before, with that.
void refuse_access(c10::StorageImpl& storage, const std::string& message, bool others_read = false);
void allow_access(c10::StorageImpl& storage);

/// A weak reference to a storage that somebody else has. Taking or dropping it needs no lock of Python's.
c10::weak_intrusive_ptr<c10::StorageImpl> weak(c10::StorageImpl& storage);

}  // namespace reef
