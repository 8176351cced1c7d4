#pragma once

#include <c10/core/StorageImpl.h>

#include <cstdint>
#include <exception>
#include <memory>
#include <string>
#include <vector>

#include "page/memory.h"
#include "page/page_table.h"
#include "reef/swap.h"
#include "reef/tier.h"

namespace reef {

struct MoveCounts {
  std::uint64_t faults = 0;   ///< operators that had to wait for a page
  std::uint64_t fetches = 0;  ///< pages brought back ahead of their operator
  std::uint64_t evictions = 0;
  std::uint64_t clean_evictions = 0;  ///< of these, without writing
  std::uint64_t bytes_in = 0;
  std::uint64_t bytes_out = 0;
  std::uint64_t unseen_writes = 0;  ///< pages found written without an operator
  double waited_seconds = 0;        ///< the training thread's
};

/// Moves pages between memory and the tiers, when told to: it decides nothing. Not thread-safe; transfers
/// only copy, and what they have done takes effect when settled.
class PageMover {
 public:
  PageMover(PageTable& table, Memory& memory);

  void set_tiers(std::vector<std::shared_ptr<Tier>> tiers);
  const std::vector<std::shared_ptr<Tier>>& tiers() const { return tiers_; }

  /// The page leaves; returns when its memory is free. False if no tier has room. Throws what the tier
  /// throws. In both cases it stays.
  bool evict(Page& page);
  /// The page comes back; returns when it is there. Throws what the tier throws; then it stays away.
  void fetch(Page& page);
  /// The same beside the operators. Without effect on pages that do not stand so that they could.
  void start_evict(Page& page);
  void start_fetch(Page& page);

  /// Nothing is under way with the page any longer: it is in memory, or away. Throws what its transfer threw.
  void finish(Page& page);
  /// Frees what has finished leaving.
  void settle();
  /// Waits until the first of those leaving is gone; false if there is none.
  bool settle_one();
  /// The first error of a move beside the operators of which nobody has been told, or nullptr.
  std::exception_ptr take_error() { return std::exchange(error_, nullptr); }
  void keep_error(std::exception_ptr error) {
    if (!error_) error_ = std::move(error);
  }
  /// Nothing is under way with any page.
  void settle_all() noexcept;

  /// The page's storage is gone, or holds other memory.
  void forget(Page& page);

  /// Of all pages that have left, ever.
  std::uint64_t evicted_bytes() const { return evicted_bytes_; }
  MoveCounts& counts() { return counts_; }
  const MoveCounts& counts() const { return counts_; }
  /// As measured.
  SwapSpeeds speeds() const;

 private:
  struct Speed {
    void measured(const Page& page, const Transfer& transfer);
    double bytes = 0;
    double seconds = 0;
  };

  static PageCopy copy_of(const Page& page, PageCopy::Direction direction);

  void count_out(const Page& page);
  void leave(Page& page, c10::StorageImpl& storage);
  void count_in(const Page& page);
  bool take_slot(Page& page);
  void give_back_slot(Page& page);
  bool is_as_in_its_slot(const Page& page);
  void end_leaving(Page& page, bool stays);
  std::shared_ptr<Transfer> no_longer_leaving(Page& page);
  void end_coming(Page& page);
  c10::DataPtr allocate(const Page& page);

  PageTable& table_;
  Memory& memory_;
  std::vector<std::shared_ptr<Tier>> tiers_;
  std::vector<Page*> leaving_;  ///< in the order in which they started
  std::exception_ptr error_;
  MoveCounts counts_;
  std::uint64_t evicted_bytes_ = 0;
  Speed out_speed_;
  Speed in_speed_;
  const std::string out_counter_;
  const std::string in_counter_;
};

}  // namespace reef
