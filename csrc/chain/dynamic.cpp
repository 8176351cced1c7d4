#include <algorithm>
#include <array>
#include <barrier>
#include <limits>
#include <memory>
#include <thread>

#include "chain/lower.h"
#include "chain/schedule_writer.h"
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
///     C(s, t, m) = min( forward s, backward s, C(s + 1, t, m - kept s)        stage s keeps its tape
///                       over q: forward s to q - 1, C(q, t, m - output q - 1), C(s, q - 1, m) )
///                                                                             q's input is kept
///
/// each where it fits. Where the tape of s does without its input, that may go when the tape is there, and
/// what follows has as much more; not if it is on the tape of s - 1. What is needed at a moment is added up
/// in bytes and rounded up; what is held is rounded up by itself, and what goes down.
class Table {
 public:
  Table(const ChainTerms& terms, std::uint64_t slot_bytes, Slots slots)
      : terms_(terms),
        slot_bytes_(slot_bytes),
        slots_(slots),
        pieces_(2 * (terms.count + 1) * (terms.count + 1)) {
    std::size_t rows = 0;
    for (std::uint32_t i = 0; i <= terms.count; ++i) {
      output_.push_back(rounded(terms.output[i]));
      kept_.push_back(rounded(terms.kept[i]));
      if (i > 0) each_start(i, [&](Start) { rows += terms.count - i + 1; });
    }
    const std::size_t row = slots + std::size_t{1};
    costs_ = std::make_unique_for_overwrite<double[]>(row * rows);
    double* next = costs_.get();
    for (std::uint32_t s = 1; s <= terms.count; ++s) {  // pieces that begin with one stage lie side by side
      each_start(s, [&](Start from) {
        for (std::uint32_t t = s; t <= terms.count; ++t, next += row) piece(from, t).costs = next;
      });
    }
  }

