#pragma once

#include "reef/optimizer_state.h"
#include "shard/state_over_ranks.h"

namespace reef {

/// Throws ConfigError if `given` is of another rule than an optimizer with the groups `own`, of which only
/// the options' keys are looked at: if options are missing or there besides by which rules differ; and, of a
/// class
/// (`rule`) of LibTorch's or reef::optim's, if what it has for a parameter is not what the class keeps, or of
/// another shape. What is missing is in the text. `given` has names, and as many groups.
void check_rule(const DividedParameters& all, const std::string& rule,
                const std::vector<OptimizerState::Group>& own, const OptimizerState& given);

/// The first difference between two ranks' groups, as text: empty, if there is none. `values`: of options,
/// too, and not only of their keys.
std::string difference(const std::vector<OptimizerState::Group>& first,
                       const std::vector<OptimizerState::Group>& other, bool values);

}  // namespace reef
