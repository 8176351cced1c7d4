#pragma once

#include "observer/observer.h"

namespace reef {

class Pager;

/// While one lives, operators on any thread bring the pager's pages in. Counted: several may live.
class PageObservation {
 public:
  explicit PageObservation(Pager& pager);

 private:
  OperatorObservation operators_;
};

}  // namespace reef
