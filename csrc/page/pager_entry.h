#pragma once

#include <mutex>

#include "page/pager.h"

namespace reef {

/// This thread holds a pager's lock. Small enough for the static block, which is found without a call.
[[gnu::tls_model("initial-exec")]] inline constinit thread_local bool inside = false;

struct Pager::Entry {
  explicit Entry(const Pager& pager) : lock(pager.mutex_) { inside = true; }
  ~Entry() { inside = false; }
  Entry(const Entry&) = delete;
  Entry& operator=(const Entry&) = delete;
  std::lock_guard<std::mutex> lock;
};

}  // namespace reef
