#include <algorithm>
#include <barrier>
#include <limits>
#include <memory>
#include <thread>

#include "chain/lower.h"
#include "chain/solvers.h"
#include "chain/terms.h"

namespace reef {
namespace {

using Kind = ScheduleOp::Kind;
using Slots = std::uint32_t;

/// C(s, t, m): the least time to go from output s - 1, which lies outside of m slots, and the gradient of
/// output t to that of output s - 1 (Beaumont et al., 1911.13214, theorem 1, with the sizes of terms.h):
///
///     C(s, s, m) = retape s, backward s
///     C(s, t, m) = min( forward s, backward s, C(s + 1, t, m - kept s)                    stage s keeps its
///     tape
///                       over q: forward s to q - 1, C(q, t, m - output q - 1), C(s, q - 1, m) )   q's input
///                       is kept
///
/// each where it fits. What is needed at a moment is added up in bytes and rounded up; what is held is
/// rounded up by itself.
class Table {
 public:
  Table(const ChainTerms& terms, std::uint64_t slot_bytes, Slots slots)
      : terms_(terms),
        slot_bytes_(slot_bytes),
        slots_(slots),
        pieces_((terms.count + 1) * (terms.count + 1)) {
    for (std::uint32_t i = 0; i <= terms.count; ++i) {
      output_.push_back(rounded(terms.output[i]));
      kept_.push_back(rounded(terms.kept[i]));
    }
    const std::size_t row = slots + std::size_t{1};
    costs_ = std::make_unique_for_overwrite<double[]>(row * terms.count * (terms.count + 1) / 2);
    double* next = costs_.get();
    for (std::uint32_t s = 1; s <= terms.count; ++s) {  // pieces that begin with one stage lie side by side
      for (std::uint32_t t = s; t <= terms.count; ++t, next += row) piece(s, t).costs = next;
    }
  }

  void solve(std::uint32_t threads) {
    for (std::uint32_t t = 1; t <= terms_.count; ++t) {
      for (std::uint32_t s = t; s >= 1; --s) begin(s, t);
    }
    // Tiles as far from the diagonal as each other do not need each other.
    const std::uint32_t tiles = (terms_.count + kTile - 1) / kTile;
    std::barrier together(threads);
    const auto serve = [&](std::uint32_t thread) {
      for (std::uint32_t distance = 0; distance < tiles; ++distance) {
        const std::uint32_t count = tiles - distance;
        const std::uint32_t first = count * thread / threads, end = count * (thread + 1) / threads;
        for (std::uint32_t tile = first; tile < end; ++tile) solve(tile, tile + distance);
        together.arrive_and_wait();
      }
    };
    std::vector<std::jthread> others;
    for (std::uint32_t thread = 1; thread < threads; ++thread) others.emplace_back(serve, thread);
    serve(0);
  }

  /// With how many slots the whole chain is feasible; more than there are: with none.
  Slots least() const { return piece(1, terms_.count).first; }

  Schedule schedule(Slots m) const {
    ScheduleWriter writer(terms_.count - 1);
    write(writer, 1, terms_.count, m);
    return writer.take();
  }

 private:
  struct Piece {
    double* costs = nullptr;  ///< by slots
    Slots first = 0;          ///< the least that is feasible
    Slots whole = 0;          ///< from here on nothing is computed twice
    double whole_seconds = 0;
    std::uint64_t sweep_bytes = 0;  ///< of forward passes up to the stages that have been tried
  };
  /// Pieces are solved in squares of so many first and last stages: a row that is read serves so many others
  /// while it is in the processor's cache, which is four times faster than one by one.
  static constexpr std::uint32_t kTile = 4;

  Piece& piece(std::uint32_t s, std::uint32_t t) { return pieces_[s * (terms_.count + 1) + t]; }
  const Piece& piece(std::uint32_t s, std::uint32_t t) const { return pieces_[s * (terms_.count + 1) + t]; }

