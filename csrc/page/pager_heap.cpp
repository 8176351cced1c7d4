// What a pager does for blocks whose addresses stay: it makes their pages, and chooses that way.
#include <c10/core/StorageImpl.h>
#include <sys/sysinfo.h>

#include <algorithm>
#include <bit>
#include <cstdlib>
#include <new>
#include <string>
#include <system_error>
#include <utility>

#include "ledger/blocks.h"
#include "page/pager.h"
#include "reef/error.h"

namespace reef {
namespace {

constexpr std::uint64_t kMostNewBytes = std::uint64_t{8} << 20;

constexpr std::uint64_t kLeastAddressBytes = std::uint64_t{1} << 36;

// Addresses for a model that a disk holds, or as many as the process may reserve.
StableAddress* stable_addresses(PageMover& mover, FaultAccess access) {
  struct sysinfo system {};
  ::sysinfo(&system);
  for (std::uint64_t bytes = std::max(std::uint64_t{1} << 40, 64 * system.totalram * system.mem_unit);;
       bytes /= 2) {
    try {
      return new StableAddress(mover, access, bytes);
    } catch (const std::system_error& error) {
      if (error.code() != std::errc::not_enough_memory || bytes / 2 < kLeastAddressBytes) throw;
    }
  }
}

// For whoever cannot change the program: "stay", "go", and for tests "stay-user", which does without the
// faults of system calls.
std::string wanted_by_environment() {
  const char* const value = std::getenv("REEF_ADDRESSES");
  const std::string wanted = value == nullptr ? "" : value;
  if (wanted.empty() || wanted == "stay" || wanted == "stay-user" || wanted == "go") return wanted;
  throw ConfigError("REEF_ADDRESSES=" + wanted + " is neither stay nor go");
}

}  // namespace

std::string addresses_here() { return to_text(fault_support()); }

// ---- the way

// Pages that there are already keep theirs.
void Pager::choose_way(Addresses addresses, const Decision&) {
  if (!device().is_cpu()) return;
  std::string wanted = wanted_by_environment();
  if (addresses == Addresses::kStay) wanted = "stay";
  if (addresses == Addresses::kGo) wanted = "go";
  FaultSupport support = wanted == "go" ? FaultSupport() : fault_support();
  if (wanted == "stay-user" && support.access == FaultAccess::kFull)
    support = {FaultAccess::kUser, "REEF_ADDRESSES=stay-user asks for it"};
  if (addresses == Addresses::kStay && support.access == FaultAccess::kNone)
    throw ConfigError("addresses cannot stay: " + support.reason);
  stable_ = nullptr;
  faults_ = support;
  if (support.access == FaultAccess::kNone) return;
  try {
    use_stable_addresses(support.access);
  } catch (const std::system_error& error) {
    faults_ = {FaultAccess::kNone, error.what()};
    if (addresses == Addresses::kStay) throw ConfigError("addresses cannot stay: " + faults_.reason);
  }
}

// Its thread serves faults for good, so another is made only for another access.
void Pager::use_stable_addresses(FaultAccess access) {
  std::atomic<StableAddress*>& made = staying_[access == FaultAccess::kFull ? 1 : 0];
  if (made == nullptr) {
    made = stable_addresses(mover_, access);
    serve_faults(*made);
  }
  stable_ = made.load();
}

// So that the rest of an operator's pages can come when it touches them.
bool Pager::can_go_on(const Decision&) const {
  return most() == MayLeave::kUsed && table_.pinned_victim() != nullptr;
}

void Pager::goes_on(Frame& frame, const Decision& decision) {
  if (frame.depth > 0 && !std::exchange(frame.oversized, true)) ++mover_.counts(decision).oversized;
}

void Pager::expect(std::uint64_t budget_bytes, const Decision& decision) {
  expected_bytes_ = budget_bytes;
  if (addresses_stay()) stable().set_sizes(PageSizes::of_budget(budget_bytes), decision);
}

std::string Pager::addresses() const {
  if (!device().is_cpu()) return "go: a device's memory has no faults that could be served";
  const Decision decision(mutex_);
  return to_text(faults_);
}

// ---- blocks

// A block that the running operator makes is one that it uses.
void Pager::note_made(Page& page, const Decision&) {
  adopt(page);
  Frame& frame = this_threads_frame();
  if (frame.depth == 0) return;
  table_.pin(page);
  frame.used.push_back({PagePtr(&page)});
}

// A block for which there is no room but that of pages in use, or which is large and has never been touched,
// comes without frames, and gets them when it is touched.
void* Pager::allocate_stable(std::size_t bytes) {
  const PageSizes sizes = PageSizes::of_budget(expected_bytes_);
  const bool small = bytes < sizes.slab_bytes / PageHeap::kLeastInSlab;
  if (small) {
    Decision decision(mutex_);
    if (void* const data = stable().heap(decision).take_small(bytes)) return note_born(data, decision);
  }
  const std::uint64_t own_bytes = small ? sizes.slab_bytes : bytes;
  const bool there = find_room(own_bytes, MayLeave::kUnused);
  if (!there) {
    const Decision decision(mutex_);
    const bool in_parts = most() == MayLeave::kUsed && own_bytes <= limit_bytes() &&
                          sizes.page_bytes(own_bytes) * PageTable::kTogether < own_bytes;
    if (!in_parts && !can_go_on(decision)) throw working_set_error(wanted_room(own_bytes, decision));
    goes_on(this_threads_frame(), decision);
  }
  FramePool& frames = stable().frames();
  using Contents = StableAddress::Contents;
  const Contents contents = !there                                            ? Contents::kAway
                            : own_bytes > frames.kept_bytes() + kMostNewBytes ? Contents::kUntouched
                                                                              : Contents::kFrames;
  void* data = nullptr;
  try {
    data = contents == Contents::kFrames ? frames.take(own_bytes).data : frames.take_addresses(own_bytes);
  } catch (const std::bad_alloc&) {
    if (there) reserved_bytes_ -= own_bytes;
    throw c10::OutOfMemoryError({__func__, __FILE__, __LINE__}, "the system has no memory left");
  }
  frames.trim(kept_bytes(0) + stable().missing_bytes());
  Decision decision(mutex_);
  PageHeap& heap = stable().heap(decision);
  if (small) {  // another thread may have made room meanwhile, and a slab that nobody uses would stay for
                // good
    if (void* const other = heap.take_small(bytes)) {
      if (there) reserved_bytes_ -= own_bytes;
      contents == Contents::kFrames ? frames.keep({data, own_bytes})
                                    : frames.give_up_addresses(data, own_bytes);
      return note_born(other, decision);
    }
  }
  PageHeap::Block block = stable().make_block(
      *this, data, own_bytes, sizes.page_bytes(own_bytes), contents,
      [&](Page& page) {
        page.shared = small;
        note_made(page, decision);
      },
      decision);
  if (there) reserved_bytes_ -= own_bytes;
  if (!small) {
    heap.add(data, std::move(block));
    return note_born(data, decision);
  }
  heap.add_slab(block.pages.front());
  return note_born(heap.take_small(bytes), decision);
}

void* Pager::note_born(void* data, const Decision& decision) {
  Blocks::instance().born(data, stable().heap(decision).counted_bytes(data), 0);
  return data;
}

}  // namespace reef
