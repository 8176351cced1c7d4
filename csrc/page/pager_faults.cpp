// What a pager does where addresses stay and memory that is away is touched: it brings it in, while whoever
// touches it waits in the kernel, with any lock that it has.
//
// The thread that serves faults touches no memory that may be away, since nobody would bring that in: it
// reads and writes frames that are out of reach, and tiers. It takes no reference to a storage, needs no lock
// of Python's, and waits for others' input and output at most.
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <chrono>
#include <csignal>
#include <cstdio>
#include <cstdlib>
#include <thread>
#include <utility>

#include "page/fault_trouble.h"
#include "page/pager.h"
#include "quiet_thread.h"
#include "reef/error.h"

namespace reef {

namespace {

// Whoever touched the memory has nobody to tell but the system.
void end_process(const std::string& why) {
  std::fprintf(stderr, "reef: %s; the process ends\n", why.c_str());
  std::fflush(stderr);
  ::kill(::getpid(), SIGBUS);
  std::this_thread::sleep_for(std::chrono::seconds(10));  // for a handler of the program's
  std::abort();
}

// What must leave has nowhere to go, for now.
bool no_room(const std::exception& error) {
  if (dynamic_cast<const BudgetError*>(&error) != nullptr) return true;
  const auto* const file = dynamic_cast<const FileError*>(&error);
  return file != nullptr && (file->error_number() == ENOSPC || file->error_number() == EDQUOT);
}

std::string hex(std::uint64_t address) {
  char text[32];
  std::snprintf(text, sizeof text, "0x%llx", static_cast<unsigned long long>(address));
  return text;
}

}  // namespace

void Pager::serve_faults(StableAddress& stable) {
  start_quiet_thread([this, &stable] {
    FaultTrouble trouble;
    while (const auto address = stable.faults().next()) serve(stable, *address, trouble);
  }).detach();
}

void Pager::serve(StableAddress& stable, std::uint64_t address, FaultTrouble& trouble) {
  const auto began = std::chrono::steady_clock::now();
  PagePtr page;
  std::string name;
  bool was_away = false;
  {
    Decision decision(mutex_);
    page = stable.heap(decision).at(address);
    if (page != nullptr) {
      page->last_use = ++clock_;
      name = page->name.empty() ? "a tensor without a name" : "'" + page->name + "'";
      was_away = page->state == PageState::kAway;
      if (was_away) ++mover_.counts(decision).unannounced;
      note_touched(page, decision);
    }
  }
  std::string what;
  bool full = false;
  if (page == nullptr) {
    what = "memory at " + hex(address) + " is used after it was freed";
  } else {
    try {
      bring_in_touched(stable, page);
    } catch (const std::exception& error) {
      what = "memory of " + name + " at " + hex(address) +
             " is used without an operator, and cannot come back: " + message_of(error);
      full = no_room(error);
    }
  }
  const int times = what.empty() ? 0 : trouble.times_now(address);
  if (full && waits_while_full_) {
    if (times == 1) std::fprintf(stderr, "reef: %s; it waits until there is room\n", what.c_str());
    std::this_thread::sleep_for(std::chrono::milliseconds(10));
  } else if (times > FaultTrouble::kMostTimes) {
    end_process(what);
  }
  if (what.empty()) trouble.over(address);
  if (was_away) {
    const std::chrono::duration<double> took = std::chrono::steady_clock::now() - began;
    const Decision decision(mutex_);
    mover_.counts(decision).unannounced_seconds += took.count();
  }
  stable.faults().wake(reinterpret_cast<void*>(address / kFrameBytes * kFrameBytes), kFrameBytes);
}

// The instruction that touches this page may need the others, too.
void Pager::note_touched(const PagePtr& page, const Decision&) {
  touched_.erase(std::remove(touched_.begin(), touched_.end(), page), touched_.end());
  touched_.push_back(page);
  if (touched_.size() > PageTable::kTogether) touched_.erase(touched_.begin());
}

// If hardly anything can leave for it, it comes beside the budget: whoever waits for it has nobody to tell.
// Others have no more room for that; whoever has touched it may go on, and begin another budget, before this
// returns.
void Pager::bring_in_touched(StableAddress& stable, const PagePtr& page) {
  // While it is pinned it stays, should it be on its way out.
  struct Pinned {
    Pager& pager;
    Page& page;
    Pinned(Pager& of, Page& one) : pager(of), page(one) {
      const Decision decision(pager.mutex_);
      pager.table_.pin(page);
    }
    ~Pinned() {
      const Decision decision(pager.mutex_);
      pager.table_.unpin(page);
    }
  } const pinned(*this, *page);
  stable.touch(*page);
  if (make_resident(page, nullptr, /*writes=*/false, MayLeave::kForTouched)) return;
  make_resident(page, nullptr, /*writes=*/false, MayLeave::kNone);
}

}  // namespace reef