  // One more than there are stands for all above.
  Slots rounded(std::uint64_t bytes) const {
    return static_cast<Slots>(std::min<std::uint64_t>((bytes + slot_bytes_ - 1) / slot_bytes_, slots_ + 1));
  }
  Slots capped(std::uint64_t slots) const {
    return static_cast<Slots>(std::min<std::uint64_t>(slots, slots_ + 1));
  }

  double forward_seconds(std::uint32_t s, std::uint32_t e) const {
    return terms_.forward_until[e] - terms_.forward_until[s - 1];
  }
  double taped_seconds(std::uint32_t s) const {
    return terms_.forward_seconds[s] + terms_.backward_seconds[s];
  }

  // Nothing is feasible but what computes nothing twice.
  void begin(std::uint32_t s, std::uint32_t t) {
    Piece& of = piece(s, t);
    if (s == t) {
      of.whole = rounded(terms_.last_bytes(s));
      of.whole_seconds = terms_.retape_seconds[s] + terms_.backward_seconds[s];
    } else {
      const Piece& rest = piece(s + 1, t);
      of.whole = capped(
          std::max<std::uint64_t>(rounded(terms_.taped_bytes(s, t)), std::uint64_t{kept_[s]} + rest.whole));
      of.whole_seconds = taped_seconds(s) + rest.whole_seconds;
    }
    of.first = of.whole;
  }

  void solve(std::uint32_t rows, std::uint32_t columns) {
    const std::uint32_t s_first = rows * kTile + 1, s_last = std::min(s_first + kTile - 1, terms_.count);
    const std::uint32_t t_first = columns * kTile + 1, t_last = std::min(t_first + kTile - 1, terms_.count);
    const auto each_piece = [&](const auto& visit) {
      for (std::uint32_t t = t_first; t <= t_last; ++t) {
        for (std::uint32_t s = std::min(s_last, t); s >= s_first; --s) visit(s, t);
      }
    };
    each_piece([&](std::uint32_t s, std::uint32_t t) {
      Piece& of = piece(s, t);
      std::fill(of.costs, of.costs + of.whole, std::numeric_limits<double>::max());
      std::fill(of.costs + of.whole, of.costs + slots_ + 1, of.whole_seconds);
      if (rows < columns) {
        for (std::uint32_t q = s + 1; q <= s_last; ++q)
          of.sweep_bytes = std::max(of.sweep_bytes, terms_.sweep_bytes(s, t, q - 1));
      }
    });
    // Inputs of stages between this square's first and its last ones: all pieces that are read are ready.
    for (std::uint32_t q = s_last + 1; q <= t_first && rows < columns; ++q) {
      each_piece([&](std::uint32_t s, std::uint32_t t) { keep_input(s, t, q); });
    }
    each_piece([&](std::uint32_t s, std::uint32_t t) {
      if (s == t) return;
      keep_tape(s, t);
      if (rows == columns) {
        for (std::uint32_t q = s + 1; q <= t; ++q) keep_input(s, t, q);
        return;
      }
      for (std::uint32_t q = t_first + 1; q <= t; ++q) keep_input(s, t, q);
      piece(s, t).sweep_bytes = 0;
      for (std::uint32_t q = s + 1; q <= s_last; ++q) keep_input(s, t, q);
    });
  }

  void keep_tape(std::uint32_t s, std::uint32_t t) {
    Piece& of = piece(s, t);
    const Piece& rest = piece(s + 1, t);
    const Slots from = capped(
        std::max<std::uint64_t>(rounded(terms_.taped_bytes(s, t)), std::uint64_t{kept_[s]} + rest.first));
    if (from >= of.whole) return;
    of.first = std::min(of.first, from);
    const double seconds = taped_seconds(s);
    const double* behind = rest.costs + (from - kept_[s]);
    for (Slots i = 0; i < of.whole - from; ++i)
      of.costs[from + i] = std::min(of.costs[from + i], seconds + behind[i]);
  }

