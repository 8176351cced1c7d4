#pragma once

#include <cstdint>
#include <optional>

#include "shard/lossy_exchange.h"
#include "shard/sparse_gradient.h"

namespace reef {

/// What sparse methods have in common. A rank adds what it has held back to its gradient (with copies: to its
/// slice of what its copy has added up), takes the largest elements out, and holds back the rest; ranks make
/// one sparse gradient of what they have taken, which every rank then has. Of a bucket of so many elements
/// ceil(density times elements) entries of 8 bytes are taken, whatever they are.
///
/// On CUDA what is held back stays on the device, which finds what is taken (kernels::cuda::take_largest()).
/// Entries come to the host, travel between CPUs, are added up there, and go back: the thread that calls
/// waits for the device.
///
/// Sums are float32. Buckets of another dtype are added up as without compression, and so is everything where
/// there is one rank. What is not finite is sent before all else, and never held back.
///
/// A method may add something else than its gradient to what it holds back: see addend().
///
/// Memory: the residual, of the gradient's bytes, twice while a step is under way.
class SparseExchange : public LossyExchange {
 public:
  /// `method`: of ExchangeMemory, which has `more` beside the residual.
  SparseExchange(const ProcessGroupPtr& group, int number, int slices, const ShardOptions& options,
                 const char* method, std::vector<RememberedTensor> more = {});
  void exchange(const GradientBucket& bucket) final;
  /// Elements that are not finite are taken first, so they are seen. With copies they may be another rank's.
  bool finds_nonfinite(const GradientBucket& bucket) const final {
    return takes_largest(bucket) && !has_copies();
  }

 protected:
  /// What a rank holds back.
  class Residual {
   public:
    explicit Residual(at::Tensor tensor) : tensor_(std::move(tensor)) {}
    /// Holds these back, too; not those that are not finite.
    void add(const SparseGradient& entries) const;

   private:
    at::Tensor tensor_;  ///< float32, one dimension
  };

  /// What a rank adds to what it holds back: its gradient (with copies: its slice of its copy's), or what the
  /// method makes of that. `among` are those that exchange it. On a lane.
  virtual at::Tensor addend(std::size_t bucket, const at::Tensor& gradient, const RanksAmong& among);
  /// An addend of a step has been added, and these elements have been taken out. Everything where it is added
  /// up as it is; there are no entries then.
  virtual void added(std::size_t bucket, const at::Tensor& addend, const SparseGradient& taken);

  /// The gradient of `among`, the same on each of them; `own`, of `k` entries at most, is what this rank has
  /// taken out of its own. On a lane.
  virtual SparseGradient sum(const SparseGradient& own, std::size_t k, const RanksAmong& among,
                             const Residual& residual) = 0;

  /// Sends `k` entries to the rank `to` and receives as many from the rank `from`; nullopt: neither. Every
  /// rank calls it. Nothing received: no entries.
  SparseGradient transfer(const char* name, const SparseGradient& entries, std::size_t k,
                          std::optional<int> to, std::optional<int> from);
  /// Part number n goes to the rank at place n of these, from which `sizes[n]` entries come; this rank's own
  /// stays. In their order. Every rank calls it.
  std::vector<SparseGradient> exchange_parts(const char* name, const std::vector<SparseGradient>& parts,
                                             const std::vector<std::size_t>& sizes, const RanksAmong& among);
  /// `k` entries of each of these, in their order.
  std::vector<SparseGradient> gather(const char* name, const SparseGradient& own, std::size_t k,
                                     const RanksAmong& among);

 private:
  bool takes_largest(const GradientBucket& bucket) const {
    const at::Tensor& flat = bucket.flat;
    return ranks().all().count > 1 && flat.scalar_type() == at::kFloat && (flat.is_cpu() || flat.is_cuda());
  }
  void exchange_as_it_is(const GradientBucket& bucket);
  void exchange_sparse(const GradientBucket& bucket);

  StepSchedule density_;
};

}  // namespace reef
