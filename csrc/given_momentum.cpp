#include "given_momentum.h"

#include <ATen/ops/empty_like.h>
#include <torch/library.h>

#include <string>

#include "reef/error.h"
#include "tier/hash.h"
#include "typed_operator.h"

namespace reef {
namespace {

// An operator, so that whoever watches operators (a budget) sees that it reads.
std::int64_t hash_of_gradient(const at::Tensor& dense) {
  return static_cast<std::int64_t>(hash_bytes(dense.const_data_ptr(), dense.nbytes()));
}

std::uint64_t hash_of(const at::Tensor& gradient) {
  static const auto op = typed_operator<decltype(hash_of_gradient)>("reef::hash_of_gradient");
  return static_cast<std::uint64_t>(op.call(gradient));
}

}  // namespace

void GivenMomentum::note(const at::Tensor& parameter) {
  noted_[parameter.unsafeGetTensorImpl()] = hash_of(parameter.grad());
}

bool GivenMomentum::has_noted(const at::Tensor& parameter, const at::Tensor& gradient) const {
  const auto found = noted_.find(parameter.unsafeGetTensorImpl());
  if (found == noted_.end() || gradient.scalar_type() != parameter.scalar_type()) return false;
  if (gradient.strides() == parameter.strides()) return found->second == hash_of(gradient);
  return found->second == hash_of(at::empty_like(parameter, gradient.options()).copy_(gradient));
}

void GivenMomentum::go_on_from(const GivenMomentum& before, const std::vector<at::Tensor>& parameters) {
  is_given = before.is_given.load();
  has_optimizer = before.has_optimizer.load();
  for (const at::Tensor& parameter : parameters) {
    if (const auto found = before.noted_.find(parameter.unsafeGetTensorImpl()); found != before.noted_.end())
      noted_.insert(*found);
  }
}

std::shared_ptr<GivenMomentum> given_momentum_of(const at::Tensor& parameter) {
  return ParametersOfMomentum::find(parameter).value_or(nullptr);
}

void refuse_momentum(const char* who, const at::Tensor& parameter) {
  if (!given_momentum_of(parameter)) return;
  throw ConfigError(std::string(who) +
                    ": gradients are exchanged by compression one_bit_adam, and the momentum that ranks "
                    "remember would be of others: leave it out, or shard with another compression.");
}

}  // namespace reef

TORCH_LIBRARY_FRAGMENT(reef, m) { m.def("hash_of_gradient(Tensor dense) -> int"); }

TORCH_LIBRARY_IMPL(reef, CPU, m) { m.impl("hash_of_gradient", &reef::hash_of_gradient); }