  // Forward to q - 1, whose output is kept. For each piece in the order of q.
  void keep_input(std::uint32_t s, std::uint32_t t, std::uint32_t q) {
    Piece& of = piece(s, t);
    of.sweep_bytes = std::max(of.sweep_bytes, terms_.sweep_bytes(s, t, q - 1));
    const Slots from = first_if_kept(s, t, q, of.sweep_bytes);
    if (from >= of.whole) return;
    of.first = std::min(of.first, from);
    lower_(of.costs + from, of.whole - from, forward_seconds(s, q - 1),
           piece(q, t).costs + (from - output_[q - 1]), piece(s, q - 1).costs + from);
  }

  // From how many slots on the input of q can be kept. `sweep`: bytes that the forward passes up to it need.
  Slots first_if_kept(std::uint32_t s, std::uint32_t t, std::uint32_t q, std::uint64_t sweep) const {
    return capped(std::max<std::uint64_t>(
        {rounded(sweep), std::uint64_t{output_[q - 1]} + piece(q, t).first, piece(s, q - 1).first}));
  }

  void write(ScheduleWriter& writer, std::uint32_t s, std::uint32_t t, Slots m) const {
    if (s == t) {
      writer.turn(s);
      return;
    }
    const Piece& rest = piece(s + 1, t);
    std::uint32_t keep = 0;
    double least = std::numeric_limits<double>::infinity();
    if (m >=
        std::max<std::uint64_t>(rounded(terms_.taped_bytes(s, t)), std::uint64_t{kept_[s]} + rest.first)) {
      least = taped_seconds(s) + rest.costs[m - kept_[s]];
    }
    std::uint64_t sweep = 0;
    for (std::uint32_t q = s + 1; q <= t; ++q) {
      sweep = std::max(sweep, terms_.sweep_bytes(s, t, q - 1));
      if (m < first_if_kept(s, t, q, sweep)) continue;
      const double cost =
          forward_seconds(s, q - 1) + piece(q, t).costs[m - output_[q - 1]] + piece(s, q - 1).costs[m];
      if (cost >= least) continue;
      least = cost;
      keep = q;
    }
    if (keep == 0) {
      writer.add(Kind::kTaped, s);
      write(writer, s + 1, t, m - kept_[s]);
      writer.drop_output(s);
      writer.add(Kind::kBackward, s);
      return;
    }
    writer.sweep(s, keep - 1);
    write(writer, keep, t, m - output_[keep - 1]);
    writer.drop_output(keep - 1);
    write(writer, s, keep - 1, m);
  }

  const ChainTerms& terms_;
  const Lower lower_ = lower_with_avx2() != nullptr ? lower_with_avx2() : &lower_with;
  std::uint64_t slot_bytes_;
  Slots slots_;
  std::vector<Slots> output_, kept_;  ///< held; rounded up
  std::vector<Piece> pieces_;
  std::unique_ptr<double[]> costs_;
};

}  // namespace

std::optional<Schedule> dynamic_schedule(const ChainProfile& profile, std::uint64_t budget_bytes,
                                         const ChainSolverOptions& options) {
  const ChainTerms terms(profile);
  const std::uint64_t slot_bytes = std::max<std::uint64_t>(1, budget_bytes / options.slots);
  const auto budget_slots = static_cast<Slots>(budget_bytes / slot_bytes);
  // What fits by rounded sizes fits with less: something that does not, by a little, may fit to the byte.
  const Slots slots = slot_bytes == 1 ? budget_slots : budget_slots + budget_slots / 16;
  std::uint32_t threads =
      options.threads != 0 ? options.threads : std::max(1U, std::thread::hardware_concurrency());
  if (terms.count < 32) threads = 1;
  Table table(terms, slot_bytes, slots);
  table.solve(threads);
  for (Slots m = slots; m >= table.least() && m > 0; --m) {
    Schedule schedule = table.schedule(m);
    if (m <= budget_slots || simulate(profile, schedule).peak_bytes <= budget_bytes) return schedule;
  }
  return std::nullopt;
}

}  // namespace reef
