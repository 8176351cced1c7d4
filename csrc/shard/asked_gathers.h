#pragma once

#include <chrono>
#include <cstddef>
#include <cstdint>
#include <deque>
#include <optional>
#include <string>
#include <vector>

#include "distributed/comm_lane.h"
#include "shard/gather_requests.h"

namespace reef {

/// Gathers that ranks ask each other for. Each rank begins a gather when one of its own operators needs the
/// bucket, and a gather needs all ranks: one that waits for longer than ranks do that use buckets in the same
/// order asks the others, and each rank that waits takes part in what it is asked for. Not for several
/// threads at once.
class AskedGathers {
 public:
  /// What this rank does about its buckets.
  class Buckets {
   public:
    /// Whether a gather is under way whose values it wants.
    virtual bool is_coming(std::size_t bucket) const = 0;
    /// Begins a gather and keeps what comes. False, and nothing is begun: the bucket is not away.
    virtual bool gather_for_others(std::size_t bucket) = 0;
    /// Begins a gather, of which nothing is kept.
    virtual void take_part(std::size_t bucket) = 0;

   protected:
    ~Buckets() = default;
  };

  /// Nobody can ask where ranks gather in one order, or the group has no store.
  AskedGathers(Buckets& own, std::size_t buckets) : own_(own), counts_(buckets) {}
  /// See GatherRequests.
  void open(const ProcessGroupPtr& group, const std::string& name, int ranks);
  bool is_open() const { return requests_.has_value(); }

  void begin_step(std::int64_t step);
  /// All ranks have begun as many gathers of each bucket, and begin alike from here on: what is asked for
  /// before this is heard before it, and what is asked for after it only by those that have come to it. Else
  /// a rank that is late would begin a gather for one that is ahead, and once more as all do.
  void begin_part();
  /// This rank has begun a gather of the bucket.
  void begun(std::size_t bucket) { ++counts_[bucket].begun; }
  /// Of each bucket, how many gathers this rank has begun, ever.
  std::vector<std::int64_t> begun() const;
  /// One of this rank's operators uses it: it is no longer here for others.
  void used(std::size_t bucket) { counts_[bucket].for_others = false; }
  /// None is here for others.
  void forget();
  bool is_for_others(std::size_t bucket) const { return counts_[bucket].for_others; }

  /// Takes part in what the others have asked for, and with `keeps` keeps what comes, as this rank will use
  /// it. Returns whether there was anything.
  bool answer(bool keeps = true);
  /// Waits for work of a lane, answers meanwhile, and asks if it takes long.
  void await(CommLane& lane, std::uint64_t ticket);
  /// This rank's pass has failed: it keeps nothing for others, which need not wait before they ask.
  void tell_failed();
  void abandon_pass() { failed_ = false; }
  /// To be called when this rank has what it has begun. If ranks have ever asked each other, takes part in
  /// what the others ask for until each of them has called this, or `most` is over.
  void end(std::chrono::milliseconds most);
  /// Ranks use buckets in different orders: whoever waits asks soon, from the first gather of a step on.
  void ask_at_once() { patience_at_first_ = patience_ = kLookAgain; }

 private:
  using milliseconds = std::chrono::milliseconds;
  static constexpr milliseconds kPatience{1000};  // before the others are asked for a gather
  static constexpr milliseconds kLook{100};       // at what they ask, while this rank waits
  static constexpr milliseconds kLookAgain{2};    // once it has been so in this step
  static constexpr std::size_t kForOthersAtOnce = 2;

  struct Count {
    std::int64_t begun = 0;   ///< gathers, ever
    std::int64_t asked = 0;   ///< of these, the last that the others were asked for
    bool for_others = false;  ///< it was asked for, and not used here since
  };

  template <class What>
  void by_store(const What& what);
  void ask();
  bool take_part_in_asked(bool keeps);
  void keep_for_others(std::size_t bucket);

  Buckets& own_;
  std::vector<Count> counts_;
  std::optional<GatherRequests> requests_;  ///< while there is a store
  milliseconds patience_at_first_ = kPatience;
  milliseconds patience_ = kPatience;   ///< of this step
  bool failed_ = false;                 ///< this rank's pass, or one in no_sync of this step
  std::deque<std::size_t> for_others_;  ///< the last
};

}  // namespace reef
