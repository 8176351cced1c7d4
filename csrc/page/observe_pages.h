#pragma once

#include "observer/observer.h"

namespace reef {

/// While one lives, operators on any thread bring their pages in (see Pager). Counted: several may live.
class PageObservation {
 public:
  PageObservation();

 private:
  OperatorObservation operators_;
};

}  // namespace reef
