#pragma once

#include <exception>
#include <string>

namespace reef::test {

/// What the exception says that `call` throws; "" if it throws nothing.
template <class Call>
std::string error_of(const Call& call) {
  try {
    call();
  } catch (const std::exception& error) {
    return error.what();
  }
  return "";
}

}  // namespace reef::test
