// Declarations that let <torch/csrc/distributed/c10d/ProcessGroupGloo.hpp> parse, for gloo.cpp alone.
//
// torch's wheel holds the compiled gloo but none of its headers, and a distribution's gloo is of another
// version, with other virtual functions: taking those headers would compile and then call the wrong one. No
// object of a gloo type is created, copied or called on our side. Pointers to them pass through, and
// ProcessGroupGloo, whose size does not depend on them, is built by the library's own constructor. So names
// are all that is needed.
#pragma once

#include <chrono>

#include "gloo/transport/device.h"

namespace gloo {

class Context {
 public:
  void setTimeout(std::chrono::milliseconds timeout);
};

}  // namespace gloo
