#pragma once

#include <c10/core/StorageImpl.h>

#include <string>
#include <vector>

#include "page/page.h"

namespace reef {

struct Frame;

/// Storages whose memory throws when it is asked for, because a page of theirs could not come to an operator
/// that is running. LibTorch reads whether a storage throws, and why, without a lock. So the reason stays
/// until the operators that were refused the storage have ended: nobody writes what the thread of a running
/// operator may be reading. Where addresses stay the storage throws as long, and what another thread begins
/// on it meanwhile is refused, too; where they go it throws until its page is back.
///
/// All functions are called with the pager's lock held.
class Refusals {
 public:
  /// An operator that runs on a thread.
  struct Runner {
    const Frame* frame;  ///< the thread's
    const void* call;
  };

  bool empty() const { return all_.empty(); }

  /// Refuses `storage` to `runner`, because `page` could not come. `others_read`: another thread may be
  /// reading an earlier message, which stays then.
  void refuse(Page& page, c10::StorageImpl& storage, Runner runner, const std::string& message,
              bool others_read);
  /// Ends what the thread was refused because of `page`, which it may use now. If another thread's operator
  /// is refused the storage, `runner` is refused it, too.
  void came(Page& page, c10::StorageImpl& storage, Runner runner);
  /// Ends all that `runner` was refused.
  void end(Runner runner);
  /// In a forked child: ends what other threads were refused, which are not there.
  void end_others(const Frame* frame);

 private:
  struct Refusal {
    PagePtr page;
    c10::weak_intrusive_ptr<c10::StorageImpl> storage;  ///< keeps the object of a freed one in place
    Runner runner;
  };
  void add(Page& page, c10::StorageImpl& storage, Runner runner);
  bool refuses(const c10::StorageImpl& storage) const;
  template <class Ends>
  void end_if(const Ends& ends);

  std::vector<Refusal> all_;
};

}  // namespace reef
