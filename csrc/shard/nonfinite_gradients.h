#pragma once

#include <ATen/core/Tensor.h>
#include <c10/util/ArrayRef.h>

#include <cstdint>
#include <functional>
#include <string>
#include <vector>

#include "reef/nonfinite_gradients.h"
#include "shard/gradient_exchange.h"

namespace reef {

/// Looks for elements of a pass's gradients that are not finite: in each bucket before it is exchanged by a
/// method that would spread or hide them, and in what has come of it, which may have overflowed on the way.
/// Buckets may be exchanged on several lanes at a time; what has been found is asked for when they are done.
///
/// A pass in which a rank has found something is void for all ranks. What its exchanges have remembered is to
/// be forgotten (end_step(false)), since an optimizer will not use what has arrived; so that none can use a
/// part of it, all of its gradients become NaN.
class NonFiniteSearch {
 public:
  explicit NonFiniteSearch(std::size_t buckets) : found_(buckets) {}

  /// bucket.places must live as long as this.
  void exchange(GradientExchange& by, const GradientBucket& bucket);
  /// Returns a number that is not zero if this rank has found something in the buckets of the pass. It is on
  /// their device, for which the host does not wait. Undefined if it is known already that there is nothing.
  at::Tensor found() const;
  /// Returns the same to the host, which waits for the device.
  bool any() const;
  /// Who has found what, in the order of the module, whose parameters are the items of the layout from the
  /// last on. All ranks call it alike, if one has found something. `largest` gives, for each element, the
  /// largest that a rank has.
  std::vector<NonFiniteElements> of_all_ranks(
      const std::vector<std::string>& names, const SliceExchange& ranks,
      const std::function<at::Tensor(const at::Tensor&)>& largest) const;

 private:
  /// What was found in one bucket: counts for each 256 elements, undefined where there is nothing.
  struct Found {
    c10::ArrayRef<FlatPlace> places;
    at::Tensor in_own;
    at::Tensor in_result;    ///< of this rank's slice
    std::int64_t first = 0;  ///< element of the bucket that is the first of the slice
  };
  std::vector<Found> found_;
};

}  // namespace reef
