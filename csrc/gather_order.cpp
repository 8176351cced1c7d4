#include "gather_order.h"

#include <algorithm>
#include <utility>

namespace reef {

GatherOrder::GatherOrder(std::vector<std::int64_t> bytes)
    : bytes_(std::move(bytes)), last_(bytes_.size(), 0) {
  for (const std::int64_t size : bytes_) largest_ = std::max(largest_, size);
}

void GatherOrder::Sequence::use(const Use& now) {
  if (!seen.empty() && seen.back() == now) return;
  seen.push_back(now);
  // The nearest that is like this one, from here on; passes that the step did not have begin anew.
  for (std::size_t i = 0; i < expected.size(); ++i) {
    const std::size_t at = ((known() ? position : 0) + i) % expected.size();
    if (expected[at] != now) continue;
    position = at;
    return;
  }
  position = expected.size();
}

void GatherOrder::Sequence::end() {
  expected = std::exchange(seen, {});
  position = expected.size();
}

void GatherOrder::use(std::size_t bucket, Phase phase) {
  last_[bucket] = ++uses_;
  evaluates_ = phase == Phase::kEvaluation && step_.seen.empty();
  if (!evaluates_) {
    if (!evaluation_.seen.empty()) evaluation_.end();
    return step_.use({bucket, phase == Phase::kBackward ? phase : Phase::kForward});
  }
  const Use now{bucket, phase};
  if (evaluation_.seen.size() > 1 && evaluation_.seen.front() == now) evaluation_.end();
  evaluation_.use(now);
}

void GatherOrder::end_step() { step_.end(); }

std::vector<std::size_t> GatherOrder::future() const {
  std::vector<std::size_t> buckets;
  const auto add = [&](const std::vector<Use>& uses, std::size_t first) {
    for (std::size_t i = first; i < uses.size(); ++i) buckets.push_back(uses[i].bucket);
  };
  const Sequence& now = evaluates_ ? evaluation_ : step_;
  if (!now.known()) return buckets;
  add(now.expected, now.position);
  // After an evaluation comes a step or, where there are none (a server), the next.
  if (evaluates_) add(step_.expected.empty() ? evaluation_.expected : step_.expected, 0);
  return buckets;
}

std::size_t GatherOrder::next_use(const std::vector<std::size_t>& future, std::size_t bucket,
                                  std::size_t from) const {
  if (future.empty()) return uses_ - last_[bucket];
  for (std::size_t at = from; at < future.size(); ++at) {
    if (future[at] == bucket) return at;
  }
  return kNever;
}

GatherOrder::Moves GatherOrder::plan(const std::vector<std::size_t>& needed, const std::vector<Held>& held,
                                     std::int64_t resident_bytes) const {
  Moves moves;
  const std::vector<std::size_t> future = this->future();
  std::vector<Held> now = held;
  std::int64_t there = 0;
  std::int64_t in_use = 0;
  for (std::size_t bucket = 0; bucket < held.size(); ++bucket) {
    if (held[bucket].there) there += bytes_[bucket];
    if (held[bucket].in_use) in_use += bytes_[bucket];
  }
  const std::int64_t most = std::max(resident_bytes, std::max(in_use, largest_) + largest_);
  const auto drop = [&](std::size_t bucket) {
    now[bucket].there = false;
    there -= bytes_[bucket];
    moves.drop.push_back(bucket);
  };
  const auto fetch = [&](std::size_t bucket) {
    now[bucket].there = true;
    there += bytes_[bucket];
    moves.fetch.push_back(bucket);
  };
  // Of what is there, in the order in which it leaves for a use at `time`: the farthest from then on first.
  const auto leaving = [&](std::size_t time) {
    std::vector<std::size_t> all;
    for (std::size_t bucket = 0; bucket < now.size(); ++bucket) {
      if (now[bucket].there) all.push_back(bucket);
    }
    std::stable_sort(all.begin(), all.end(), [&](std::size_t a, std::size_t b) {
      return next_use(future, a, time) > next_use(future, b, time);
    });
    return all;
  };

  if (!future.empty()) {  // what was here for uses that are over
    for (std::size_t bucket = 0; bucket < now.size(); ++bucket) {
      if (now[bucket].there && !now[bucket].in_use && next_use(future, bucket, 0) == kNever) drop(bucket);
    }
  }
  for (const std::size_t bucket : needed) {
    if (now[bucket].there) continue;
    for (const std::size_t other : leaving(0)) {
      if (there + bytes_[bucket] <= most) break;
      if (!now[other].in_use) drop(other);
    }
    fetch(bucket);
  }
  // Ahead: the next that is missing, as soon as what is to leave for it has been used for the last time
  // before that: what is fetched is what would be without looking ahead (Cao et al. 1995, conservative). In
  // passes that repeat that is always the one in use, and nothing would ever be on its way: the next best
  // leaves for it, and a pass fetches as with room for one less.
  for (std::size_t time = 1; time < future.size(); ++time) {
    const std::size_t next = future[time];
    if (now[next].there) continue;
    std::vector<std::size_t> leave;
    std::int64_t freed = 0;
    for (const std::size_t other : leaving(time)) {
      if (there - freed + bytes_[next] <= most) break;
      if (evaluates_ && now[other].in_use) continue;
      if (now[other].in_use || next_use(future, other, 1) < time) return moves;
      freed += bytes_[other];
      leave.push_back(other);
    }
    const bool returns = std::find(moves.drop.begin(), moves.drop.end(), next) != moves.drop.end();
    if (returns || there - freed + bytes_[next] > most) return moves;
    for (const std::size_t other : leave) drop(other);
    fetch(next);
  }
  return moves;
}

}  // namespace reef
