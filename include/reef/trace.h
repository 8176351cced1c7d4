#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "reef/export.h"

namespace reef {

/// Pure data (no Torch): what one training step did with its pages. A page is the memory behind one storage;
/// pages are numbered from 0 in the order in which the step met them. The step repeats: what follows its last
/// operator is its first.

struct TracePage {
  std::uint64_t bytes = 0;
  bool persistent =
      false;  ///< alive from step to step (a parameter); otherwise made and freed within the step
};

struct TraceAccess {
  std::uint32_t page = 0;
  bool writes = false;  ///< a copy made before is of no use after it
};

/// One outermost operator. All its pages must be in memory together while it runs.
struct TraceOperator {
  std::string name;
  double seconds = 0;
  std::uint64_t scratch_bytes = 0;    ///< allocated and freed while it ran, on top of its pages
  std::vector<TraceAccess> accesses;  ///< each page at most once
  std::vector<std::uint32_t> frees;   ///< pages that die when it has run
};

struct Trace {
  std::vector<TracePage> pages;
  std::vector<TraceOperator> operators;
};

/// Throws ConfigError, naming the operator, if a page does not exist, is named twice by one operator, is used
/// after it was freed or freed twice; if a page that does not persist is read before it is written or is
/// never freed; if one that persists is freed.
REEF_API void check(const Trace& trace);

/// Bytes that operator `op` needs in memory at once: its pages and its scratch.
REEF_API std::uint64_t working_set_bytes(const Trace& trace, std::size_t op);

/// The largest working set: no smaller budget lets the step run.
REEF_API std::uint64_t minimum_bytes(const Trace& trace);

/// Bytes alive while operator i runs when nothing ever leaves memory, scratch included.
REEF_API std::vector<std::uint64_t> natural_load_bytes(const Trace& trace);

/// The largest of these: with this budget nothing moves.
REEF_API std::uint64_t natural_peak_bytes(const Trace& trace);

/// For each operator and each of its accesses, the operator that uses the page next, counted on into the
/// following step (operators.size() + i is operator i of the next step); kNeverUsed if the page dies first.
inline constexpr std::uint64_t kNeverUsed = ~std::uint64_t{0};
REEF_API std::vector<std::vector<std::uint64_t>> next_uses(const Trace& trace);

}  // namespace reef
