#pragma once

#include <c10/core/ScalarType.h>

#include <optional>

#include "reef/shard.h"

namespace reef {

/// In what a parameter is computed with, kept in parts, and its gradients are added up.
struct ParameterDtypes {
  at::ScalarType parameter;
  at::ScalarType part;
  at::ScalarType sum;

  /// Parts have values of their own, of which the parameter is made.
  bool has_masters() const { return part != parameter; }
};

/// Of a parameter of this dtype, before the shard and after it.
inline ParameterDtypes dtypes_of(at::ScalarType given, const std::optional<MixedPrecision>& mixed) {
  if (!mixed) return {given, given, given};
  const at::ScalarType parameter = given == at::kFloat ? mixed->parameters : given;
  if (parameter != at::kBFloat16 && parameter != at::kHalf) return {given, given, given};
  return {parameter, at::kFloat, mixed->sums == at::kFloat ? at::kFloat : parameter};
}

/// Parts are tensors of their own; else they are the module's parameters.
inline bool has_parts(const ShardOptions& options) {
  return options.stage != Stage::kReplicate || options.mixed_precision || options.offload;
}

}  // namespace reef
