#include "reef/budget.h"

#include <torch/nn/module.h>

#include <algorithm>
#include <limits>
#include <mutex>
#include <optional>
#include <sstream>

#include "available_memory.h"
#include "ledger/counting_allocator.h"
#include "ledger/cuda.h"
#include "ledger/vector_math.h"
#include "ledger/watch.h"
#include "page/observe_pages.h"
#include "page/pager.h"
#include "reef/bytes.h"
#include "reef/error.h"
#include "reef/swap.h"

namespace reef {

struct Budget::State {
  Pager* pager = nullptr;
  std::uint64_t number = 0;  ///< among the pager's
  bool restore = true;
  std::vector<std::shared_ptr<Tier>> tiers;                  ///< while it is in force
  std::vector<std::pair<std::string, TierUse>> uses_at_end;  ///< of the tiers
  std::mutex mutex;
  std::optional<Ledger> ledger;  ///< only where asked for: it observes every operator
  std::unique_ptr<PageObservation> observation;
};

namespace {

struct Named {
  at::Tensor tensor;
  std::string name;
};

std::vector<Named> named(const std::vector<const torch::nn::Module*>& modules) {
  std::vector<Named> all;
  for (const torch::nn::Module* module : modules) {
    for (const auto& parameter : module->named_parameters())
      all.push_back({parameter.value(), parameter.key()});
    for (const auto& buffer : module->named_buffers()) all.push_back({buffer.value(), buffer.key()});
  }
  return all;
}

std::vector<at::Tensor> tensors_of(const std::vector<const torch::nn::Module*>& modules) {
  std::vector<at::Tensor> tensors;
  for (const Named& one : named(modules)) tensors.push_back(one.tensor);
  return tensors;
}

BudgetOptions with_names(BudgetOptions options, const std::vector<const torch::nn::Module*>& modules) {
  if (!options.names.empty()) return options;
  for (const Named& one : named(modules)) options.names.push_back(one.name);
  return options;
}

std::vector<std::shared_ptr<Tier>> tiers_of(BudgetOptions& options) {
  if (options.tiers.empty()) {
    constexpr auto kUnlimited = std::numeric_limits<std::int64_t>::max();
    // The system cannot take page-locked memory from a process that has too much of it.
    if (!options.device.is_cpu()) options.tiers.push_back(pinned_tier(available_memory_bytes() / 2));
    options.tiers.push_back(host_tier(kUnlimited));
  }
  return std::move(options.tiers);
}

std::vector<std::pair<std::string, TierUse>> uses_of(const std::vector<std::shared_ptr<Tier>>& tiers) {
  std::vector<std::pair<std::string, TierUse>> uses;
  for (const auto& tier : tiers) uses.emplace_back(tier->name(), tier->use());
  return uses;
}

}  // namespace

Budget::Budget(std::uint64_t bytes, const std::vector<const torch::nn::Module*>& modules,
               BudgetOptions options)
    : Budget(bytes, tensors_of(modules), with_names(std::move(options), modules)) {}

Budget::Budget(std::uint64_t bytes, at::TensorList tensors, BudgetOptions options)
    : state_(std::make_unique<State>()) {
  settle_vector_math();
  install_counting_allocator();
  if (!options.device.is_cpu()) install_cuda_tracker();
  for (const at::Tensor& tensor : tensors) mark_tensor(tensor, Category::kParameter);
  Pager& pager = Pager::of(options.device);
  state_->pager = &pager;
  const bool prefetch = options.prefetch;
  state_->restore = options.restore;
  state_->tiers = tiers_of(options);
  state_->number = pager.start({.budget_bytes = std::numeric_limits<std::int64_t>::max(),
                                .expected_bytes = bytes,
                                .tiers = state_->tiers,
                                .prefetch = prefetch,
                                .addresses = options.addresses,
                                .strict = options.strict,
                                .wait_while_full = options.wait_while_full});
  try {
    for (std::size_t i = 0; i < tensors.size(); ++i) {
      const std::string name = i < options.names.size() ? options.names[i] : std::string();
      pager.adopt(tensors[i], name);
      if (tensors[i].requires_grad() && tensors[i].is_leaf())
        pager.adopt(tensors[i].grad(), name.empty() ? name : name + ".grad");
    }
    pager.set_budget_bytes(bytes);
  } catch (...) {
    pager.stop(state_->number);
    throw;
  }
  reset_use();
  state_->observation = std::make_unique<PageObservation>(pager);
}

Budget::~Budget() {
  try {
    end();
  } catch (const std::exception&) {
    state_->observation.reset();
    state_->pager->abandon(state_->number);  // whoever accesses a page that could not be read is told
  }
}

void Budget::end() {
  if (!state_->observation) return;
  state_->restore ? state_->pager->stop(state_->number) : state_->pager->abandon(state_->number);
  state_->observation.reset();
  state_->uses_at_end = uses_of(state_->tiers);
  state_->tiers.clear();  // nobody else may have them: then their memory is free
}

void Budget::set_bytes(std::uint64_t bytes) {
  state_->pager->check_in_force(state_->number);
  state_->pager->set_budget_bytes(bytes);
}

// ---- whole tensors

struct WholeTensors::State {
  explicit State(Pager& of) : pager(of) {}
  ~State() {
    for (const at::Tensor& tensor : pinned) pager.unpin(tensor);
    pager.disallow(bytes);
  }
  State(const State&) = delete;
  State& operator=(const State&) = delete;

