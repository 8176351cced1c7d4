#pragma once

namespace reef {

/// While one lives, operators on any thread bring their pages in (see Pager). Counted: several may live.
class PageObservation {
 public:
  PageObservation();
  ~PageObservation();
  PageObservation(const PageObservation&) = delete;
  PageObservation& operator=(const PageObservation&) = delete;
};

}  // namespace reef