  void solve(std::uint32_t threads) {
    for (std::uint32_t t = 1; t <= terms_.count; ++t) {
      for (std::uint32_t s = t; s >= 1; --s) {
        each_start(s, [&](Start from) { begin(from, t); });
      }
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
  Slots least() const { return piece(whole(), terms_.count).first; }
  double seconds(Slots m) const { return piece(whole(), terms_.count).costs[m]; }

  Schedule schedule(Slots m) const {
    ScheduleWriter writer(terms_.count - 1);
    write(writer, whole(), terms_.count, m);
    return writer.take();
  }

 private:
  /// The first stage of a piece, and whether its input goes as soon as it may.
  struct Start {
    std::uint32_t s;
    bool goes;
  };
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

  static Start whole() { return {1, false}; }
  /// Of what is behind a stage that keeps its tape.
  Start behind(std::uint32_t s) const { return {s + 1, !terms_.has_output[s] && terms_.input_may_go(s + 1)}; }
  /// Of what begins with an output that is kept for it.
  Start kept(std::uint32_t q) const { return {q, terms_.input_may_go(q)}; }
  /// Those that other pieces are made of.
  template <class Visit>
  void each_start(std::uint32_t s, const Visit& visit) const {
    const bool goes = terms_.input_may_go(s);
    if (!goes || terms_.has_output[s - 1]) visit(Start{s, false});
    if (goes) visit(Start{s, true});
  }

  std::size_t at(Start from, std::uint32_t t) const {
    return (2 * from.s + (from.goes ? 1 : 0)) * std::size_t{terms_.count + 1} + t;
  }
  Piece& piece(Start from, std::uint32_t t) { return pieces_[at(from, t)]; }
  const Piece& piece(Start from, std::uint32_t t) const { return pieces_[at(from, t)]; }

  // One more than there are stands for all above.
  Slots rounded(std::uint64_t bytes) const {
    return static_cast<Slots>(std::min<std::uint64_t>((bytes + slot_bytes_ - 1) / slot_bytes_, slots_ + 1));
  }
  Slots capped(std::uint64_t slots) const {
    return static_cast<Slots>(std::min<std::uint64_t>(slots, slots_ + 1));
  }
  Slots freed(Start from) const {
    return static_cast<Slots>(terms_.freed_bytes(from.s, from.goes) / slot_bytes_);
  }

  double forward_seconds(std::uint32_t s, std::uint32_t e) const {
    return terms_.forward_until[e] - terms_.forward_until[s - 1];
  }
  double taped_seconds(std::uint32_t s) const {
    return terms_.forward_seconds[s] + terms_.backward_seconds[s];
  }
  // From how many slots on the first stage can keep its tape, if what is behind it needs so many.
  Slots first_if_taped(Start from, std::uint32_t t, Slots rest) const {
    const std::uint64_t held = std::uint64_t{kept_[from.s]} + rest;
    return capped(std::max<std::uint64_t>(rounded(terms_.taped_bytes(from.s, t, from.goes)),
                                          held - std::min<std::uint64_t>(held, freed(from))));
  }
  // And how many are left for that of m.
  Slots left_if_taped(Start from, Slots m) const { return std::min(slots_, m + freed(from) - kept_[from.s]); }

  // Nothing is feasible but what computes nothing twice.
  void begin(Start from, std::uint32_t t) {
    Piece& of = piece(from, t);
    const std::uint32_t s = from.s;
    if (s == t) {
      of.whole = rounded(terms_.last_bytes(s, from.goes));
      of.whole_seconds = terms_.retape_seconds[s] + terms_.backward_seconds[s];
    } else {
      const Piece& rest = piece(behind(s), t);
      of.whole = first_if_taped(from, t, rest.whole);
      of.whole_seconds = taped_seconds(s) + rest.whole_seconds;
    }
    of.first = of.whole;
  }

  void solve(std::uint32_t rows, std::uint32_t columns) {
    const std::uint32_t s_first = rows * kTile + 1, s_last = std::min(s_first + kTile - 1, terms_.count);
    const std::uint32_t t_first = columns * kTile + 1, t_last = std::min(t_first + kTile - 1, terms_.count);
    const auto each_piece = [&](const auto& visit) {
      for (std::uint32_t t = t_first; t <= t_last; ++t) {
        for (std::uint32_t s = std::min(s_last, t); s >= s_first; --s) {
          each_start(s, [&](Start from) { visit(from, t); });
        }
      }
    };
    each_piece([&](Start from, std::uint32_t t) {
      Piece& of = piece(from, t);
      std::fill(of.costs, of.costs + of.whole, std::numeric_limits<double>::max());
      std::fill(of.costs + of.whole, of.costs + slots_ + 1, of.whole_seconds);
      if (rows < columns) {
        for (std::uint32_t q = from.s + 1; q <= s_last; ++q)
          of.sweep_bytes = std::max(of.sweep_bytes, terms_.sweep_bytes(from.s, t, q - 1));
      }
    });
    // Inputs of stages between this square's first and its last ones: all pieces that are read are ready.
    for (std::uint32_t q = s_last + 1; q <= t_first && rows < columns; q += kLowerTerms) {
      const std::uint32_t end = std::min<std::uint32_t>(q + kLowerTerms, t_first + 1);
      each_piece([&](Start from, std::uint32_t t) { keep_inputs(from, t, q, end); });
    }
    each_piece([&](Start from, std::uint32_t t) {
      if (from.s == t) return;
      keep_tape(from, t);
      if (rows == columns) {
        keep_inputs(from, t, from.s + 1, t + 1);
        return;
      }
      keep_inputs(from, t, t_first + 1, t + 1);
      piece(from, t).sweep_bytes = 0;
      keep_inputs(from, t, from.s + 1, s_last + 1);
    });
  }

  void keep_tape(Start from, std::uint32_t t) {
    Piece& of = piece(from, t);
    const Piece& rest = piece(behind(from.s), t);
    const Slots first = first_if_taped(from, t, rest.first);
    if (first >= of.whole) return;
    of.first = std::min(of.first, first);
    const double seconds = taped_seconds(from.s);
    for (Slots m = first; m < of.whole; ++m)
      of.costs[m] = std::min(of.costs[m], seconds + rest.costs[left_if_taped(from, m)]);
  }

  // Forward to q - 1, whose output is kept, of so many q. For each piece in the order of q.
  void keep_inputs(Start from, std::uint32_t t, std::uint32_t q, std::uint32_t end) {
    static_assert(kLowerTerms == kTile, "at most so many");
    Piece& of = piece(from, t);
    std::array<std::uint32_t, kLowerTerms> some{};
    std::array<Slots, kLowerTerms> firsts{};
    std::size_t count = 0;
    Slots common = 0;
    for (; q < end; ++q) {
      of.sweep_bytes = std::max(of.sweep_bytes, terms_.sweep_bytes(from.s, t, q - 1));
      const Slots first = first_if_kept(from, t, q, of.sweep_bytes);
      if (first >= of.whole) continue;
      of.first = std::min(of.first, first);
      common = std::max(common, first);
      some[count] = q;
      firsts[count++] = first;
    }
    std::array<LowerTerm, kLowerTerms> terms{};
    const auto term = [&](std::uint32_t of_q, Slots m) {
      return LowerTerm{forward_seconds(from.s, of_q - 1),
                       piece(kept(of_q), t).costs + (m - output_[of_q - 1]), piece(from, of_q - 1).costs + m};
    };
    for (std::size_t i = 0; i < count; ++i) {
      terms[i] = term(some[i], firsts[i]);
      lower_(of.costs + firsts[i], common - firsts[i], &terms[i], 1);
      terms[i] = term(some[i], common);
    }
    if (count > 0) lower_(of.costs + common, of.whole - common, terms.data(), count);
  }

  // From how many slots on the input of q can be kept. `sweep`: bytes that the forward passes up to it need.
  Slots first_if_kept(Start from, std::uint32_t t, std::uint32_t q, std::uint64_t sweep) const {
    return capped(std::max<std::uint64_t>(
        {rounded(sweep), std::uint64_t{output_[q - 1]} + piece(kept(q), t).first, piece(from, q - 1).first}));
  }

  void write(ScheduleWriter& writer, Start from, std::uint32_t t, Slots m) const {
    const std::uint32_t s = from.s;
    if (s == t) {
      writer.turn(s);
      return;
    }
    const Piece& rest = piece(behind(s), t);
    std::uint32_t keep = 0;
    double least = std::numeric_limits<double>::max();
    if (m >= first_if_taped(from, t, rest.first)) {
      least = taped_seconds(s) + rest.costs[left_if_taped(from, m)];
    }
    std::uint64_t sweep = 0;
    for (std::uint32_t q = s + 1; q <= t; ++q) {
      sweep = std::max(sweep, terms_.sweep_bytes(s, t, q - 1));
      if (m < first_if_kept(from, t, q, sweep)) continue;
      const double cost = forward_seconds(s, q - 1) + piece(kept(q), t).costs[m - output_[q - 1]] +
                          piece(from, q - 1).costs[m];
      if (cost >= least) continue;
      least = cost;
      keep = q;
    }
    if (keep == 0) {
      writer.add(Kind::kTaped, s);
      write(writer, behind(s), t, left_if_taped(from, m));
      writer.drop_output(s);
      writer.add(Kind::kBackward, s);
      return;
    }
    writer.sweep(s, keep - 1);
    write(writer, kept(keep), t, m - output_[keep - 1]);
    writer.drop_output(keep - 1);
    write(writer, from, keep - 1, m);
  }

  const ChainTerms& terms_;
  const Lower lower_ = lower_with_avx2() != nullptr ? lower_with_avx2() : &lower_with;
  std::uint64_t slot_bytes_;
  Slots slots_;
  std::vector<Slots> output_, kept_;  ///< held; rounded up
  std::vector<Piece> pieces_;
  std::unique_ptr<double[]> costs_;
};

std::uint32_t threads_for(const ChainTerms& terms, const ChainSolverOptions& options) {
  if (terms.count < 32) return 1;
  return options.threads != 0 ? options.threads : std::max(1U, std::thread::hardware_concurrency());
}

}  // namespace

std::optional<Schedule> dynamic_schedule(const ChainProfile& profile, std::uint64_t budget_bytes,
                                         const ChainSolverOptions& options) {
  const ChainTerms terms(profile);
  const std::uint64_t slot_bytes = std::max<std::uint64_t>(1, budget_bytes / options.slots);
  const auto budget_slots = static_cast<Slots>(budget_bytes / slot_bytes);
  // What fits by rounded sizes fits with less: something that does not, by a little, may fit to the byte.
  const Slots slots = slot_bytes == 1 ? budget_slots : budget_slots + budget_slots / 16;
  Table table(terms, slot_bytes, slots);
  table.solve(threads_for(terms, options));
  for (Slots m = slots; m >= table.least() && m > 0; --m) {
    Schedule schedule = table.schedule(m);
    if (m <= budget_slots || simulate(profile, schedule).peak_bytes <= budget_bytes) return schedule;
  }
  return std::nullopt;
}

std::vector<Schedule> dynamic_schedules(const ChainProfile& profile, const ChainSolverOptions& options,
                                        std::size_t most) {
  const ChainTerms terms(profile);
  const std::uint64_t most_bytes = natural_peak_bytes(profile);
  const std::uint64_t slot_bytes = std::max<std::uint64_t>(1, most_bytes / options.slots);
  const auto slots = static_cast<Slots>(most_bytes / slot_bytes);
  Table table(terms, slot_bytes, slots);
  table.solve(threads_for(terms, options));
  std::vector<Slots> steps;
  for (Slots m = table.least(); m <= slots; ++m) {
    if (steps.empty() || table.seconds(m) < table.seconds(steps.back())) steps.push_back(m);
  }
  std::vector<Schedule> schedules;
  const std::size_t count = std::min(most, steps.size());
  for (std::size_t i = 0; i < count; ++i)
    schedules.push_back(table.schedule(steps[i * steps.size() / count]));
  return schedules;
}

}  // namespace reef
