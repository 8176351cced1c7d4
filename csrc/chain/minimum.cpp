#include <limits>

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
      : terms_(profile), peaks_((terms_.count + 1) * (terms_.count + 1)), keeps_(peaks_.size()) {
    for (std::uint32_t t = 1; t <= terms_.count; ++t) {
      for (std::uint32_t s = t; s >= 1; --s) solve(s, t);
    }
  }

  LeastPeak take() {
    ScheduleWriter writer(terms_.count - 1);
    write(writer, 1, terms_.count);
    return {peak(1, terms_.count), writer.take()};
  }

 private:
  std::size_t at(std::uint32_t s, std::uint32_t t) const { return s * (terms_.count + 1) + t; }
  std::uint64_t peak(std::uint32_t s, std::uint32_t t) const { return peaks_[at(s, t)]; }

  void solve(std::uint32_t s, std::uint32_t t) {
    if (s == t) {
      peaks_[at(s, t)] = terms_.last_bytes(s);
      return;
    }
    std::uint64_t best = std::max(terms_.taped_bytes(s, t), terms_.kept[s] + peak(s + 1, t));
    std::uint32_t keep = 0;
    std::uint64_t sweep = 0;
    for (std::uint32_t q = s + 1; q <= t; ++q) {
      sweep = std::max(sweep, terms_.sweep_bytes(s, t, q - 1));
      const std::uint64_t of_q = std::max({sweep, terms_.output[q - 1] + peak(q, t), peak(s, q - 1)});
      if (of_q >= best) continue;
      best = of_q;
      keep = q;
    }
    peaks_[at(s, t)] = best;
    keeps_[at(s, t)] = keep;
  }

  void write(ScheduleWriter& writer, std::uint32_t s, std::uint32_t t) const {
    if (s == t) {
      writer.turn(s);
      return;
    }
    const std::uint32_t q = keeps_[at(s, t)];
    if (q == 0) {
      writer.add(Kind::kTaped, s);
      write(writer, s + 1, t);
      writer.drop_output(s);
      writer.add(Kind::kBackward, s);
      return;
    }
    writer.sweep(s, q - 1);
    write(writer, q, t);
    writer.drop_output(q - 1);
    write(writer, s, q - 1);
  }

  ChainTerms terms_;
  std::vector<std::uint64_t> peaks_;
  std::vector<std::uint32_t> keeps_;  ///< the stage whose input is kept; 0: the first keeps its tape
};

}  // namespace

LeastPeak least_peak(const ChainProfile& profile) { return LeastPeaks(profile).take(); }

}  // namespace reef
