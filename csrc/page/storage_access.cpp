#include "page/storage_access.h"

#include <utility>

#include "compat.h"

namespace reef {

void refuse_access(c10::StorageImpl& storage, std::string message) {
  storage.release_data_and_set_meta_custom_data_ptr_error_msg_(std::move(message));
}

void allow_access(c10::StorageImpl& storage) { compat::clear_access_error(storage); }

}  // namespace reef
