#pragma once

#include <cstdint>
#include <deque>
#include <vector>

#include "reef/swap.h"
#include "reef/trace.h"

namespace reef {

/// A step, run over and over against a budget with pretended pages. Nothing in it depends on the number of
/// pages but O(log pages) for each access: transfers end in the order of their lane, and victims are in a
/// heap.
class Simulation {
 public:
  Simulation(const Trace& trace, std::uint64_t budget_bytes, const SwapSpeeds& speeds);

  /// Runs the step once more and gives its cost. Pages stay where it left them.
  SwapCost step(const SwapPlan& plan);

  /// What the last step did on demand, for planners.
  struct Event {
    std::size_t op;  ///< for which operator
    std::uint32_t page;
    std::uint64_t last_use;  ///< operator that used it last, counted over all steps; kNeverUsed: none yet
    bool fault;              ///< false: an eviction
  };
  const std::vector<Event>& events() const { return events_; }
  /// Bytes in memory while operator i ran, scratch included.
  const std::vector<std::uint64_t>& load() const { return load_; }

 private:
  enum class Where : std::uint8_t { kNowhere, kResident, kLeaving, kAway, kComing };
  struct Page {
    Where where = Where::kNowhere;
    bool clean = false;
    double ready = 0;  ///< when kLeaving or kComing ends
    std::uint64_t last_use = kNeverUsed;
    std::uint64_t next_use = kNeverUsed;
    std::uint64_t pinned_by = kNeverUsed;
    std::uint64_t stamp = 0;  ///< another whenever it may leave anew, or no longer
  };
  struct Transfer {
    std::uint32_t page;
    double ready;
  };
  /// Of a page that may leave; out of date when the page has another stamp.
  struct Candidate {
    std::uint64_t last;  ///< the larger leaves first
    std::uint64_t bytes;
    std::uint32_t page;
    std::uint64_t stamp;
    bool operator<(const Candidate& other) const;
  };

  void run(std::size_t op, const SwapPlan& plan);
  void settle();
  void wait_until(double time);
  void make_room(std::size_t op, std::uint64_t bytes);
  bool finish_one_leaving();
  bool is_there(const Page& page) const {
    return page.where == Where::kResident || page.where == Where::kComing;
  }
  bool is_under_way(const Transfer& transfer, Where where) const {
    return pages_[transfer.page].where == where && pages_[transfer.page].ready == transfer.ready;
  }
  void may_leave(std::uint32_t page);
  void rank_by(Demand demand);
  std::uint32_t victim();
  void bring(std::size_t op, std::uint32_t page);
  void start_leaving(std::uint32_t page);
  void start_coming(std::uint32_t page);
  void start(const SwapMove& move);
  std::uint64_t bytes_of(std::uint32_t page) const { return trace_.pages[page].bytes; }

  const Trace& trace_;
  std::uint64_t budget_bytes_;
  SwapSpeeds speeds_;
  std::vector<std::vector<std::uint64_t>> next_uses_;
  std::vector<Page> pages_;
  Demand demand_ = Demand::kRecency;
  std::vector<Candidate> candidates_;  ///< a heap
  std::deque<Transfer> leaving_;       ///< in the order in which they end; some pages have stayed, or died
  std::deque<Transfer> coming_;
  std::uint64_t resident_bytes_ = 0;
  std::uint64_t clock_ = 0;  ///< operators run so far, over all steps
  double now_ = 0;
  double out_lane_free_ = 0;
  double in_lane_free_ = 0;
  SwapCost cost_;
  std::vector<Event> events_;
  std::vector<std::uint64_t> load_;
};

/// Throws ConfigError if the step cannot run in `budget_bytes`.
void check_feasible(const Trace& trace, std::uint64_t budget_bytes);

}  // namespace reef
