#include <limits>

#include "chain/schedule_writer.h"
#include "chain/solvers.h"
#include "chain/terms.h"

namespace reef {
namespace {

using Kind = ScheduleOp::Kind;

/// The recursion of dynamic.cpp with peaks for costs: nothing is rounded, and nothing is added up but what is
/// held.
class LeastPeaks {
 public:
  explicit LeastPeaks(const ChainProfile& profile)
      : terms_(profile), peaks_(2 * (terms_.count + 1) * (terms_.count + 1)), keeps_(peaks_.size()) {
    for (std::uint32_t t = 1; t <= terms_.count; ++t) {
      for (std::uint32_t s = t; s >= 1; --s) {
        for (const bool goes : {false, true}) solve(s, t, goes);
      }
    }
  }

  LeastPeak take() {
    ScheduleWriter writer(terms_.count - 1);
    write(writer, 1, terms_.count, false);
    return {peak(1, terms_.count, false), writer.take()};
  }

 private:
  // `goes`: the input of s, as soon as it may.
  std::size_t at(std::uint32_t s, std::uint32_t t, bool goes) const {
    return (s * (terms_.count + 1) + t) * 2 + (goes && terms_.input_may_go(s) ? 1 : 0);
  }
  std::uint64_t peak(std::uint32_t s, std::uint32_t t, bool goes) const { return peaks_[at(s, t, goes)]; }

  void solve(std::uint32_t s, std::uint32_t t, bool goes) {
    goes = goes && terms_.input_may_go(s);
    if (s == t) {
      peaks_[at(s, t, goes)] = terms_.last_bytes(s, goes);
      return;
    }
    const std::uint64_t behind = terms_.kept[s] + peak(s + 1, t, !terms_.has_output[s]);
    std::uint64_t best =
        std::max(terms_.taped_bytes(s, t, goes), behind - std::min(behind, terms_.freed_bytes(s, goes)));
    std::uint32_t keep = 0;
    std::uint64_t sweep = 0;
    for (std::uint32_t q = s + 1; q <= t; ++q) {
      sweep = std::max(sweep, terms_.sweep_bytes(s, t, q - 1));
      const std::uint64_t of_q =
          std::max({sweep, terms_.output[q - 1] + peak(q, t, true), peak(s, q - 1, goes)});
      if (of_q >= best) continue;
      best = of_q;
      keep = q;
    }
    peaks_[at(s, t, goes)] = best;
    keeps_[at(s, t, goes)] = keep;
  }

  void write(ScheduleWriter& writer, std::uint32_t s, std::uint32_t t, bool goes) const {
    if (s == t) {
      writer.turn(s);
      return;
    }
    const std::uint32_t q = keeps_[at(s, t, goes)];
    if (q == 0) {
      writer.add(Kind::kTaped, s);
      write(writer, s + 1, t, !terms_.has_output[s]);
      writer.drop_output(s);
      writer.add(Kind::kBackward, s);
      return;
    }
    writer.sweep(s, q - 1);
    write(writer, q, t, true);
    writer.drop_output(q - 1);
    write(writer, s, q - 1, goes);
  }

  ChainTerms terms_;
  std::vector<std::uint64_t> peaks_;
  std::vector<std::uint32_t> keeps_;  ///< the stage whose input is kept; 0: the first keeps its tape
};

}  // namespace

LeastPeak least_peak(const ChainProfile& profile) { return LeastPeaks(profile).take(); }

}  // namespace reef
