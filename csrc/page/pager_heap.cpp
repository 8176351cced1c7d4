// The part of Pager for blocks whose addresses stay: decides whether they do, and makes their pages.
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

// Reserves enough addresses for a model of the size of a disk, or as many as the process may reserve.
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

// REEF_ADDRESSES overrides the program's choice: "stay", "go" or, for tests, "stay-user", which does not
// serve faults of system calls.
std::string wanted_by_environment() {
  const char* const value = std::getenv("REEF_ADDRESSES");
  const std::string wanted = value == nullptr ? "" : value;
  if (wanted.empty() || wanted == "stay" || wanted == "stay-user" || wanted == "go") return wanted;
  throw ConfigError("REEF_ADDRESSES=" + wanted + " is neither stay nor go");
}

}  // namespace

std::string addresses_here() { return to_text(fault_support()); }

// ---- the way of new pages

// Existing pages keep the way they have.
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

// A StableAddress is never destroyed, because its thread serves faults; there is at most one for each access.
void Pager::use_stable_addresses(FaultAccess access) {
  std::atomic<StableAddress*>& made = staying_[access == FaultAccess::kFull ? 1 : 0];
  if (made == nullptr) {
    made = stable_addresses(mover_, access);
    serve_faults(*made);
  }
  stable_ = made.load();
}

// Whether an operator can run although not all of its pages fit: pages in use may be evicted, and the missing
// ones come when they are touched.
bool Pager::can_go_on(const Decision&) const {
  return most() == MayLeave::kUsed && table_.pinned_victim() != nullptr;
}

void Pager::goes_on(Frame& frame, const Decision& decision) {
  if (frame.depth > 0 && !std::exchange(frame.oversized, true)) ++mover_.counts(decision).oversized;
}

void Pager::expect(std::uint64_t budget_bytes, const Decision& decision) {
  expected_bytes_ = budget_bytes;
  if (addresses_stay()) stable().set_sizes(stable().sizes_in(budget_bytes), decision);
}

std::string Pager::addresses() const {
  if (!device().is_cpu()) return "go: a device's memory has no faults that could be served";
  const Decision decision(mutex_);
  return to_text(faults_);
}

// ---- blocks

// A block that is made by the running operator is also used by it, and is pinned.
void Pager::note_made(Page& page, const Decision&) {
  adopt(page);
  Frame& frame = this_threads_frame();
  if (frame.depth == 0) return;
  table_.pin(page);
  frame.used.push_back({PagePtr(&page)});
}

// Reserves room for a block and returns true. Returns false if only pages in use could make room, so that the
// block must be made without frames. Throws if the operator cannot run like that.
bool Pager::find_room_for_block(std::uint64_t bytes, std::uint64_t page_bytes) {
  if (find_room(bytes, MayLeave::kUnused)) return true;
  const Decision decision(mutex_);
  const bool in_parts =
      most() == MayLeave::kUsed && bytes <= limit_bytes() && page_bytes * PageTable::kTogether < bytes;
  if (!in_parts && !can_go_on(decision)) throw working_set_error(wanted_room(bytes, decision));
  goes_on(this_threads_frame(), decision);
  return false;
}

// A large block that has never been touched is also made without frames, and gets them when it is touched.
void* Pager::allocate_stable(std::size_t wanted_bytes) {
  const PageSizes sizes = stable().sizes_in(expected_bytes_);
  const bool small = wanted_bytes < sizes.slab_bytes / PageHeap::kLeastInSlab;
  if (small) {
    Decision decision(mutex_);
    if (void* const data = stable().heap(decision).take_small(wanted_bytes)) return note_born(data, decision);
  }
  const std::uint64_t bytes = small ? sizes.slab_bytes : wanted_bytes;
  const std::uint64_t frame_bytes = sizes.frame_bytes(bytes);
  const std::uint64_t page_bytes = sizes.page_bytes(bytes, frame_bytes);
  const bool there = find_room_for_block(bytes, page_bytes);
  FramePool& frames = stable().frames(frame_bytes);
  using Contents = StableAddress::Contents;
  const Contents contents = !there                                        ? Contents::kAway
                            : bytes > frames.kept_bytes() + kMostNewBytes ? Contents::kUntouched
                                                                          : Contents::kFrames;
  void* data = nullptr;
  try {
    data = contents == Contents::kFrames ? frames.take(bytes).data : frames.take_addresses(bytes);
  } catch (const std::bad_alloc&) {
    if (there) reserved_bytes_ -= bytes;
    throw c10::OutOfMemoryError({__func__, __FILE__, __LINE__}, "the system has no memory left");
  }
  stable().trim(kept_bytes(0));
  Decision decision(mutex_);
  PageHeap& heap = stable().heap(decision);
  // Another thread may have added a slab meanwhile; a second one that nothing uses would never be freed.
  if (void* const other = small ? heap.take_small(wanted_bytes) : nullptr) {
    if (there) reserved_bytes_ -= bytes;
    contents == Contents::kFrames ? frames.keep({data, bytes}) : frames.give_up_addresses(data, bytes);
    return note_born(other, decision);
  }
  PageHeap::Block block = stable().make_block(
      *this, data, bytes, page_bytes, contents,
      [&](Page& page) {
        page.shared = small;
        note_made(page, decision);
      },
      decision);
  if (there) reserved_bytes_ -= bytes;
  if (!small) {
    heap.add(data, std::move(block));
    return note_born(data, decision);
  }
  heap.add_slab(block.pages.front());
  return note_born(heap.take_small(wanted_bytes), decision);
}

void* Pager::note_born(void* data, const Decision& decision) {
  Blocks::instance().born(data, stable().heap(decision).counted_bytes(data), 0);
  return data;
}

}  // namespace reef
