#pragma once

#include <vector>

#include "shard/lossy_exchange.h"

namespace reef {

/// PowerSGD (Vogels et al., 1905.13727, algorithms 1 and 2): of a matrix M (n x c, all but the first
/// dimension in one) the ranks exchange two factors of a low rank r. With Q from the step before, P = M Q is
/// added up over the ranks and made orthonormal, then M^T P, which is the next Q; the sum is P Q^T.
/// `alternating`: one of the two in a step, the left and the right in turn, which is an alternating least
/// squares fit as GradZip's (Cho et al. 2019), for half the bytes. What a rank's M has beyond the mean of all
/// is its `residual`, and added to its next one: the sum and all residuals are what all ranks had.
///
/// Vectors, and matrices for which (n + c) r is n c / 2 or more, are added up as they are. With copies
/// a copy's sum is gathered on all of its ranks, which send a part of the factors each. A bucket sends its
/// factors and what is added up as it is, 4 r (n + c) bytes (4 r n or 4 r c in turn), as an all-reduce: to
/// the C - 1 others 2 (C - 1) / C of it. All sums are in the order of ranks, and what all ranks compute of
/// them has the same bits on every machine.
///
/// Of float32 on the CPU; other buckets are added up as they are. A matrix that is not finite on a rank
/// arrives as NaN, and takes what was held back for it with it.
class PowerSgdExchange final : public LossyExchange {
 public:
  PowerSgdExchange(const ProcessGroupPtr& group, int number, int slices, const ShardOptions& options,
                   bool alternating);
  void exchange(const GradientBucket& bucket) override;

 private:
  static ExchangeMemory memory_of_factors(const ProcessGroupPtr& group, int slices,
                                          const ShardOptions& options);
  enum class Side : std::uint8_t { kLeft, kRight };
  /// A parameter in a bucket.
  struct Item {
    std::int64_t first;                 ///< element
    at::Tensor values;                  ///< as the parameter's, in the bucket
    at::Tensor rest;                    ///< what it holds back, likewise
    at::Tensor matrix, rest_of_matrix;  ///< n x c without gaps: the same memory, if that has none
    std::int64_t rank;                  ///< 0: added up as it is
    at::Tensor left, right;             ///< rank x n, rank x c
  };

  int rank_in_step() const;
  /// Whose factors are added up.
  RanksAmong between() const { return has_copies() ? ranks().copies() : ranks().all(); }
  at::Tensor all_with_residual(const GradientBucket& bucket);
  std::vector<Item> items_of(const GradientBucket& bucket, const at::Tensor& all, const at::Tensor& rest);
  at::Tensor first_factor(const GradientBucket& bucket, std::int64_t first, std::int64_t rank,
                          std::int64_t length) const;
  at::Tensor known_factor(const GradientBucket& bucket, const Item& item, Side side) const;
  void remember_factor(const GradientBucket& bucket, const Item& item, Side side);
  Side side_to_find(const GradientBucket& bucket, const Item& item) const;
  void add_up_over_ranks(const std::vector<at::Tensor>& values);

  StepSchedule rank_;
  std::uint64_t seed_;
  bool alternating_;
};

}  // namespace reef
