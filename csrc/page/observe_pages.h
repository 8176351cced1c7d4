#pragma once

#include "observer/observer.h"

namespace reef {

class Pager;

/// While an object of this class exists, operators on any thread bring the pager's pages in. There may be
/// several.
class PageObservation {
 public:
  explicit PageObservation(Pager& pager);

 private:
  OperatorObservation operators_;
};

}  // namespace reef
