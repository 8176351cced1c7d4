#pragma once

#include <optional>
#include <string>

#include "shard/lossy_exchange.h"

namespace reef {

/// What methods have in common by which all elements travel, each in fewer bits: as the method's *code* of a
/// slice. Each rank is sent the codes of its slice, and adds up what they say in the order of ranks, in the
/// bucket's dtype. Where nothing is divided that sum is encoded once more, to be sent back, and every rank
/// has what that code says, so that all have the same bits. With copies a copy's sum is made as SliceSum
/// makes it, and only what leaves it is encoded: the codes of all copies' slices are sent to each.
///
/// What a code loses may be held back on its rank (error feedback) and added to the next gradient: as
/// `residual`, and what the code of a sum loses as `residual_of_sum` of the rank that has added it up. Then
/// what has been applied in all steps, and all ranks' residuals, are what all ranks had. A residual is
/// finite.
///
/// A rank sends P - 1 codes of a slice, where nothing is divided twice as many, and with copies one to each
/// other copy, beside what SliceSum sends.
class CodedExchange : public LossyExchange {
 public:
  /// `memory`: residuals(), if it holds anything back.
  CodedExchange(const ProcessGroupPtr& group, int number, int slices, const ShardOptions& options,
                ExchangeMemory memory);
  void exchange(const GradientBucket& bucket) final;
  /// Codes tell whether an element is not finite. With copies they are of a sum, and on a device one would
  /// have to wait.
  bool finds_nonfinite(const GradientBucket& bucket) const final {
    return travels_as_codes(bucket) && !has_copies() && bucket.flat.is_cpu();
  }

 protected:
  static ExchangeMemory residuals(const ProcessGroupPtr& group, int slices, const ShardOptions& options,
                                  const char* method);

  /// What is encoded: of a bucket, elements from `first` on, as so many equal slices.
  struct Part {
    const GradientBucket& bucket;
    at::Tensor values;
    std::int64_t first;
    int slices;
    bool of_sum;  ///< and not of this rank's gradient
  };
  /// Whether buckets like this travel as codes; others are added up as they are.
  virtual bool encodes(const at::Tensor& flat) const = 0;
  /// Whether what codes of this lose is held back.
  virtual bool holds_back(const at::Tensor& values) const = 0;
  /// Whether what a code says of an element depends on others: then it may say something of what is between
  /// parameters, which is to stay zero.
  virtual bool by_blocks() const = 0;
  /// The slices' codes, one after another. If it holds anything back, the values become what is lost of them.
  virtual at::Tensor encode(const Part& part) = 0;
  /// Codes, and whether they say of any element that it is not finite, where encoding has seen it.
  struct Code {
    at::Tensor codes;
    std::optional<bool> any_nonfinite = {};
  };
  /// Encodes the part's values with `before` (if defined) added, and leaves them as they are: `left`, of
  /// their size, becomes what is lost. By encode(); a method may do it in one pass over memory.
  virtual Code encode_with(const at::Tensor& before, const Part& part, const at::Tensor& left);
  /// `to` becomes the sum, in their order, of what so many codes say, divided at last.
  virtual void decode(const at::Tensor& codes, int count, int divisor, const at::Tensor& to) const = 0;
  /// Whether codes, on the CPU, say of any element that it is not finite.
  virtual bool any_nonfinite(const at::Tensor& codes) const = 0;
  /// How codes travel: as SliceExchange does it, if a method does not make them shorter on their way. Ranks
  /// have the same codes afterwards.
  virtual void all_to_all(const char* name, const at::Tensor& codes, const at::Tensor& received,
                          const RanksAmong& among) {
    ranks().all_to_all(name, codes, received, among);
  }
  virtual void all_gather(const char* name, const at::Tensor& codes, const RanksAmong& among) {
    ranks().all_gather(name, codes, among);
  }

 private:
  bool travels_as_codes(const GradientBucket& bucket) const {
    return ranks().all().count > 1 && encodes(bucket.flat);
  }
  int divisor_of_sum() const { return reduction() == Reduction::kMean ? ranks().all().count : 1; }
  Code code_of(const Part& part);
  void between_copies(const GradientBucket& bucket);
  void between_ranks(const GradientBucket& bucket);
  void sum_with_rest(const at::Tensor& codes, const GradientBucket& bucket);

  std::string name_;
};

}  // namespace reef
