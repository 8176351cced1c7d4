#pragma once

#include "observer/observer.h"

namespace reef {

/// While at least one Observation lives, every thread's operators are observed: blocks are born with the
/// category and operator of their circumstances (birth.h), gradients are marked as autograd accumulates them,
/// and a parameter that an optimizer writes is announced (parameter_written in watch.h).
class Observation {
 public:
  Observation();
  ~Observation();
  Observation(const Observation&) = delete;
  Observation& operator=(const Observation&) = delete;

 private:
  OperatorObservation operators_;
};

}  // namespace reef
