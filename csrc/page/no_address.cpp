#include <string>
#include <utility>

#include "page/pager.h"
#include "page/residency.h"
#include "page/storage_access.h"

namespace reef {
namespace {

// The storage of a page that is away is gone.
void storage_died(void* context) {
  const PagePtr page(static_cast<Page*>(context), /*add_ref=*/false);
  page->pager.storage_died(*page);
}

std::string refusal_of(const Page& page) {
  return (page.name.empty() ? "this tensor" : "'" + page.name + "'") +
         ": its memory is not in use just now. Its page was evicted by a reef::Budget, and it is accessed "
         "without an operator (a raw pointer, numpy, a file being written). Read it inside "
         "`with budget.whole(model, optimizer):` (reef::Budget::whole), clone it, or pin it first "
         "(reef::pin)";
}

class NoAddress final : public Residency {
 public:
  Hold hold(const Page& page) const override { return page.storage.lock(); }

  // numpy() and sharing between processes make a storage non-resizable; a lazy clone hands its memory to a
  // context of its own.
  bool may_leave(const Page& page, c10::StorageImpl& owner) const override {
    const c10::DataPtr& block = owner._mutable_data_ptr_no_checks();
    return block.get() == page.data && block.get_context() == page.data && owner.resizable();
  }

  c10::DataPtr take_away(Page& page, c10::StorageImpl& owner) override {
    refuse_access(owner, refusal_of(page));
    c10::DataPtr block = std::move(owner._mutable_data_ptr_no_checks());
    intrusive_ptr_add_ref(&page);
    owner.set_data_ptr_noswap(c10::DataPtr(nullptr, &page, &storage_died, owner.device()));
    return block;
  }

  c10::DataPtr put_back(Page& page, c10::StorageImpl& owner, c10::DataPtr block) override {
    c10::DataPtr& there = owner._mutable_data_ptr_no_checks();
    if (page_of(there) != &page) return block;  // it has other memory by now
    (void)there.release_context();
    intrusive_ptr_release(&page);  // the caller has another
    owner.set_data_ptr_noswap(std::move(block));
    allow_access(owner);
    return {};
  }

  Page* page_of(const c10::DataPtr& block) const override {
    return block.get_deleter() == &storage_died ? static_cast<Page*>(block.get_context()) : nullptr;
  }
};

}  // namespace

Residency& no_address() {
  static auto* const only = new NoAddress;
  return *only;
}

}  // namespace reef
