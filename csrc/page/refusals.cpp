#include "page/refusals.h"

#include <algorithm>
#include <iterator>

#include "page/page_way.h"
#include "page/storage_access.h"

namespace reef {

bool Refusals::refuses(const c10::StorageImpl& storage) const {
  return std::any_of(all_.begin(), all_.end(), [&](const Refusal& refusal) {
    return refusal.storage._unsafe_get_target() == &storage;
  });
}

void Refusals::add(Page& page, c10::StorageImpl& storage, Runner runner) {
  ++page.refusals;
  all_.push_back({PagePtr(&page), weak(storage), runner});
}

void Refusals::refuse(Page& page, c10::StorageImpl& storage, Runner runner, const std::string& message,
                      bool others_read) {
  if (!refuses(storage)) refuse_access(storage, message, others_read);
  add(page, storage, runner);
}

template <class Ends>
void Refusals::end_if(const Ends& ends) {
  const auto first = std::partition(all_.begin(), all_.end(), [&](const Refusal& one) { return !ends(one); });
  const std::vector<Refusal> ended(std::make_move_iterator(first), std::make_move_iterator(all_.end()));
  all_.erase(first, all_.end());
  for (const Refusal& refusal : ended) {
    --refusal.page->refusals;
    c10::StorageImpl& storage = *refusal.storage._unsafe_get_target();
    if (refusal.page->way->addresses_stay() && !refuses(storage)) allow_access(storage);
  }
}

void Refusals::came(Page& page, c10::StorageImpl& storage, Runner runner) {
  const auto of_storage = [&](const Refusal& one) { return one.storage._unsafe_get_target() == &storage; };
  const bool others = std::any_of(all_.begin(), all_.end(), [&](const Refusal& one) {
    return of_storage(one) && one.runner.frame != runner.frame;
  });
  if (others) return add(page, storage, runner);
  end_if([&](const Refusal& one) { return of_storage(one) && one.page == &page; });
}

void Refusals::end(Runner runner) {
  end_if(
      [&](const Refusal& one) { return one.runner.frame == runner.frame && one.runner.call == runner.call; });
}

void Refusals::end_others(const Frame* frame) {
  end_if([&](const Refusal& one) { return one.runner.frame != frame; });
}

}  // namespace reef
