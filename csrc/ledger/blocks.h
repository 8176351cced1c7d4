#pragma once

#include <c10/core/Device.h>

#include <array>
#include <cstddef>
#include <cstdint>
#include <mutex>
#include <optional>
#include <string>
#include <vector>

#include "fork.h"
#include "ledger/block_table.h"
#include "reef/category.h"
#include "reef/timeline.h"

namespace reef {

/// Devices are numbered for arrays: slot 0 is the CPU, slot 1 + i is cuda:i.
inline constexpr std::size_t kDeviceSlots = 17;
/// nullopt: a device that is not counted.
std::optional<std::size_t> slot_of(c10::Device device);
c10::Device device_of(std::size_t slot);

/// One change of what is alive.
struct Change {
  TimelineEvent::Kind kind;
  std::int64_t bytes;  ///< < 0: freed
  std::size_t slot;
  Category category;
  Category from;          ///< kMove only
  const std::string* op;  ///< name of the running operator, nullptr outside; lives for ever
};

/// Told of every change, under the lock of Blocks and in one order for all: must not allocate tensors.
class ChangeListener {
 public:
  virtual ~ChangeListener() = default;
  /// `live` is the slot's bytes after the change.
  virtual void changed(const Change& change, const CategoryBytes& live) = 0;
  /// A counter has a new value. `counter` stays where it is for ever.
  virtual void sampled(const std::string& counter, std::int64_t value) = 0;
};

/// Every block that is alive, and its category: the process's one set of books. One lock orders all events,
/// so that "at any moment" means the same to every ledger. Made at first use and never destroyed: blocks are
/// freed until the very end of the process.
class Blocks {
 public:
  static Blocks& instance();

  /// An allocator handed out `bytes` at `data`, counting those in memory only. The category is the calling
  /// thread's (see birth.h). Gives the bytes of a block that stood at this address already and so was freed
  /// behind the allocator's back; nearly always 0.
  std::int64_t born(const void* data, std::size_t bytes, std::size_t slot);

  /// An allocator takes `data` back. Gives its bytes; 0 if the block was never counted.
  std::int64_t died(const void* data);

  /// So many bytes of the block at `data` have come into memory, or, negative, have left it, while its
  /// address stays. Without effect if it is not counted.
  void grow(const void* data, std::int64_t bytes);

  /// Gives the block at `data` a category; false if it is not counted.
  bool mark(const void* data, Category category);

  /// nullopt if it is not counted.
  std::optional<Category> category_of(const void* data);

  CategoryBytes live(std::size_t slot);

  /// Tells the listeners of a number that is no block's.
  void sample(const std::string& counter, std::int64_t value);

  /// `listener` hears of every change from now on; `snapshot` is filled with what is alive at that moment.
  void add(ChangeListener* listener, std::array<CategoryBytes, kDeviceSlots>& snapshot);
  void remove(ChangeListener* listener);

  /// Runs `read` while nothing changes.
  template <class Read>
  auto frozen(Read&& read) {
    const std::lock_guard lock(mutex_);
    return read(live_);
  }

 private:
  Blocks() = default;
  std::int64_t forget(const void* data);
  void tell(const Change& change);

  MutexAtFork mutex_{AtFork::Order::kBlocks};
  BlockTable table_;
  std::array<CategoryBytes, kDeviceSlots> live_{};
  std::vector<ChangeListener*> listeners_;
};

}  // namespace reef
