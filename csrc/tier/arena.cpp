#include "tier/arena.h"

#include <algorithm>
#include <cstring>
#include <mutex>
#include <utility>
#include <vector>

#include "fork.h"
#include "round_up.h"
#include "tier/extents.h"
#include "tier/slots.h"

namespace reef {
namespace {

constexpr std::uint64_t kAlignment = 512;

class ArenaTier final : public Tier {
 public:
  ArenaTier(const ArenaOptions& options, SegmentSource source)
      : name_(options.name),
        segment_bytes_(options.segment_bytes),
        source_(std::move(source)),
        slots_(options.capacity_bytes) {}
  ~ArenaTier() override {
    for (const Segment& segment : segments_) source_.free(segment.data);
  }

  std::string name() const override { return name_; }

  std::optional<Slot> take(std::uint64_t bytes) override {
    const std::lock_guard lock(mutex_);
    const std::uint64_t room = round_up(bytes, kAlignment);
    Segment* segment = with_room(room);
    if (segment == nullptr) return std::nullopt;
    const auto index = static_cast<std::size_t>(segment - segments_.data());
    return slots_.add({index, segment->extents.take(room), bytes}, room);
  }

  void give_back(Slot slot) noexcept override {
    const std::lock_guard lock(mutex_);
    const auto place = slots_.remove(slot);
    if (!place) return;
    segments_[place->segment].extents.give_back(place->offset, round_up(place->bytes, kAlignment));
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
    if (access == Access::kCheck) return find(slot, nullptr).first;
    return find(slot, access == Access::kWrite ? &TierUse::written_bytes : &TierUse::read_bytes).first;
  }

  TierUse use() const override {
    const std::lock_guard lock(mutex_);
    return slots_.use;
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

  Segment* with_room(std::uint64_t room) {
    for (Segment& segment : segments_) {
      if (segment.extents.peek(room) + room <= segment.bytes) return &segment;
    }
    const std::uint64_t left = slots_.use.capacity_bytes - reserved_bytes_;
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
    const Place& place = slots_.at(slot);
    if (moved != nullptr) slots_.use.*moved += place.bytes;
    return {static_cast<char*>(segments_[place.segment].data) + place.offset, place.bytes};
  }

  std::string name_;
  std::uint64_t segment_bytes_;
  SegmentSource source_;
  mutable MutexAtFork mutex_{AtFork::Order::kTier};
  std::vector<Segment> segments_;
  std::uint64_t reserved_bytes_ = 0;
  Slots<Place> slots_;
};

}  // namespace

std::shared_ptr<Tier> arena_tier(const ArenaOptions& options, SegmentSource source) {
  return std::make_shared<ArenaTier>(options, std::move(source));
}

}  // namespace reef
