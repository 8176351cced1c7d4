// What a pager does for blocks whose addresses stay: it makes their pages, and chooses that way.
#include <c10/core/StorageImpl.h>
#include <sys/sysinfo.h>

#include <algorithm>
#include <bit>
#include <cstdlib>
#include <iterator>
#include <new>
#include <string>
#include <system_error>
#include <utility>

#include "ledger/blocks.h"
#include "page/pager.h"
#include "reef/error.h"

namespace reef {
namespace {

constexpr std::uint64_t kMostChunkBytes = std::uint64_t{1} << 20;
constexpr std::uint64_t kMostSlabBytes = std::uint64_t{32} << 10;
constexpr std::uint64_t kMostNewBytes = std::uint64_t{8} << 20;
// An instruction may need so many pages at once, and what else runs beside it, too.
constexpr std::uint64_t kChunksInBudget = 64;

std::uint64_t chunk_bytes(std::uint64_t budget_bytes) {
  const std::uint64_t share = std::bit_floor(std::max<std::uint64_t>(budget_bytes / kChunksInBudget, 1));
  return std::clamp(share, FramePool::kFrameBytes, kMostChunkBytes);
}

// For a model that a disk holds.
std::uint64_t address_bytes() {
  struct sysinfo system {};
  ::sysinfo(&system);
  return std::max(std::uint64_t{1} << 40, 64 * system.totalram * system.mem_unit);
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

// Pages that there are keep theirs.
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
  if (support.access != faults_.access && !table_.pages().empty()) {
    if (addresses == Addresses::kAutomatic) return;
    throw ConfigError(
        "pages of an earlier budget are still there, and keep the way in which they leave; free "
        "their tensors before a budget with another");
  }
  if (support.access == faults_.access && support.access != FaultAccess::kNone) return;
  stable_ = nullptr;
  mover_ = &no_address_;
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
  auto made = std::find_if(staying_.begin(), staying_.end(),
                           [&](const auto& mover) { return mover->access() == access; });
  if (made == staying_.end()) {
    staying_.push_back(
        std::make_unique<StableAddressMover>(mutex_, table_, *memory_, access, address_bytes()));
    made = std::prev(staying_.end());
    serve_faults(**made);
  }
  stable_ = made->get();
  mover_ = made->get();
}

// So that the rest of an operator's pages can come when it touches them.
bool Pager::can_go_on(const Decision&) const {
  return most() == MayLeave::kUsed && table_.pinned_victim() != nullptr;
}

void Pager::expect(std::uint64_t budget_bytes, const Decision& decision) {
  expected_bytes_ = budget_bytes;
  if (addresses_stay()) stable().set_chunk_bytes(chunk_bytes(budget_bytes), decision);
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
  const std::uint64_t chunk = chunk_bytes(expected_bytes_);
  const std::uint64_t slab = std::min(chunk, kMostSlabBytes);
  const bool small = bytes < slab / PageHeap::kLeastInSlab;
  if (small) {
    Decision decision(mutex_);
    if (void* const data = stable().heap(decision).take_small(bytes)) return note_born(data, decision);
  }
  const std::uint64_t own_bytes = small ? slab : bytes;
  const bool there = find_room(own_bytes, MayLeave::kUnused);
  if (!there && !can_go_on(Decision(mutex_))) {
    const Decision decision(mutex_);
    throw working_set_error(wanted_room(own_bytes, decision));
  }
  FramePool& frames = stable().frames();
  using Contents = StableAddressMover::Contents;
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
  frames.trim(kept_bytes(0));
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
      *this, data, own_bytes, chunk, contents,
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