  Pager& pager;
  std::uint64_t bytes = 0;
  std::vector<at::Tensor> pinned;
};

WholeTensors::WholeTensors(std::unique_ptr<State> state) : state_(std::move(state)) {}
WholeTensors::WholeTensors(WholeTensors&&) noexcept = default;
WholeTensors::~WholeTensors() = default;
std::uint64_t WholeTensors::bytes() const { return state_->bytes; }

WholeTensors Budget::whole(at::TensorList tensors) {
  auto whole = std::make_unique<WholeTensors::State>(*state_->pager);
  for (const at::Tensor& tensor : tensors) {
    if (!tensor.defined() || !tensor.has_storage() || tensor.device() != state_->pager->device()) continue;
    const std::uint64_t bytes = state_->pager->evictable_bytes(tensor);
    state_->pager->allow(bytes);
    whole->bytes += bytes;
    state_->pager->pin(tensor);
    whole->pinned.push_back(tensor);
  }
  return WholeTensors(std::move(whole));
}

WholeTensors Budget::whole(const std::vector<const torch::nn::Module*>& modules,
                           const std::vector<torch::optim::Optimizer*>& optimizers) {
  std::vector<at::Tensor> tensors = tensors_of(modules);
  for (torch::optim::Optimizer* optimizer : optimizers) {
    for (const at::Tensor& state : state_tensors(*optimizer)) tensors.push_back(state);
  }
  return whole(tensors);
}

BudgetUse Budget::use() const {
  const PagerCounts counts = state_->pager->counts();
  return {.budget_bytes = state_->pager->budget_bytes(),
          .live_bytes = state_->pager->memory().alive_bytes(),
          .peak_bytes = state_->pager->peak_bytes(),
          .minimum_bytes = counts.minimum_bytes,
          .faults = counts.faults,
          .fetches = counts.fetches,
          .evictions = counts.evictions,
          .clean_evictions = counts.clean_evictions,
          .unseen_writes = counts.unseen_writes,
          .bytes_in = counts.bytes_in,
          .bytes_out = counts.bytes_out,
          .unannounced = counts.unannounced,
          .oversized = counts.oversized,
          .waited_seconds = counts.waited_seconds,
          .unannounced_seconds = counts.unannounced_seconds};
}

void Budget::reset_use() {
  state_->pager->reset_counts();
  state_->pager->reset_peak();
}

Ledger& Budget::ledger() {
  const std::lock_guard lock(state_->mutex);
  if (!state_->ledger) state_->ledger.emplace();
  return *state_->ledger;
}

std::string Budget::addresses() const { return state_->pager->addresses(); }

Trace Budget::trace() const { return state_->pager->trace(); }

std::vector<BudgetOutlook> Budget::outlook() const {
  const Trace trace = this->trace();
  if (trace.operators.empty()) return {};
  constexpr std::size_t kMostBudgets = 6;  // beside the one in which nothing moves
  const SwapSpeeds speeds = state_->pager->speeds();
  const std::uint64_t fixed_bytes = state_->pager->fixed_bytes();
  const std::uint64_t least_bytes = minimum_bytes(trace) + fixed_bytes;
  const std::uint64_t natural_bytes = natural_peak_bytes(trace) + fixed_bytes;
  const std::uint64_t now_bytes = state_->pager->budget_bytes();
  std::vector<std::uint64_t> budgets;
  for (std::uint64_t bytes = now_bytes; bytes < natural_bytes && budgets.size() < kMostBudgets;
       bytes += std::max<std::uint64_t>(now_bytes / 4, 1)) {
    budgets.push_back(bytes);
  }
  budgets.push_back(std::max(natural_bytes, now_bytes));
  std::vector<BudgetOutlook> all;
  for (const std::uint64_t bytes : budgets) {
    if (bytes < least_bytes) continue;
    const SwapPlan plan = plan_swaps(trace, bytes - fixed_bytes, SwapPolicy::kFarthest, speeds);
    const SwapCost cost = simulate(trace, plan, bytes - fixed_bytes, speeds);
    all.push_back({bytes, cost.seconds, cost.stalled_seconds, cost.bytes_in + cost.bytes_out});
  }
  return all;
}

std::string Budget::report(bool with_outlook) const {
  const BudgetUse now = use();
  std::ostringstream text;
  const auto line = [&](const std::string& what, const std::string& value) {
    text << what << std::string(28 - std::min<std::size_t>(what.size(), 27), ' ') << value << '\n';
  };
  const auto bytes = [](std::uint64_t count) { return format_bytes(static_cast<std::int64_t>(count)); };
  const auto seconds = [](double count) {
    std::ostringstream number;
    number.precision(3);
    number << std::fixed << count << " s";
    return number.str();
  };
  line("budget", bytes(now.budget_bytes));
  line("peak", bytes(now.peak_bytes));
  line("least that would do", bytes(now.minimum_bytes));
  line("pages brought back", std::to_string(now.faults + now.fetches) + ", " + std::to_string(now.fetches) +
                                 " of them ahead, " + bytes(now.bytes_in));
  line("pages that left", std::to_string(now.evictions) + ", " + std::to_string(now.clean_evictions) +
                              " of them clean, " + bytes(now.bytes_out) + " written");
  line("waited", seconds(now.waited_seconds));
  line("addresses", addresses());
  if (now.unannounced > 0) {
    line("touched while away", std::to_string(now.unannounced) + " pages, back after " +
                                   seconds(now.unannounced_seconds) + " in all");
  }
  if (now.oversized > 0) {
    line("beyond the budget", std::to_string(now.oversized) +
                                  " operators, whose pages left and came while they ran; with " +
                                  bytes(now.minimum_bytes) + " none would");
  }
  for (const auto& [name, held] : state_->tiers.empty() ? state_->uses_at_end : uses_of(state_->tiers)) {
    line("in tier " + name, bytes(held.used_bytes) + ", at most " + bytes(held.peak_bytes) + "; " +
                                bytes(held.written_bytes) + " written, " + bytes(held.read_bytes) + " read");
  }
  if (!with_outlook) return text.str();
  for (const BudgetOutlook& step : outlook()) {
    line("a step within " + bytes(step.budget_bytes), seconds(step.seconds) + ", " +
                                                          seconds(step.waited_seconds) + " of it waiting, " +
                                                          bytes(step.moved_bytes) + " moved");
  }
  return text.str();
}

void pin(const at::Tensor& tensor) { Pager::of(tensor.device()).pin(tensor); }
void unpin(const at::Tensor& tensor) { Pager::of(tensor.device()).unpin(tensor); }

}  // namespace reef
