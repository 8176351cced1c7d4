#pragma once

#include <ATen/core/dispatch/Dispatcher.h>

namespace reef {

/// The operator of this name, as `Signature` calls it through the dispatcher.
template <class Signature>
auto typed_operator(const char* name) {
  return c10::Dispatcher::singleton().findSchemaOrThrow(name, "").typed<Signature>();
}

}  // namespace reef
