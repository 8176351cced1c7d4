#include <ATen/core/grad_mode.h>
#include <torch/nn/modules/container/sequential.h>

#include <map>
#include <memory>
#include <mutex>
#include <string>
#include <torch/csrc/distributed/c10d/ProcessGroup.hpp>
#include <tuple>
#include <vector>

#include "reef/chain.h"

namespace reef {
namespace {

/// First layer, the group, and what is asked for besides the budget.
using Key = std::tuple<const void*, const void*, ChainSolver, std::uint32_t, bool, bool, std::string,
                       const void*, double, double>;

struct Entry {
  std::weak_ptr<torch::nn::Module> first;
  std::shared_ptr<PlannedChain> chain;
};

std::string names_of(const std::vector<c10::Device>& devices) {
  std::string text;
  for (const c10::Device device : devices) text += device.str() + " ";
  return text;
}

std::shared_ptr<PlannedChain> chain_of(const torch::nn::Sequential& modules, const ProcessGroupPtr& group,
                                       const PlannedChainOptions& options) {
  static auto* const mutex = new std::mutex;
  static auto* const all = new std::map<Key, Entry>;
  const std::lock_guard lock(*mutex);
  std::erase_if(*all, [](const auto& entry) { return entry.second.first.expired(); });
  const std::shared_ptr<torch::nn::Module> first =
      modules->is_empty() ? modules.ptr() : modules->begin()->ptr();  // another Sequential may have them, too
  Entry& entry =
      (*all)[{first.get(), group.get(), options.solver.solver, options.solver.slots,
              options.checkpoint.check_values, options.price_sizes, names_of(options.checkpoint.devices),
              options.tier.get(), options.tier_speed.bytes_per_second, options.tier_speed.work_share}];
  // Without stages, which are those that there are at each call.
  if (!entry.chain) entry = {first, std::make_shared<PlannedChain>(Chain(), group, options)};
  return entry.chain;
}

}  // namespace

at::Tensor checkpoint_sequential(const torch::nn::Sequential& modules, const at::Tensor& input,
                                 std::int64_t budget_bytes, const PlannedChainOptions& options) {
  return checkpoint_sequential(modules, input, budget_bytes, ProcessGroupPtr(), options);
}

at::Tensor checkpoint_sequential(const torch::nn::Sequential& modules, const at::Tensor& input,
                                 std::int64_t budget_bytes, const ProcessGroupPtr& group,
                                 const PlannedChainOptions& options) {
  return (*chain_of(modules, group, options))(Chain(modules), input, budget_bytes);
}

ChainPlan plan_of(const torch::nn::Sequential& modules, const at::Tensor& input, std::int64_t budget_bytes,
                  const PlannedChainOptions& options) {
  return plan_of(modules, input, budget_bytes, ProcessGroupPtr(), options);
}

ChainPlan plan_of(const torch::nn::Sequential& modules, const at::Tensor& input, std::int64_t budget_bytes,
                  const ProcessGroupPtr& group, const PlannedChainOptions& options) {
  return chain_of(modules, group, options)->plan(Chain(modules), input, budget_bytes);
}

}  // namespace reef
