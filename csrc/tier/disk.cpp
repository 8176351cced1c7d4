#include "tier/disk.h"

#include <algorithm>
#include <cstring>
#include <mutex>
#include <vector>

#include "fork.h"
#include "reef/error.h"
#include "round_up.h"
#include "tier/block_io.h"
#include "tier/extents.h"
#include "tier/forked_readers.h"
#include "tier/hash.h"
#include "tier/slots.h"

namespace reef {
namespace {

std::uint64_t aligned(std::uint64_t bytes) { return round_up(bytes, SwapFile::kAlignment); }

std::unique_ptr<BlockIo> block_io(SwapFile& file, const DiskTierOptions& options) {
  if (options.io == DiskIo::kThreads) return threaded_io(file, options);
  try {
    return uring_io(file, options);
  } catch (const ConfigError&) {
    if (options.io == DiskIo::kUring) throw;
    return threaded_io(file, options);
  }
}

class DiskTier final : public Tier, private AtFork {
 public:
  DiskTier(std::unique_ptr<SwapFile> file, const DiskTierOptions& options)
      : AtFork(Order::kTier),
        file_(std::move(file)),
        block_bytes_(options.block_bytes),
        slots_(options.capacity_bytes),
        io_(block_io(*file_, options)) {}

  std::string name() const override { return "disk"; }

  std::optional<Slot> take(std::uint64_t bytes) override {
    const std::lock_guard lock(mutex_);
    refuse_if_inherited();
    const std::uint64_t room = aligned(bytes);
    free_retired();
    if (room + retired_bytes_ > slots_.free_bytes()) return std::nullopt;
    return slots_.add({take_room(room), bytes, std::vector<std::uint64_t>((bytes - 1) / block_bytes_ + 1),
                       readers_.forks()},
                      room);
  }

  void give_back(Slot slot) noexcept override {
    const std::lock_guard lock(mutex_);
    if (const auto place = slots_.remove(slot)) give_back_room(*place);
  }

  void write(Slot slot, const void* data) override {
    Place& place = find_to_write(slot);
    const auto fill = [&](std::uint64_t index, void* block) {
      const std::uint64_t begin = index * block_bytes_;
      const std::uint64_t bytes = std::min(block_bytes_, place.bytes - begin);
      std::memcpy(block, static_cast<const char*>(data) + begin, bytes);
      std::memset(static_cast<char*>(block) + bytes, 0, aligned(bytes) - bytes);
      place.hashes[index] = hash_bytes(block, bytes);
    };
    io_->move({.writes = true, .offset = place.offset, .bytes = aligned(place.bytes), .work = fill});
    const std::lock_guard lock(mutex_);
    slots_.use.written_bytes += place.bytes;
  }

  void read(Slot slot, void* data) override {
    Place& place = find(slot);
    const auto take = [&](std::uint64_t index, void* block) {
      const std::uint64_t begin = index * block_bytes_;
      const std::uint64_t bytes = std::min(block_bytes_, place.bytes - begin);
      if (hash_bytes(block, bytes) != place.hashes[index]) {
        throw FileError(
            "swap file in '" + file_->directory() + "': " + std::to_string(bytes) + " bytes at offset " +
                std::to_string(place.offset + begin) +
                " are not what was written there; the disk or something else changed them, so this run "
                "cannot go on: start again from a checkpoint, on another disk",
            file_->directory());
      }
      std::memcpy(static_cast<char*>(data) + begin, block, bytes);
    };
    io_->move({.writes = false, .offset = place.offset, .bytes = aligned(place.bytes), .work = take});
    const std::lock_guard lock(mutex_);
    slots_.use.read_bytes += place.bytes;
  }

  TierUse use() const override {
    const std::lock_guard lock(mutex_);
    return slots_.use;
  }

 private:
  struct Place {
    std::uint64_t offset;
    std::uint64_t bytes;
    std::vector<std::uint64_t> hashes;  ///< one a block
    std::uint64_t forks;                ///< when it was taken
  };

  void before_fork() override {
    mutex_.lock();
    readers_.before_fork();
  }
  void after_fork_in_parent() override {
    readers_.after_fork_in_parent();
    mutex_.unlock();
  }
  void after_fork_in_child() override {
    readers_.after_fork_in_child();
    inherited_ = true;
    mutex_.unlock();
  }

  // ---- room, with the lock

  std::uint64_t take_room(std::uint64_t bytes) {
    file_->reserve(std::max(extents_.end(), extents_.peek(bytes) + bytes));
    return extents_.take(bytes);
  }
  // What a forked process may read is not written anew before it has gone.
  void give_back_room(const Place& place) {
    const std::uint64_t bytes = aligned(place.bytes);
    if (!readers_.may_read(place.forks)) return extents_.give_back(place.offset, bytes);
    retired_.push_back({place.offset, bytes, place.forks});
    retired_bytes_ += bytes;
  }
  void free_retired() {
    std::erase_if(retired_, [&](const Retired& room) {
      if (readers_.may_read(room.forks)) return false;
      extents_.give_back(room.offset, room.bytes);
      retired_bytes_ -= room.bytes;
      return true;
    });
  }
  Place& find_to_write(Slot slot) {
    const std::lock_guard lock(mutex_);
    refuse_if_inherited();
    Place& place = slots_.at(slot);
    if (place.forks == readers_.forks() || !readers_.may_read(place.forks)) return place;
    const std::uint64_t bytes = aligned(place.bytes);
    if (bytes + retired_bytes_ > slots_.free_bytes()) {
      throw FileError("swap file in '" + file_->directory() + "': no room for " + std::to_string(bytes) +
                          " bytes beside what forked processes may still read; wait for them to end, or give "
                          "a larger capacity",
                      file_->directory());
    }
    const std::uint64_t offset = take_room(bytes);
    give_back_room(place);
    place.offset = offset;
    place.forks = readers_.forks();
    return place;
  }

  // A forked child may read what its parent wrote.
  void refuse_if_inherited() const {
    if (!inherited_) return;
    throw FileError("swap file in '" + file_->directory() +
                        "': it is the parent's of this forked process, which may only read it; give this "
                        "process a disk tier of its own",
                    file_->directory());
  }

  Place& find(Slot slot) {
    const std::lock_guard lock(mutex_);
    return slots_.at(slot);
  }

  std::unique_ptr<SwapFile> file_;
  std::uint64_t block_bytes_;
  mutable std::mutex mutex_;
  Extents extents_;
  Slots<Place> slots_;
  struct Retired {
    std::uint64_t offset;
    std::uint64_t bytes;
    std::uint64_t forks;
  };
  std::vector<Retired> retired_;  ///< given back, and still read by forked processes
  std::uint64_t retired_bytes_ = 0;
  ForkedReaders readers_;
  std::unique_ptr<BlockIo> io_;
  bool inherited_ = false;  ///< by a forked child
};

}  // namespace

std::shared_ptr<Tier> disk_tier_on(std::unique_ptr<SwapFile> file, const DiskTierOptions& options) {
  if (options.block_bytes == 0 || options.block_bytes % SwapFile::kAlignment != 0) {
    throw ConfigError("disk tier: block_bytes is " + std::to_string(options.block_bytes) +
                      "; give a multiple of 4096");
  }
  if (options.threads < 1) {
    throw ConfigError("disk tier: " + std::to_string(options.threads) +
                      " threads asked for; give at least 1");
  }
  return std::make_shared<DiskTier>(std::move(file), options);
}

std::shared_ptr<Tier> disk_tier(const DiskTierOptions& options) {
  return disk_tier_on(std::make_unique<SwapFile>(options.directory, options.direct), options);
}

}  // namespace reef
