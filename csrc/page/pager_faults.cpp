// What a pager does where addresses stay and memory that is away is touched: it brings it in, while whoever
// touches it waits in the kernel, with any lock that it has.
//
// The thread that serves faults touches no memory that may be away, since nobody would bring that in: it
// reads and writes frames that are out of reach, and tiers. It takes no reference to a storage, needs no lock
// of Python's, and waits for others' input and output at most.
#include <unistd.h>

#include <chrono>
#include <csignal>
#include <cstdio>
#include <cstdlib>
#include <thread>
#include <utility>

#include "page/pager.h"
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

std::string hex(std::uint64_t address) {
  char text[32];
  std::snprintf(text, sizeof text, "0x%llx", static_cast<unsigned long long>(address));
  return text;
}

}  // namespace

void Pager::serve_faults(StableAddressMover& mover) {
  // Signals are for the program's own threads.
  sigset_t all;
  sigset_t before;
  sigfillset(&all);
  pthread_sigmask(SIG_SETMASK, &all, &before);
  std::thread([this, &mover] {
    FaultTrouble trouble;
    while (const auto address = mover.faults().next()) serve(mover, *address, trouble);
  }).detach();
  pthread_sigmask(SIG_SETMASK, &before, nullptr);
}

void Pager::serve(StableAddressMover& mover, std::uint64_t address, FaultTrouble& trouble) {
  PagePtr page;
  std::string name;
  {
    Decision decision(mutex_);
    page = mover.heap(decision).at(address);
    if (page != nullptr) {
      page->last_use = ++clock_;
      name = page->name.empty() ? "a tensor without a name" : "'" + page->name + "'";
      if (page->state == PageState::kAway) ++mover.counts(decision).unannounced;
    }
  }
  std::string what;
  if (page == nullptr) {
    what = "memory at " + hex(address) + " is used after it was freed";
  } else {
    try {
      bring_in_touched(mover, page);
    } catch (const std::exception& error) {
      what = "memory of " + name + " at " + hex(address) +
             " is used without an operator, and cannot come back: " + message_of(error);
    }
  }
  if (!what.empty() && trouble.persists(address)) end_process(what);
  constexpr std::uint64_t kBytes = FramePool::kFrameBytes;
  mover.faults().wake(reinterpret_cast<void*>(address / kBytes * kBytes), kBytes);
}

void Pager::bring_in_touched(StableAddressMover& mover, const PagePtr& page) {
  mover.touch(*page);
  if (make_resident(page, nullptr, /*writes=*/false, MayLeave::kUsed)) return;
  // Hardly anything can leave. Whoever waits for the page has nobody to tell, so it comes beside the budget.
  allow(page->bytes);
  const bool came = make_resident(page, nullptr, /*writes=*/false, MayLeave::kUsed);
  allowed_bytes_ -= page->bytes;
  if (came) return;
  const Decision decision(mutex_);
  throw working_set_error(wanted_room(page->bytes, decision));
}

}  // namespace reef
