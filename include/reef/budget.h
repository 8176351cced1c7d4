#pragma once

#include <c10/core/Device.h>

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <memory>
#include <string>
#include <vector>

#include "reef/addresses.h"
#include "reef/export.h"
#include "reef/ledger.h"
#include "reef/tier.h"
#include "reef/trace.h"

namespace torch::nn {
class Module;
}  // namespace torch::nn
namespace torch::optim {
class Optimizer;
}  // namespace torch::optim

namespace reef {

struct BudgetOptions {
  /// What the budget is for: the CPU or a CUDA device.
  c10::Device device = c10::kCPU;
  /// Where pages go, the first with room. Empty: host memory without a limit; of a CUDA device page-locked
  /// memory first, up to half of what the host has available when the budget begins.
  std::vector<std::shared_ptr<Tier>> tiers;
  /// Once a step is known, move pages beside the operators, before they are needed and as soon as they are
  /// not; false: only when an allocation or an operator demands it.
  bool prefetch = true;
  /// When it ends, bring every page back. False: those that are away stay so, and an access to one throws;
  /// for models that memory could not hold.
  bool restore = true;
  Addresses addresses = Addresses::kAutomatic;
  /// Where addresses stay: throw BudgetError if an operator's working set exceeds the budget, as happens in
  /// any case where they go; otherwise pages leave and come while the operator runs, which is slow.
  bool strict = false;
  /// Where addresses stay: code that touches what is away without an operator waits while no tier has room
  /// for what must leave (a full disk), and says so on standard error; false: the process ends, as it does
  /// whenever a page cannot be read.
  bool wait_while_full = false;
  /// What errors call the tensors that the budget is given, in their order; may be shorter, or empty.
  std::vector<std::string> names = {};
};

/// What a budget has done so far.
struct BudgetUse {
  std::uint64_t budget_bytes = 0;
  std::uint64_t live_bytes = 0;
  std::uint64_t peak_bytes = 0;  ///< largest number of bytes alive at once
  std::uint64_t minimum_bytes =
      0;                     ///< the largest working set met, with what cannot leave: the least that would do
  std::uint64_t faults = 0;  ///< pages that an operator had to wait for
  std::uint64_t fetches = 0;          ///< pages brought back ahead of their operator
  std::uint64_t evictions = 0;        ///< pages that left
  std::uint64_t clean_evictions = 0;  ///< of these, without being written: the tier still had them
  std::uint64_t unseen_writes = 0;    ///< pages found written although no operator had; nothing is lost
  std::uint64_t bytes_in = 0;
  std::uint64_t bytes_out = 0;
  std::uint64_t unannounced = 0;   ///< pages that were touched while away, where addresses stay
  std::uint64_t oversized = 0;     ///< operators whose working set exceeded the budget, and went on
  double waited_seconds = 0;       ///< spent on moving pages by the threads that needed them
  double unannounced_seconds = 0;  ///< until the pages that were touched while away were back, in all
};

/// What a step would cost with another budget, by simulation of the step that repeats, at the speeds
/// measured.
struct BudgetOutlook {
  std::uint64_t budget_bytes = 0;
  double seconds = 0;
  double waited_seconds = 0;      ///< of these, for pages
  std::uint64_t moved_bytes = 0;  ///< in and out
};

/// Tensors that are in memory, whatever the budget, while it lives: for whoever reads or writes them without
/// an operator (a file being written, a copy, numpy). The budget is larger by bytes() meanwhile.
class REEF_API WholeTensors {
 public:
  ~WholeTensors();
  WholeTensors(WholeTensors&&) noexcept;
  WholeTensors(const WholeTensors&) = delete;
  WholeTensors& operator=(const WholeTensors&) = delete;

  /// What it costs in memory: the tensors' pages. Those that were away have been read, one after another.
  std::uint64_t bytes() const;

