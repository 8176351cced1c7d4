#pragma once

#include <cstdint>
#include <memory>
#include <optional>
#include <string>

#include "reef/export.h"

namespace reef {

struct TierUse {
  std::uint64_t capacity_bytes = 0;
  std::uint64_t used_bytes = 0;  ///< taken and not given back, rounding included
  std::uint64_t peak_bytes = 0;
  std::uint64_t written_bytes = 0;  ///< copied of pages, since the tier was made; not what is kept
  std::uint64_t read_bytes = 0;
};

/// Where the bytes of a page are kept while it is not in its device's memory. Pages go in and come back
/// whole. Any thread may call; two calls for one slot must not overlap.
class REEF_API Tier {
 public:
  using Slot = std::uint64_t;

  virtual ~Tier() = default;
  virtual std::string name() const = 0;  ///< "host", "disk"

  /// A place for `bytes` > 0; nullopt if the tier's capacity has no room for it. Throws FileError where the
  /// room was promised by the capacity but the file system refuses it.
  virtual std::optional<Slot> take(std::uint64_t bytes) = 0;
  virtual void give_back(Slot slot) noexcept = 0;

  /// As take(), for a page whose memory itself is kept while it is away, out of reach of its address: its
  /// bytes are neither written nor read, and the tier counts them only. nullopt: they must be written.
  virtual std::optional<Slot> keep(std::uint64_t /*bytes*/) { return std::nullopt; }

  /// Copies the slot's bytes from, or to, host memory; returns when done. Throws FileError; a slot whose
  /// write failed holds nothing.
  virtual void write(Slot slot, const void* data) = 0;
  virtual void read(Slot slot, void* data) = 0;

  /// Where the slot's bytes are, if a device may copy them by itself: page-locked memory, aligned to 16
  /// bytes; nullptr otherwise. The access is counted.
  enum class Access : std::uint8_t {
    kRead,
    kWrite,
    kCheck,  ///< not counted: the device looks whether they are still right, and writes them again if not
  };
  virtual void* address(Slot, Access) { return nullptr; }

  virtual TierUse use() const = 0;
};

/// Plain host memory, each page in a block of its own size.
REEF_API std::shared_ptr<Tier> host_tier(std::uint64_t capacity_bytes);

/// Page-locked host memory, which a CUDA device copies from and to by itself: taken in segments of 64 MiB,
/// kept until the tier goes, in which pages lie side by side with no more than 511 bytes between them. Throws
/// ConfigError where there is no CUDA device.
REEF_API std::shared_ptr<Tier> pinned_tier(std::uint64_t capacity_bytes);

/// How blocks are moved to the disk and back; the bytes there are the same.
enum class DiskIo : std::uint8_t {
  kAutomatic,  ///< io_uring where the kernel allows it, else threads
  kThreads,    ///< pread and pwrite on threads of the tier's own
  kUring,  ///< io_uring from the thread that calls, which also hashes and copies; ConfigError if forbidden
};

struct DiskTierOptions {
  std::string directory;
  std::uint64_t capacity_bytes = 0;
  std::uint64_t block_bytes = std::uint64_t{1}
                              << 20;  ///< read, written and hashed as one; a multiple of 4096
  int threads = 4;     ///< each has one block of host memory; io_uring: blocks under way at once
  bool direct = true;  ///< past the page cache (O_DIRECT) where the file system allows it
  DiskIo io = DiskIo::kAutomatic;
};

/// A file in `options.directory`, without a name and readable by nobody else, gone when the process ends
/// however it ends. Every block is hashed (XXH3, 64 bits) when written and verified when read. Throws
/// ConfigError (options, no io_uring where it is asked for) and FileError (the directory).
REEF_API std::shared_ptr<Tier> disk_tier(const DiskTierOptions& options);

}  // namespace reef
