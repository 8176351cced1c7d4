#pragma once

#include <torch/serialize.h>

#include <sstream>
#include <string>

#include "reef/shard.h"

namespace reef::shard_tests {

/// What torch::load() reads of what torch::save() has written of it.
template <class Value>
Value through_file(const Value& value) {
  std::stringstream file;
  torch::save(value, file);
  Value read;
  torch::load(read, file);
  return read;
}

/// The same by torch::pickle_save() and torch::pickle_load().
inline StateDict through_file(const StateDict& dict) {
  return c10::impl::toTypedDict<std::string, at::Tensor>(
      torch::pickle_load(torch::pickle_save(dict)).toGenericDict());
}

}  // namespace reef::shard_tests
