#include "page/storage_access.h"

#include <optional>

#include "compat.h"

namespace reef {

// The text stays when access is allowed again: another thread that asks for the memory at this moment may be
// reading it.
void refuse_access(c10::StorageImpl& storage, const std::string& message, bool others_read) {
  std::optional<std::string>& text = storage.get_extra_meta().custom_data_ptr_error_msg_;
  if (!text || (*text != message && !others_read)) text = message;
  compat::refuse_access(storage, true);
}

void allow_access(c10::StorageImpl& storage) { compat::refuse_access(storage, false); }

c10::weak_intrusive_ptr<c10::StorageImpl> weak(c10::StorageImpl& storage) {
  return c10::weak_intrusive_ptr<c10::StorageImpl>(
      c10::intrusive_ptr<c10::StorageImpl>::unsafe_reclaim_from_nonowning(&storage));
}

}  // namespace reef
