#include "tier/arena.h"

#include <algorithm>
#include <cstring>
#include <mutex>
#include <unordered_map>
#include <utility>
#include <vector>

#include "tier/extents.h"

namespace reef {
namespace {

constexpr std::uint64_t kAlignment = 512;

class ArenaTier final : public Tier {
 public:
  ArenaTier(const ArenaOptions& options, SegmentSource source)
      : name_(options.name), segment_bytes_(options.segment_bytes), source_(std::move(source)) {
    use_.capacity_bytes = options.capacity_bytes;
  }
  ~ArenaTier() override {
    for (const Segment& segment : segments_) source_.free(segment.data);
  }

  std::string name() const override { return name_; }

  std::optional<Slot> take(std::uint64_t bytes) override {
    const std::lock_guard lock(mutex_);
    const std::uint64_t room = rounded(bytes);
    Segment* segment = with_room(room);
    if (segment == nullptr) return std::nullopt;
    const Slot slot = next_slot_++;
    places_.emplace(slot, Place{static_cast<std::size_t>(segment - segments_.data()),
                                segment->extents.take(room), bytes});
    use_.used_bytes += room;
    use_.peak_bytes = std::max(use_.peak_bytes, use_.used_bytes);
    return slot;
  }

  void give_back(Slot slot) noexcept override {
    const std::lock_guard lock(mutex_);
    const auto found = places_.find(slot);
    if (found == places_.end()) return;
    const Place& place = found->second;
    segments_[place.segment].extents.give_back(place.offset, rounded(place.bytes));
    use_.used_bytes -= rounded(place.bytes);
    places_.erase(found);
  }

  void write(Slot slot, const void* data) override {
    const auto [address, bytes] = find(slot, &TierUse::written_bytes);
    std::memcpy(address, data, bytes);
  }

  void read(Slot slot, void* data) override {
    const auto [address, bytes] = find(slot, &TierUse::read_bytes);
    std::memcpy(data, address, bytes);
  }

  void* address(Slot slot, Access access) override {
    return find(slot, access == Access::kWrite ? &TierUse::written_bytes : &TierUse::read_bytes).first;
  }

  TierUse use() const override {
    const std::lock_guard lock(mutex_);
    return use_;
  }

 private:
  struct Segment {
    void* data;
    std::uint64_t bytes;
    Extents extents;
  };
  struct Place {
    std::size_t segment;
    std::uint64_t offset;
    std::uint64_t bytes;
  };

  static std::uint64_t rounded(std::uint64_t bytes) {
    return (bytes + kAlignment - 1) / kAlignment * kAlignment;
  }

  Segment* with_room(std::uint64_t room) {
    for (Segment& segment : segments_) {
      if (segment.extents.peek(room) + room <= segment.bytes) return &segment;
    }
    const std::uint64_t left = use_.capacity_bytes - reserved_bytes_;
    if (room > left) return nullptr;
    const std::uint64_t bytes = std::max(room, std::min(segment_bytes_, left));
    segments_.reserve(segments_.size() + 1);
    void* const data = source_.allocate(bytes);
    if (data == nullptr) return nullptr;
    reserved_bytes_ += bytes;
    segments_.push_back({data, bytes, {}});
    return &segments_.back();
  }

  std::pair<void*, std::uint64_t> find(Slot slot, std::uint64_t TierUse::*moved) {
    const std::lock_guard lock(mutex_);
    const Place& place = places_.at(slot);
    use_.*moved += place.bytes;
    return {static_cast<char*>(segments_[place.segment].data) + place.offset, place.bytes};
  }

  std::string name_;
  std::uint64_t segment_bytes_;
  SegmentSource source_;
  mutable std::mutex mutex_;
  std::vector<Segment> segments_;
  std::unordered_map<Slot, Place> places_;
  std::uint64_t reserved_bytes_ = 0;
  Slot next_slot_ = 0;
  TierUse use_;
};

}  // namespace

std::shared_ptr<Tier> arena_tier(const ArenaOptions& options, SegmentSource source) {
  return std::make_shared<ArenaTier>(options, std::move(source));
}

}  // namespace reef
