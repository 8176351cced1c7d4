#pragma once

#include <c10/core/StorageImpl.h>

#include <string>
#include <vector>

#include "page/page.h"

namespace reef {

struct Frame;

/// Storages that throw when they are asked for their memory, because one of their pages could not come to a
/// running operator. LibTorch reads whether a storage throws, and the message, without a lock. So the message
/// is not changed until the operators that were refused the storage have ended, because their threads may be
/// reading it. If addresses stay, the storage throws until then, and operators that other threads begin on it
/// meanwhile are refused it, too. If addresses do not stay, it throws until its page is back.
///
/// All functions are called with the pager's lock held.
class Refusals {
 public:
  /// An operator that runs on some thread.
  struct Runner {
    const Frame* frame;  ///< the thread's
    const void* call;
  };

  bool empty() const { return all_.empty(); }

  /// Refuses `storage` to `runner`, because `page` could not come. With `others_read`, another thread may be
  /// reading an earlier message, which is then kept.
  void refuse(Page& page, c10::StorageImpl& storage, Runner runner, const std::string& message,
              bool others_read);
  /// Ends this thread's refusals because of `page`, which it may use now. But if the storage is still refused
  /// to an operator of another thread, it is refused to `runner`, too.
  void came(Page& page, c10::StorageImpl& storage, Runner runner);
  /// Ends all refusals to `runner`.
  void end(Runner runner);
  /// Ends all refusals to other threads, which do not exist in a forked child.
  void end_others(const Frame* frame);

 private:
  struct Refusal {
    PagePtr page;
    c10::weak_intrusive_ptr<c10::StorageImpl> storage;  ///< keeps the object in place if it is freed
    Runner runner;
  };
  void add(Page& page, c10::StorageImpl& storage, Runner runner);
  bool refuses(const c10::StorageImpl& storage) const;
  template <class Ends>
  void end_if(const Ends& ends);

  std::vector<Refusal> all_;
};

}  // namespace reef