 private:
  friend class Budget;
  struct State;
  explicit WholeTensors(std::unique_ptr<State> state);
  std::unique_ptr<State> state_;
};

/// While it lives, the bytes that LibTorch's allocator has handed out on the device stay within `bytes`, at
/// every allocation, and the program computes what it would have computed: bit for bit, since pages are only
/// moved.
///
/// Pages are parameters (leaves that require a gradient, from the first operator on), gradients, optimizer
/// states, and what recorded operators read and make, of 1 KiB or more. They leave when room is wanted, the
/// least recently used first, and come back before the operator that needs them. Never moved: storages that
/// did not come from LibTorch's allocator (from_blob, shared between processes) and those pinned. What a
/// collective of c10d works on stays until it is over.
///
/// Where addresses stay (addresses()), a page is a range of addresses, whatever is allocated in the budget is
/// of pages, and code that reads or writes through a pointer waits for what is away. Where they go, a page is
/// a storage; those that numpy() has been called on and those that no recorded operator touched are not moved
/// either, code that keeps raw pointers (data_ptr(), an accessor) over other operators must pin() the tensor,
/// and code that reads without operators asks for whole().
///
/// In a forked child the budget is over: pages come back when operators use them, and nothing is bounded.
///
/// If an operator's working set does not fit, and addresses go or BudgetOptions::strict is set, BudgetError
/// is thrown inside it, before it writes anything; where the operator allocates nothing it is a c10::Error
/// with the same text. Errors of a tier surface likewise. Training may go on after set_bytes().
///
/// One budget for a device at a time. Thread-safe.
class REEF_API Budget {
 public:
  /// Adopts the parameters and buffers of `modules`, so that they can leave from the start. Throws
  /// ConfigError, and BudgetError if what cannot leave already exceeds `bytes`.
  explicit Budget(std::uint64_t bytes, const std::vector<const torch::nn::Module*>& modules = {},
                  BudgetOptions options = {});
  /// The same with tensors.
  Budget(std::uint64_t bytes, at::TensorList tensors, BudgetOptions options = {});
  /// Brings every page back, as end() does; pages that could not be read stay away, and throw when accessed.
  ~Budget();
  Budget(const Budget&) = delete;
  Budget& operator=(const Budget&) = delete;

  /// Ends the budget: every page comes back. Throws what a tier threw (FileError); then the budget is still
  /// in force, without a limit, and end() may be tried again. Once it has ended, a call does nothing.
  void end();

  /// Throws BudgetError, and keeps the old one, if what cannot leave exceeds `bytes`. With more bytes than
  /// before, pages come back as far as they fit, the last used first; throws what a tier throws. Throws
  /// ConfigError in a forked child.
  void set_bytes(std::uint64_t bytes);

  /// Brings the tensors in, one after another, and keeps them until the result goes; what exceeds the budget
  /// leaves then. Throws what a tier throws.
  WholeTensors whole(at::TensorList tensors);
  /// Parameters and buffers of the modules, and what the optimizers keep for parameters.
  WholeTensors whole(const std::vector<const torch::nn::Module*>& modules,
                     const std::vector<torch::optim::Optimizer*>& optimizers = {});

  BudgetUse use() const;
  /// Now, with a quarter more, with half as much again, and so on up to the step's natural peak, in this
  /// order. Empty until a step has repeated. Costs some simulated steps (a fraction of a second).
  std::vector<BudgetOutlook> outlook() const;
  /// What the step that repeats does with its pages, for plan_swaps() and simulate(). Empty until a step has
  /// been learnt. What is alive beside pages is not in it.
  Trace trace() const;
  /// Says whether evicted tensors keep their addresses in this budget, in the words of addresses_here().
  std::string addresses() const;
  /// A text table of use(), of the tiers, and, if it is wanted, of the outlook, which costs some simulated
  /// steps.
  std::string report(bool with_outlook = true) const;
  /// Peaks, counts and the minimum begin anew.
  void reset_use();

  /// Made at the first call, and counting from then on: what is alive, as what, and when; watch() an
  /// optimizer to have its state told apart. Costs its share of every operator (docs/ledger.md).
  Ledger& ledger();

 private:
  struct State;
  std::unique_ptr<State> state_;
};

/// Keeps `tensor`'s page in memory until as many calls of unpin(), through the budgets that begin and end
/// meanwhile. Without effect on what is not a page.
REEF_API void pin(const at::Tensor& tensor);
REEF_API void unpin(const at::Tensor& tensor);

}  // namespace reef
