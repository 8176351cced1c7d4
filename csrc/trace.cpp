#include "reef/trace.h"

#include <algorithm>

#include "reef/error.h"

namespace reef {
namespace {

enum class Life : std::uint8_t { kUnborn, kAlive, kDead };

[[noreturn]] void refuse(const Trace& trace, std::size_t op, std::uint32_t page, const std::string& what) {
  throw ConfigError("Trace: page " + std::to_string(page) + " " + what + " operator " + std::to_string(op) +
                    " (" + trace.operators[op].name + "); record the trace anew");
}

void check_access(const Trace& trace, std::size_t op, const TraceAccess& access, std::vector<Life>& life) {
  const std::uint32_t page = access.page;
  if (page >= trace.pages.size()) refuse(trace, op, page, "does not exist, yet is used by");
  if (life[page] == Life::kDead) refuse(trace, op, page, "is dead when used by");
  if (life[page] == Life::kUnborn && !access.writes)
    refuse(trace, op, page, "is read before it is written, by");
  life[page] = Life::kAlive;
}

}  // namespace

void check(const Trace& trace) {
  std::vector<Life> life;
  for (const TracePage& page : trace.pages) life.push_back(page.persistent ? Life::kAlive : Life::kUnborn);
  std::vector<std::size_t> last_seen(trace.pages.size(), trace.operators.size());
  for (std::size_t op = 0; op < trace.operators.size(); ++op) {
    for (const TraceAccess& access : trace.operators[op].accesses) {
      check_access(trace, op, access, life);
      if (last_seen[access.page] == op) refuse(trace, op, access.page, "is named twice by");
      last_seen[access.page] = op;
    }
    for (const std::uint32_t page : trace.operators[op].frees) {
      if (page >= trace.pages.size()) refuse(trace, op, page, "does not exist, yet is freed after");
      if (trace.pages[page].persistent) refuse(trace, op, page, "persists, yet is freed after");
      if (life[page] != Life::kAlive) refuse(trace, op, page, "is not alive, yet is freed after");
      life[page] = Life::kDead;
    }
  }
  for (std::size_t page = 0; page < trace.pages.size(); ++page) {
    if (trace.pages[page].persistent || life[page] == Life::kDead) continue;
    throw ConfigError("Trace: page " + std::to_string(page) +
                      " does not persist, yet is not made and freed within the step; record the trace anew");
  }
}

std::uint64_t working_set_bytes(const Trace& trace, std::size_t op) {
  std::uint64_t bytes = trace.operators[op].scratch_bytes;
  for (const TraceAccess& access : trace.operators[op].accesses) bytes += trace.pages[access.page].bytes;
  return bytes;
}

std::uint64_t minimum_bytes(const Trace& trace) {
  std::uint64_t largest = 0;
  for (std::size_t op = 0; op < trace.operators.size(); ++op)
    largest = std::max(largest, working_set_bytes(trace, op));
  return largest;
}

std::vector<std::uint64_t> natural_load_bytes(const Trace& trace) {
  std::vector<bool> alive(trace.pages.size());
  std::uint64_t bytes = 0;
  for (std::size_t page = 0; page < trace.pages.size(); ++page) {
    alive[page] = trace.pages[page].persistent;
    if (alive[page]) bytes += trace.pages[page].bytes;
  }
  std::vector<std::uint64_t> load;
  for (const TraceOperator& op : trace.operators) {
    for (const TraceAccess& access : op.accesses) {
      if (!alive[access.page]) bytes += trace.pages[access.page].bytes;
      alive[access.page] = true;
    }
    load.push_back(bytes + op.scratch_bytes);
    for (const std::uint32_t page : op.frees) bytes -= trace.pages[page].bytes;
  }
  return load;
}

std::uint64_t natural_peak_bytes(const Trace& trace) {
  const std::vector<std::uint64_t> load = natural_load_bytes(trace);
  return load.empty() ? 0 : *std::max_element(load.begin(), load.end());
}

std::vector<std::vector<std::uint64_t>> next_uses(const Trace& trace) {
  const std::size_t count = trace.operators.size();
  std::vector<std::uint64_t> next(trace.pages.size(), kNeverUsed);
  // Backwards; the first round finds, for pages that persist, their first use in the following step.
  for (std::size_t op = count; op-- > 0;) {
    for (const TraceAccess& access : trace.operators[op].accesses) {
      if (trace.pages[access.page].persistent) next[access.page] = count + op;
    }
  }
  std::vector<std::vector<std::uint64_t>> uses(count);
  for (std::size_t op = count; op-- > 0;) {
    for (const TraceAccess& access : trace.operators[op].accesses) {
      uses[op].push_back(next[access.page]);
    }
    for (const TraceAccess& access : trace.operators[op].accesses) next[access.page] = op;
  }
  return uses;
}

}  // namespace reef
