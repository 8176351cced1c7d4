#pragma once

#include <c10/core/StorageImpl.h>

#include <string>

namespace reef {

/// From now on, until allow_access(), whoever asks for the memory of `storage` gets a c10::Error with
/// `message`.
void refuse_access(c10::StorageImpl& storage, const std::string& message);
void allow_access(c10::StorageImpl& storage);

}  // namespace reef
