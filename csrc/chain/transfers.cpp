#include <algorithm>
#include <limits>
#include <utility>

#include "chain/solvers.h"
#include "chain/terms.h"

namespace reef {
namespace {

using Kind = ScheduleOp::Kind;

constexpr std::size_t kNever = std::numeric_limits<std::size_t>::max();

/// An output or a tape that lies idle while the loss passes, by the operations of its schedule.
struct IdleItem {
  bool is_output = false;
  std::uint32_t stage = 0;
  std::uint64_t bytes = 0;
  std::size_t made = 0;      ///< by which it is made
  std::size_t last_use = 0;  ///< that uses it last before the loss
  std::size_t next_use = 0;  ///< and first after it
  /// Before which it is evicted, and before which it begins to come back; kNever: it stays.
  std::size_t evicted = kNever, prefetched = kNever;

  bool moves() const { return evicted != kNever; }
  bool may_be_away_at(std::size_t operation) const { return last_use < operation && operation < next_use; }
};

/// What a schedule without transfers holds, operation by operation.
class Holdings {
 public:
  Holdings(const ChainProfile& profile, std::uint32_t stages)
      : profile_(profile), named_(stages + 2), taped_(stages + 2) {}

  static bool runs_forward(Kind kind) {
    return kind == Kind::kForward || kind == Kind::kTaped || kind == Kind::kRetape;
  }

  bool has_output(std::uint32_t stage) const {
    return named_[stage] || (taped_[stage + 1] && tape_has_input(stage + 1)) ||
           (taped_[stage] && tape_has_output(stage));
  }
  bool has(const IdleItem& item) const {
    return item.is_output ? has_output(item.stage) : taped_[item.stage];
  }

  bool uses(const ScheduleOp& op, const IdleItem& item) const {
    if (op.kind == Kind::kBackward && op.stage == item.stage)
      return !item.is_output || tape_has_output(item.stage);
    return item.is_output && op.stage == item.stage + 1 &&
           (runs_forward(op.kind) || (op.kind == Kind::kBackward && tape_has_input(op.stage)));
  }

  void follow(const ScheduleOp& op) {
    if (runs_forward(op.kind)) {
      if (op.kind != Kind::kRetape) named_[op.stage] = true;
      if (op.kind != Kind::kForward) taped_[op.stage] = true;
    }
    if (op.kind == Kind::kDropOutput) named_[op.stage] = false;
    if (op.kind == Kind::kDropTape || op.kind == Kind::kBackward) taped_[op.stage] = false;
  }

 private:
  bool tape_has_input(std::uint32_t stage) const { return profile_.stages[stage - 1].tape_has_input; }
  bool tape_has_output(std::uint32_t stage) const { return profile_.stages[stage - 1].tape_has_output; }

  const ChainProfile& profile_;
  std::vector<bool> named_, taped_;
};

/// In the order in which they are made.
std::vector<IdleItem> idle_items(const ChainProfile& profile, const Schedule& schedule) {
  Holdings holdings(profile, schedule.stages);
  std::vector<IdleItem> waiting, found;
  bool lost = false;
  for (std::size_t at = 0; at < schedule.operations.size(); ++at) {
    const ScheduleOp& op = schedule.operations[at];
    const auto next = [&](IdleItem& item) {
      (lost ? item.next_use : item.last_use) = at;
      if (lost) found.push_back(item);
      return lost;
    };
    std::erase_if(waiting, [&](IdleItem& item) { return holdings.uses(op, item) && next(item); });
    holdings.follow(op);
    if (op.kind == Kind::kLoss) lost = true;
    if (!lost && Holdings::runs_forward(op.kind)) {
      const StageProfile& of = profile.stages[op.stage - 1];
      if (op.stage < schedule.stages) waiting.push_back({true, op.stage, of.output_bytes, at, at});
      if (op.kind == Kind::kTaped) waiting.push_back({false, op.stage, own_tape_bytes(of), at, at});
    }
    // What is made anew later is another one.
    std::erase_if(waiting, [&](const IdleItem& item) { return item.bytes == 0 || !holdings.has(item); });
  }
  std::sort(found.begin(), found.end(), [](const IdleItem& a, const IdleItem& b) {
    return a.made != b.made ? a.made < b.made : a.is_output < b.is_output;
  });
  return found;
}

/// Where items go away and come back.
class Moves {
 public:
  Moves(const ChainProfile& profile, const Schedule& schedule)
      : schedule_(schedule), items_(idle_items(profile, schedule)) {
    for (const ScheduleLoad& load : simulate(profile, schedule).load) load_.push_back(load.total());
  }

