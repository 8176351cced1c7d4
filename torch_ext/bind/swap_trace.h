#pragma once

#include <torch/custom_class.h>
#include <torch/library.h>

#include <utility>

#include "reef/trace.h"

namespace reef::bind {

/// What Python's reef.Trace holds.
struct SwapTrace : torch::CustomClassHolder {
  SwapTrace() = default;
  explicit SwapTrace(Trace given) : trace(std::move(given)) {}
  Trace trace;
};

/// Called by whoever registers a method that gives a trace, before it does: files of a library are
/// initialized in no order.
void register_swap(torch::Library& m);

}  // namespace reef::bind
