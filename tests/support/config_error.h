#pragma once

#include <string>

#include "reef/error.h"

namespace reef::test {

/// What the ConfigError says that `call` throws; "" if it throws nothing.
template <class Call>
std::string config_error(const Call& call) {
  try {
    call();
  } catch (const ConfigError& error) {
    return message_of(error);
  }
  return "";
}

}  // namespace reef::test