  /// With everything away that may be.
  std::uint64_t least_bytes() const {
    std::uint64_t most = 0;
    for (std::size_t at = 0; at < load_.size(); ++at) {
      std::uint64_t bytes = load_[at];
      for (const IdleItem& item : items_) bytes -= item.may_be_away_at(at) ? item.bytes : 0;
      most = std::max(most, bytes);
    }
    return most;
  }

  /// As late as there is room, that whose turn comes last first; then back as early as there is room, that
  /// whose turn comes first first. False: there is no room.
  bool choose(std::uint64_t budget_bytes, std::uint64_t capacity_bytes) {
    std::uint64_t away = 0, moved = 0;
    for (std::size_t at = 0; at < load_.size(); ++at) {
      for (IdleItem& item : items_) {
        if (!item.moves() || item.next_use != at) continue;
        item.prefetched = at;
        away -= item.bytes;
      }
      while (load_[at] - away > budget_bytes) {
        IdleItem* const last = last_wanted(at);
        if (last == nullptr || moved + last->bytes > capacity_bytes) return false;
        last->evicted = at;
        away += last->bytes;
        moved += last->bytes;
      }
    }
    bring_back_early(budget_bytes);
    return true;
  }

  Schedule schedule() const {
    Schedule moved{schedule_.stages, {}};
    const auto add = [&](const IdleItem& item, Kind output, Kind tape) {
      moved.operations.push_back({item.is_output ? output : tape, item.stage});
    };
    for (std::size_t at = 0; at < load_.size(); ++at) {
      for (const IdleItem& item : items_) {
        if (item.evicted == at) add(item, Kind::kEvictOutput, Kind::kEvictTape);
      }
      for (const IdleItem* item : by_next_use_) {
        if (item->prefetched == at) add(*item, Kind::kPrefetchOutput, Kind::kPrefetchTape);
      }
      moved.operations.push_back(schedule_.operations[at]);
      for (const IdleItem& item : items_) {
        if (item.moves() && item.made == at) add(item, Kind::kOffloadOutput, Kind::kOffloadTape);
      }
    }
    return moved;
  }

 private:
  IdleItem* last_wanted(std::size_t at) {
    IdleItem* last = nullptr;
    for (IdleItem& item : items_) {
      if (item.moves() || !item.may_be_away_at(at)) continue;
      if (last == nullptr || item.next_use > last->next_use) last = &item;
    }
    return last;
  }

  void bring_back_early(std::uint64_t budget_bytes) {
    for (IdleItem& item : items_) {
      if (!item.moves()) continue;
      by_next_use_.push_back(&item);
      for (std::size_t at = item.evicted; at < item.prefetched; ++at) load_[at] -= item.bytes;
    }
    std::stable_sort(by_next_use_.begin(), by_next_use_.end(),
                     [](const IdleItem* a, const IdleItem* b) { return a->next_use < b->next_use; });
    std::size_t before = 0;  // the lane makes them in this order
    for (IdleItem* item : by_next_use_) {
      while (item->prefetched > std::max(item->evicted + 1, before) &&
             load_[item->prefetched - 1] + item->bytes <= budget_bytes) {
        load_[--item->prefetched] += item->bytes;
      }
      before = item->prefetched;
    }
  }

  const Schedule& schedule_;
  std::vector<IdleItem> items_;
  std::vector<IdleItem*> by_next_use_;  ///< those that move
  std::vector<std::uint64_t> load_;     ///< of each operation; at last without what is away
};

}  // namespace

std::optional<Schedule> with_transfers(const ChainProfile& profile, const Schedule& schedule,
                                       std::uint64_t budget_bytes) {
  const bool has_tier = profile.tier_speed.bytes_per_second > 0;
  Moves moves(profile, schedule);
  if (!moves.choose(budget_bytes, has_tier ? profile.tier_capacity_bytes : 0)) return std::nullopt;
  return moves.schedule();
}

std::uint64_t least_with_transfers(const ChainProfile& profile, const Schedule& schedule) {
  std::uint64_t least = Moves(profile, schedule).least_bytes();
  std::uint64_t enough = simulate(profile, schedule).peak_bytes;
  if (with_transfers(profile, schedule, least)) return least;
  while (least + 1 < enough) {  // the tier does not hold all of it
    const std::uint64_t middle = least + (enough - least) / 2;
    (with_transfers(profile, schedule, middle) ? enough : least) = middle;
  }
  return enough;
}

}  // namespace reef
