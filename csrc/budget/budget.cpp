#include "reef/budget.h"

#include <torch/nn/module.h>

#include <limits>
#include <mutex>
#include <optional>
#include <sstream>

#include "ledger/counting_allocator.h"
#include "page/observe_pages.h"
#include "page/pager.h"
#include "reef/bytes.h"
#include "reef/error.h"

namespace reef {

struct Budget::State {
  Pager* pager = nullptr;
  bool restore = true;
  std::mutex mutex;
  std::optional<Ledger> ledger;  ///< only where asked for: it observes every operator
  std::unique_ptr<PageObservation> observation;
};

namespace {

std::vector<at::Tensor> tensors_of(const std::vector<const torch::nn::Module*>& modules) {
  std::vector<at::Tensor> tensors;
  for (const torch::nn::Module* module : modules) {
    for (const at::Tensor& parameter : module->parameters()) tensors.push_back(parameter);
    for (const at::Tensor& buffer : module->buffers()) tensors.push_back(buffer);
  }
  return tensors;
}

std::vector<std::shared_ptr<Tier>> tiers_of(BudgetOptions& options) {
  if (options.tiers.empty()) {
    constexpr auto kUnlimited = std::numeric_limits<std::int64_t>::max();
    options.tiers.push_back(options.device.is_cpu() ? host_tier(kUnlimited) : pinned_tier(kUnlimited));
  }
  return std::move(options.tiers);
}

}  // namespace

Budget::Budget(std::uint64_t bytes, const std::vector<const torch::nn::Module*>& modules,
               BudgetOptions options)
    : Budget(bytes, tensors_of(modules), std::move(options)) {}

Budget::Budget(std::uint64_t bytes, at::TensorList tensors, BudgetOptions options)
    : state_(std::make_unique<State>()) {
  Ledger().watch(tensors);  // their category is the process's, and stays
  Pager& pager = Pager::of(options.device);
  state_->pager = &pager;
  const bool prefetch = options.prefetch;
  state_->restore = options.restore;
  pager.start({.budget_bytes = std::numeric_limits<std::int64_t>::max(),
               .tiers = tiers_of(options),
               .prefetch = prefetch});
  try {
    for (const at::Tensor& tensor : tensors) {
      pager.adopt(tensor);
      if (tensor.requires_grad()) pager.adopt(tensor.grad());
    }
    pager.set_budget_bytes(bytes);
  } catch (...) {
    pager.stop();
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
    state_->pager->abandon();  // whoever accesses a page that could not be read is told
  }
}

void Budget::end() {
  if (!state_->observation) return;
  state_->restore ? state_->pager->stop() : state_->pager->abandon();
  state_->observation.reset();
}

void Budget::set_bytes(std::uint64_t bytes) { state_->pager->set_budget_bytes(bytes); }

BudgetUse Budget::use() const {
  const PagerCounts counts = state_->pager->counts();
  return {.budget_bytes = state_->pager->budget_bytes(),
          .live_bytes = state_->pager->memory().alive_bytes(),
          .peak_bytes = state_->pager->memory().peak_bytes(),
          .minimum_bytes = counts.minimum_bytes,
          .faults = counts.faults,
          .fetches = counts.fetches,
          .evictions = counts.evictions,
          .clean_evictions = counts.clean_evictions,
          .unseen_writes = counts.unseen_writes,
          .bytes_in = counts.bytes_in,
          .bytes_out = counts.bytes_out,
          .waited_seconds = counts.waited_seconds};
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

std::string Budget::report() const {
  const BudgetUse now = use();
  std::ostringstream text;
  const auto line = [&](const char* what, const std::string& value) {
    text << what << std::string(28 - std::string_view(what).size(), ' ') << value << '\n';
  };
  line("budget", format_bytes(static_cast<std::int64_t>(now.budget_bytes)));
  line("peak", format_bytes(static_cast<std::int64_t>(now.peak_bytes)));
  line("least that would do", format_bytes(static_cast<std::int64_t>(now.minimum_bytes)));
  line("pages brought back", std::to_string(now.faults + now.fetches) + ", " + std::to_string(now.fetches) +
                                 " of them ahead, " + format_bytes(static_cast<std::int64_t>(now.bytes_in)));
  line("pages that left", std::to_string(now.evictions) + ", " + std::to_string(now.clean_evictions) +
                              " of them clean, " + format_bytes(static_cast<std::int64_t>(now.bytes_out)) +
                              " written");
  text.precision(3);
  text << std::fixed;
  text << "waited" << std::string(22, ' ') << now.waited_seconds << " s\n";
  return text.str();
}

void pin(const at::Tensor& tensor) { Pager::of(tensor.device()).pin(tensor); }
void unpin(const at::Tensor& tensor) { Pager::of(tensor.device()).unpin(tensor); }

}  // namespace reef
