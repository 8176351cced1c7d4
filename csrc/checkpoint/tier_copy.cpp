#include "checkpoint/tier_copy.h"

#include <algorithm>
#include <exception>
#include <optional>
#include <utility>

#include "page/storage_access.h"
#include "reef/bytes.h"
#include "reef/error.h"
#include "reef/ledger.h"

namespace reef {

TierLane::TierLane(std::shared_ptr<Tier> of, c10::Device device)
    : tier(std::move(of)), memory(device.is_cuda() ? cuda_memory(device.index()) : host_memory()) {
  if (!device.is_cpu() && !device.is_cuda()) {
    throw ConfigError("a tier for a chain on " + device.str() +
                      "; chains on the CPU and on CUDA devices have one");
  }
}

/// One storage, as long as somebody has it. `transfer` is under way, or over and not looked at yet.
struct TierCopy::Piece {
  c10::weak_intrusive_ptr<c10::StorageImpl> storage;
  c10::Storage read = {};  ///< while it is being copied from
  std::size_t bytes = 0;
  Tier::Slot slot = 0;
  enum class Place : std::uint8_t { kMemory, kAway, kComing } place = Place::kMemory;
  std::shared_ptr<Transfer> transfer = {};
  c10::DataPtr block = {};  ///< kComing

  PageCopy copy(const TierLane& lane, PageCopy::Direction direction, void* data) const {
    return {direction, lane.tier, slot, data, bytes, TierLane::kHashed};
  }
  // Throws what the transfer has thrown.
  void wait() {
    if (!transfer) return;
    const std::shared_ptr<Transfer> over = std::exchange(transfer, nullptr);
    over->wait();
    read = {};
    if (over->error) std::rethrow_exception(over->error);
  }
};

TierCopy::TierCopy(TierLane& lane, const std::vector<c10::Storage>& storages, std::string what)
    : lane_(lane), what_(std::move(what)) {
  try {
    for (const c10::Storage& storage : storages) {
      pieces_.push_back({storage.getWeakStorageImpl(), storage, storage.nbytes(), take(storage.nbytes())});
    }
    for (Piece& piece : pieces_) {
      void* const data = piece.read.unsafeGetStorageImpl()->_mutable_data_ptr_no_checks().get();
      piece.transfer = lane_.memory->start(piece.copy(lane_, PageCopy::Direction::kOut, data));
    }
  } catch (...) {
    give_back();
    throw;
  }
}

TierCopy::~TierCopy() { give_back(); }

Tier::Slot TierCopy::take(std::size_t bytes) const {
  if (const std::optional<Tier::Slot> slot = lane_.memory->take_slot(*lane_.tier, bytes)) return *slot;
  const TierUse use = lane_.tier->use();
  const auto text = [](std::uint64_t count) { return format_bytes(static_cast<std::int64_t>(count)); };
  throw BudgetError(what_ + ": out of memory. The tier (" + lane_.tier->name() + ") has no room for " +
                        text(bytes) + "; of its " + text(use.capacity_bytes) + ", " + text(use.used_bytes) +
                        " are in use; give it a larger capacity",
                    use.used_bytes + bytes);
}

void TierCopy::give_back() noexcept {
  for (Piece& piece : pieces_) {
    if (piece.transfer && !piece.transfer->cancel()) piece.transfer->wait();
    lane_.memory->give_back(lane_.tier, piece.slot);
  }
}

void TierCopy::evict(const std::function<std::size_t(const c10::StorageImpl&)>& references) {
  arrive();
  for (Piece& piece : pieces_) {
    piece.wait();
    const auto storage = piece.storage.lock();
    if (!storage || piece.place == Piece::Place::kAway || !storage->resizable()) continue;
    if (storage.use_count() > 1 + references(*storage)) continue;
    refuse_access(*storage, what_ +
                                ": its memory is in the tier just now, and is asked for by something that "
                                "the schedule does not know of; keep a copy of it instead");
    storage->set_data_ptr_noswap(c10::DataPtr(nullptr, storage->device()));
    piece.place = Piece::Place::kAway;
  }
}

void TierCopy::prefetch() {
  const CategoryScope activations(Category::kActivation);
  for (Piece& piece : pieces_) {
    if (piece.place != Piece::Place::kAway || piece.storage.expired()) continue;
    piece.block = lane_.memory->allocate(piece.bytes);
    piece.place = Piece::Place::kComing;
    piece.transfer = lane_.memory->start(piece.copy(lane_, PageCopy::Direction::kIn, piece.block.get()));
  }
}

void TierCopy::arrive() {
  for (Piece& piece : pieces_) {
    if (piece.place != Piece::Place::kComing) continue;
    try {
      piece.wait();
    } catch (...) {
      piece.place = Piece::Place::kAway;
      piece.block.clear();
      throw;
    }
    piece.place = Piece::Place::kMemory;
    c10::DataPtr block = std::move(piece.block);
    const auto storage = piece.storage.lock();
    if (!storage) continue;
    storage->set_data_ptr_noswap(std::move(block));
    allow_access(*storage);
  }
}

}  // namespace reef
