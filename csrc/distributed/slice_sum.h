#pragma once

#include <ATen/core/Tensor.h>

#include <cstdint>

#include "distributed/slice_exchange.h"
#include "reef/collectives.h"

namespace reef {

/// Reduce-scatter and all-reduce over the slices of an exchange, added up in the order of ranks, ((0 + 1) +
/// 2) + ..., in the dtype itself, as an accumulation of gradients would; a mean is divided last. Called as
/// the exchange is.
class SliceSum {
 public:
  /// Which ranks' slices are added up: all, or those of a copy, which leaves what goes on between copies to
  /// others.
  enum class Over : std::uint8_t { kAll, kCopy };

  /// `ranks` outlives it.
  explicit SliceSum(SliceExchange& ranks) : ranks_(ranks) {}

  /// `own`, of a slice's elements, becomes the sum (or mean) of this rank's slice over these ranks. It may be
  /// that slice of `flat`, whose other slices are undefined afterwards. Sends and receives (D - 1) / D of
  /// `flat` in a copy among D ranks; over all, from the first copy to the last and back, what has been added
  /// up of a slice. Needs 2 MiB more at most, until forget(). Not by messages: sends a slice to each other
  /// rank, and needs the slices of these ranks twice, of one copy once.
  void reduce_scatter(const at::Tensor& flat, const at::Tensor& own, Over over, Reduction reduction);

  /// All of `flat` becomes that sum (or mean) over all ranks. Sends what a reduce-scatter and an all-gather
  /// would.
  void all_reduce(const at::Tensor& flat, Reduction reduction);

  /// Gives memory back that reduce_scatter() has kept.
  void forget() { received_.reset(); }

 private:
  using Works = SliceExchange::Works;
  const RanksAmong& ranks_of(Over over) const { return over == Over::kAll ? ranks_.all() : ranks_.copy(); }
  int most_received(Over over) const;
  template <class Done>
  void receive_and_add(const at::Tensor& flat, const at::Tensor& own, Over over, Reduction reduction,
                       const Done& done, Works& works);
  void add_and_spread(const at::Tensor& flat, const at::Tensor& own, Reduction reduction, Works& works);
  void add_all(const at::Tensor& flat, const at::Tensor& own, Over over, Reduction reduction);
  at::Tensor receive_buffer(std::int64_t elements, const at::TensorOptions& options);

  SliceExchange& ranks_;
  at::Tensor received_;  ///< by reduce_scatter() last
};

}  // namespace reef
