#pragma once

#include <boost/smart_ptr/intrusive_ptr.hpp>
#include <boost/smart_ptr/intrusive_ref_counter.hpp>
#include <cstddef>
#include <cstdint>
#include <limits>
#include <memory>
#include <span>
#include <string>
#include <vector>

#include "reef/trace.h"

namespace reef {

/// What the learner keeps in every page. It is owned by all who know it, the learner among them.
struct LearnedPage : boost::intrusive_ref_counter<LearnedPage, boost::thread_safe_counter> {
  virtual ~LearnedPage() = default;

  static constexpr std::uint32_t kNoId = std::numeric_limits<std::uint32_t>::max();

  std::uint64_t bytes = 0;
  std::uint64_t next_use = kNeverUsed;  ///< the operator, counted over all steps; known while following
  std::uint64_t made_in_step = 0;       ///< 0: before the first
  std::uint64_t met_at = kNeverUsed;    ///< the operator that met it last, counted over all steps
  std::uint32_t id = kNoId;             ///< in the trace
  bool dead = false;                    ///< its memory is gone: of no interest any longer
};
using LearnedPagePtr = boost::intrusive_ptr<LearnedPage>;

/// Learns what a training step does with its pages, and follows the steps after it: while they do the same,
/// the next use of every page is known. Pages are matched by position: those that outlive a step by
/// themselves, those made within it by the place at which they are made. A step that departs is recorded from
/// there on and becomes the step that is followed. Pure (no Torch), not thread-safe. Cost: some 50 ns an
/// operator, and a step of N operators and P pages once more when learnt.
class StepLearner {
 public:
  struct Use {
    LearnedPage* page;
    bool writes;
  };

  /// `page` exists from now on.
  void made(LearnedPage& page) const { page.made_in_step = step_; }
  void died(LearnedPage& page);

  /// To be asked before an operator that can be the first of a step: whether it is one, being the operator
  /// that began steps before. A training program with two optimizers has several candidates in a step.
  bool begins_step(const std::string& name, std::span<const Use> uses);
  /// The last operator of a step has run. True: this step was no repetition, and is followed from now on.
  bool end_step();

  /// `name` must stay where it is: operators are told apart by its address. Gives the operator's position.
  std::size_t begin_operator(const std::string& name, std::span<const Use> uses);
  /// `uses`: what it began with; `results`: pages that it has made, beside others. `seconds`: since the
  /// operator before ended, without waiting for pages.
  void end_operator(std::size_t position, std::span<const Use> uses, std::span<LearnedPage* const> results,
                    double seconds, std::uint64_t scratch_bytes);

  bool following() const { return following_; }
  /// Steps in a row that were no repetition.
  std::size_t departures() const { return departures_; }
  /// The step that is or was followed last; empty until one was.
  const Trace& trace() const { return *trace_; }
  std::shared_ptr<const Trace> shared_trace() const { return trace_; }
  /// Another number whenever next uses become known, or are known no longer.
  std::uint64_t epoch() const { return epoch_; }
  /// Pages that the last step made and left behind, whose next use is not known any longer, if it was a
  /// repetition.
  std::span<const LearnedPagePtr> left_behind() const { return left_behind_; }
  /// nullptr while no such page exists.
  LearnedPage* page(std::uint32_t id) const { return pages_[id].page.get(); }
  /// Everything is forgotten, pages' ids too.
  void reset();

 private:
  struct Operator {
    const std::string* name;
    std::size_t accesses_end;
    double seconds;
    std::uint64_t scratch_bytes;
  };
  struct Known {
    LearnedPagePtr page;
    std::uint64_t bytes;
    std::size_t first;        ///< operator that met it first
    std::size_t freed_after;  ///< operator that ran last when it died
    bool earlier;             ///< existed before the step
    bool alive() const { return page != nullptr; }
  };

  std::uint64_t now(std::size_t position) const { return base_ + position; }
  std::size_t accesses_begin(std::size_t op) const { return op == 0 ? 0 : operators_[op - 1].accesses_end; }
  bool matches(LearnedPage& page, std::size_t position);
  void record(LearnedPage& page, bool writes, std::size_t position);
  void depart(std::size_t position);
  void depart_within(std::size_t position, std::span<const Use> uses);
  void learn();
  void drop_carried();
  void build_trace();
  void forget_step();

  bool following_ = false;
  bool spoiled_ = false;      ///< two operators at once, or no end of the step: not to be learnt
  std::uint64_t step_ = 1;    ///< 0 is before the first
  std::uint64_t base_ = 0;    ///< operators before this step
  std::size_t position_ = 0;  ///< operators begun in this step
  std::size_t cursor_ = 0;    ///< following: accesses met so far
  std::size_t departures_ = 0;
  std::vector<Operator> operators_;
  std::vector<TraceAccess> accesses_;
  std::vector<Known> pages_;              ///< by id
  std::vector<std::uint64_t> next_uses_;  ///< by access
  std::shared_ptr<const Trace> trace_ = std::make_shared<const Trace>();
  std::uint64_t epoch_ = 0;
  std::vector<LearnedPagePtr> left_behind_;
  const std::string* first_name_ = nullptr;
  LearnedPagePtr first_page_;
  std::size_t other_candidates_ = 0;
};

}  // namespace reef
