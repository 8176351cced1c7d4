#pragma once

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <functional>
#include <map>
#include <string>
#include <tuple>
#include <utility>
#include <vector>

namespace reef {

/// A tensor that an exchange remembers of each bucket, by element and in the dtype of the bucket's sums; or
/// of each parameter, in float32 and a shape that the method gives it.
struct RememberedTensor {
  /// What the ranks' values of an element are to each other, which says what becomes of them where the ranks
  /// are others.
  enum class Ranks : std::uint8_t {
    kShares,    ///< shares of what all have together, gradients that are held back: their sum stays
    kMomentum,  ///< such shares, too, of what is no part of a gradient
    kAlike,     ///< the same on all ranks that have one
  };
  /// Of which elements a rank has one.
  enum class Extent : std::uint8_t {
    kBucket,  ///< of all
    kSlice,   ///< of its slice, which other ranks have, too, where there are copies
    kFactor,  ///< of no elements: something of a whole parameter, kAlike
  };
  std::string name;
  Ranks ranks = Ranks::kShares;
  Extent extent = Extent::kBucket;
  /// kFactor: of what is remembered of a parameter of this shape; empty: nothing is.
  std::function<std::vector<std::int64_t>(at::IntArrayRef parameter)> shape_of = {};
};

/// What an exchange remembers from step to step: tensors of each bucket, and numbers that are the same on all
/// ranks (steps of a warm-up). Nothing is remembered at first, which stands for zeros. What a step remembers
/// counts once all ranks use what it has exchanged, and until then what there was is kept, bit for bit: twice
/// the bytes at most. Pure data: all that an exchange declares here is saved, loaded by other ranks, and
/// counted as communication.
class ExchangeMemory {
 public:
  /// Of nothing.
  ExchangeMemory() = default;
  /// `method`: a name for messages and files, of which others cannot load what this remembers.
  ExchangeMemory(std::string method, std::vector<RememberedTensor> tensors,
                 std::vector<std::string> numbers = {});

  const std::string& method() const { return method_; }  ///< empty: it remembers nothing
  const std::vector<RememberedTensor>& tensors() const { return tensors_; }
  const std::vector<std::string>& numbers() const { return numbers_; }

  /// Of the steps before this one; undefined, where nothing is remembered. Nobody writes into it.
  /// Of a parameter: `first` is its first element in the bucket.
  at::Tensor tensor(std::size_t bucket, const std::string& name, std::int64_t first = 0) const;
  std::int64_t number(const std::string& name) const;  ///< 0 at first
  /// In its place from the next step on, if this one is used. An undefined tensor: nothing. The tensor is the
  /// memory's from now on.
  void remember(std::size_t bucket, const std::string& name, at::Tensor tensor, std::int64_t first = 0);
  void remember(const std::string& name, std::int64_t number);
  /// In its place at once, whether this step is used or not: what ranks remember together is the same, in
  /// another form.
  void replace(std::size_t bucket, const std::string& name, at::Tensor tensor);

  /// Of so many elements of the bucket, from `first` on, which are a parameter's, no rank uses this step:
  /// what there was stays. Slice number `slice` is this rank's.
  void leave_out(std::size_t bucket, std::int64_t first, std::int64_t elements, int slice);
  /// All ranks have used this step.
  void keep_step();
  /// No rank has: what there was is there again.
  void forget_step();
  /// As it was at first.
  void clear();

 private:
  using Place = std::tuple<std::size_t, std::string, std::int64_t>;
  std::string method_;
  std::vector<RememberedTensor> tensors_;
  std::vector<std::string> numbers_;
  std::map<Place, at::Tensor> kept_, in_step_;
  std::map<std::string, std::int64_t> kept_numbers_, numbers_in_step_;
};

}  // namespace reef
