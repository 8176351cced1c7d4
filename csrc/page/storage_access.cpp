#include "page/storage_access.h"

#include <atomic>
#include <optional>
#include <unordered_map>

#include "compat.h"
#include "table_at_fork.h"

namespace reef {
namespace {

// Messages by storage. Never destroyed, because pages come back until the process ends.
using Stale = TableAtFork<std::unordered_map<const c10::StorageImpl*, std::string>>;
Stale& stale() {
  static auto* const messages = new Stale;
  return *messages;
}
std::atomic<std::size_t> stale_count = 0;

}  // namespace

// The text stays when access is allowed again, because another thread may be reading it at that moment.
void refuse_access(c10::StorageImpl& storage, const std::string& message, bool others_read) {
  std::optional<std::string>& text = storage.get_extra_meta().custom_data_ptr_error_msg_;
  if (!text || (*text != message && !others_read)) text = message;
  compat::refuse_access(storage, true);
}

// Access to a stale storage stays refused, because its page may leave and come back meanwhile.
void allow_access(c10::StorageImpl& storage) {
  if (stale_count > 0) {
    const auto messages = stale().lock();
    if (const auto found = messages->find(&storage); found != messages->end())
      return refuse_access(storage, found->second);
  }
  compat::refuse_access(storage, false);
}

void mark_stale(c10::StorageImpl& storage, const std::string& message) {
  const auto messages = stale().lock();
  messages->insert_or_assign(&storage, message);
  stale_count = messages->size();
  refuse_access(storage, message);
}

bool unmark_stale(c10::StorageImpl& storage) {
  const auto messages = stale().lock();
  if (messages->erase(&storage) == 0) return false;
  stale_count = messages->size();
  const bool is_there = storage._mutable_data_ptr_no_checks().get() != nullptr || storage.nbytes() == 0;
  if (is_there) compat::refuse_access(storage, false);
  return true;
}

c10::weak_intrusive_ptr<c10::StorageImpl> weak(c10::StorageImpl& storage) {
  return c10::weak_intrusive_ptr<c10::StorageImpl>(
      c10::intrusive_ptr<c10::StorageImpl>::unsafe_reclaim_from_nonowning(&storage));
}

}  // namespace reef
