#include "given_momentum.h"

#include <string>
#include <unordered_map>
#include <utility>

#include "reef/error.h"
#include "table_at_fork.h"

namespace reef {
namespace {

using Table = std::unordered_map<const c10::TensorImpl*, std::shared_ptr<GivenMomentum>>;
TableAtFork<Table>& with_momentum() {
  static auto* const all = new TableAtFork<Table>;
  return *all;
}

}  // namespace

void ParametersOfMomentum::add(const at::Tensor& parameter, std::shared_ptr<GivenMomentum> momentum) {
  parameters_.push_back(parameter.unsafeGetTensorImpl());
  (*with_momentum().lock())[parameters_.back()] = std::move(momentum);
}

ParametersOfMomentum::~ParametersOfMomentum() {
  const auto all = with_momentum().lock();
  for (const c10::TensorImpl* const parameter : parameters_) all->erase(parameter);
}

std::shared_ptr<GivenMomentum> given_momentum_of(const at::Tensor& parameter) {
  const auto all = with_momentum().lock();
  const auto found = all->find(parameter.unsafeGetTensorImpl());
  return found == all->end() ? nullptr : found->second;
}

void refuse_momentum(const char* who, const at::Tensor& parameter) {
  if (!given_momentum_of(parameter)) return;
  throw ConfigError(std::string(who) +
                    ": gradients are exchanged by compression one_bit_adam, and the momentum that ranks "
                    "remember would be of others: leave it out, or shard with another compression.");
}

}  // namespace reef
