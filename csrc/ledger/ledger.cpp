#include "reef/ledger.h"

#include <algorithm>
#include <utility>

#include "current_device.h"
#include "ledger/birth.h"
#include "ledger/blocks.h"
#include "ledger/books.h"
#include "ledger/counting_allocator.h"
#include "ledger/cuda.h"
#include "ledger/vector_math.h"
#include "ledger/watch.h"
#include "reef/error.h"

namespace reef {
namespace {

std::size_t checked_slot(c10::Device device) {
  const auto slot = slot_of(with_index(device));
  if (!slot) throw ConfigError("the ledger counts cpu and cuda:0 to cuda:15, not " + device.str());
  return *slot;
}

}  // namespace

Ledger::Books::Books() {
  settle_vector_math();
  install_counting_allocator();
  install_cuda_tracker();
  std::array<CategoryBytes, kDeviceSlots> live;
  Blocks::instance().add(this, live);
  Blocks::instance().frozen([&](const auto& now) { reset_peaks(now); });
}

Ledger::Books::~Books() {
  Blocks::instance().remove(this);
  for (torch::optim::Optimizer* optimizer : optimizers) forget_optimizer(optimizer);
}

void Ledger::Books::changed(const Change& change, const CategoryBytes& live) {
  DevicePeaks& peaks = peaks_[change.slot];
  peaks.used = true;
  std::int64_t& own = peaks.by_category[change.category];
  own = std::max(own, live[change.category]);
  // Only an allocation can raise the sum.
  if (change.kind == TimelineEvent::Kind::kAllocate) {
    const std::int64_t total = live.total();
    if (total > peaks.total) {
      peaks.total = total;
      peaks.at_total = live;
      peaks.op = change.op;
    }
  }
  if (timeline_) record(change);
}

void Ledger::Books::reset_peaks(const std::array<CategoryBytes, kDeviceSlots>& live) {
  for (std::size_t slot = 0; slot < kDeviceSlots; ++slot) {
    DevicePeaks& peaks = peaks_[slot];
    peaks = {peaks.used || live[slot].total() > 0, live[slot].total(), live[slot], nullptr, live[slot]};
  }
  peaks_[0].used = true;
}

std::int64_t Ledger::Books::since_start() const {
  return std::chrono::duration_cast<std::chrono::nanoseconds>(std::chrono::steady_clock::now() - started_)
      .count();
}

void Ledger::Books::start_timeline(std::size_t max_events,
                                   const std::array<CategoryBytes, kDeviceSlots>& live) {
  timeline_.emplace();
  op_index_.clear();
  counter_index_.clear();
  max_events_ = max_events;
  for (std::size_t slot = 0; slot < kDeviceSlots; ++slot) {
    timeline_->devices.push_back(device_of(slot).str());
    timeline_->start.push_back(live[slot]);
  }
  started_ = std::chrono::steady_clock::now();
}

bool Ledger::Books::has_room() {
  const bool room = timeline_->events.size() + timeline_->samples.size() < max_events_;
  if (!room) ++timeline_->events_dropped;
  return room;
}

void Ledger::Books::sampled(const std::string& counter, std::int64_t value) {
  if (!timeline_ || !has_room()) return;
  const auto [entry, fresh] =
      counter_index_.try_emplace(&counter, static_cast<std::uint32_t>(timeline_->counters.size()));
  if (fresh) timeline_->counters.push_back(counter);
  timeline_->samples.push_back({since_start(), value, entry->second});
}

void Ledger::Books::record(const Change& change) {
  if (!has_room()) return;
  std::int32_t op = -1;
  if (change.op != nullptr) {
    const auto [entry, fresh] =
        op_index_.try_emplace(change.op, static_cast<std::int32_t>(timeline_->operators.size()));
    if (fresh) timeline_->operators.push_back(*change.op);
    op = entry->second;
  }
  timeline_->events.push_back({since_start(), change.bytes, op, static_cast<std::uint8_t>(change.slot),
                               change.kind, change.category, change.from});
}

std::optional<Timeline> Ledger::Books::stop_timeline() {
  if (!timeline_) return std::nullopt;
  timeline_->duration_nanoseconds = since_start();
  return std::exchange(timeline_, std::nullopt);
}

namespace {

// Devices on which nothing ever was alive leave the timeline; slots become indices.
Timeline compacted(Timeline timeline, const std::vector<bool>& used) {
  Timeline result = std::move(timeline);
  std::vector<std::uint8_t> index(used.size(), 0);
  std::vector<std::string> devices;
  std::vector<CategoryBytes> start;
  for (std::size_t slot = 0; slot < used.size(); ++slot) {
    index[slot] = static_cast<std::uint8_t>(devices.size());
    if (!used[slot]) continue;
    devices.push_back(std::move(result.devices[slot]));
    start.push_back(result.start[slot]);
  }
  for (TimelineEvent& event : result.events) event.device = index[event.device];
  result.devices = std::move(devices);
  result.start = std::move(start);
  return result;
}

}  // namespace

Ledger::Ledger() : books_(std::make_unique<Books>()) {}
Ledger::~Ledger() = default;

void Ledger::watch(torch::optim::Optimizer& optimizer) {
  watch_optimizer(&optimizer);
  books_->optimizers.push_back(&optimizer);
}

CategoryBytes Ledger::live(c10::Device device) const {
  const std::size_t slot = checked_slot(device);
  return Blocks::instance().frozen([&](const auto& live) { return live[slot]; });
}

Peak Ledger::peak(c10::Device device) const {
  const std::size_t slot = checked_slot(device);
  return Blocks::instance().frozen([&](const auto&) {
    const auto& peaks = books_->peaks(slot);
    return Peak{peaks.at_total, peaks.op != nullptr ? *peaks.op : ""};
  });
}

CategoryBytes Ledger::peak_by_category(c10::Device device) const {
  const std::size_t slot = checked_slot(device);
  return Blocks::instance().frozen([&](const auto&) { return books_->peaks(slot).by_category; });
}

void Ledger::reset_peak() {
  Blocks::instance().frozen([&](const auto& live) { books_->reset_peaks(live); });
}

std::vector<c10::Device> Ledger::devices() const {
  return Blocks::instance().frozen([&](const auto&) {
    std::vector<c10::Device> devices;
    for (std::size_t slot = 0; slot < kDeviceSlots; ++slot) {
      if (books_->peaks(slot).used) devices.push_back(device_of(slot));
    }
    return devices;
  });
}

void Ledger::start_timeline(std::size_t max_events) {
  Blocks::instance().frozen([&](const auto& live) { books_->start_timeline(max_events, live); });
}

Timeline Ledger::stop_timeline() {
  std::vector<bool> used(kDeviceSlots);
  auto timeline = Blocks::instance().frozen([&](const auto&) {
    for (std::size_t slot = 0; slot < kDeviceSlots; ++slot) used[slot] = books_->peaks(slot).used;
    return books_->stop_timeline();
  });
  if (!timeline)
    throw ConfigError("Ledger::stop_timeline: no timeline is being recorded; call start_timeline() first");
  return compacted(std::move(*timeline), used);
}

CategoryScope::CategoryScope(Category category) : previous_(this_threads_birth().scope) {
  this_threads_birth().scope = static_cast<std::uint8_t>(category);
}

CategoryScope::~CategoryScope() { this_threads_birth().scope = previous_; }

}  // namespace reef
