#pragma once

#include <ATen/core/Tensor.h>
#include <c10/core/StorageImpl.h>
#include <c10/util/FunctionRef.h>

#include <cstdint>
#include <initializer_list>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "reef/shard_layout.h"
#include "shard/flat.h"

namespace reef {

class CommLane;

/// A bucket of parameters, or of this rank's sums of their gradients: which memory it has and of which dtype,
/// where each parameter's place is, and who has the values just now. Its owner decides what becomes of it,
/// under a lock of its own. A call that the state does not allow throws c10::Error and changes nothing.
class FlatBucket {
 public:
  /// Where the values are.
  enum class State : std::uint8_t {
    kAway,    ///< not here: the bucket has no memory
    kHere,    ///< in its memory
    kStale,   ///< in its memory are values that may be out of date
    kMoving,  ///< on a lane, which gathers or sends them
    kLent,    ///< in memory that belongs to the gradients that lie there, and is free when they are
  };

  /// In kAway.
  FlatBucket(std::int64_t elements, at::ScalarType dtype, std::vector<FlatPlace> places);
  FlatBucket(FlatBucket&&) noexcept = default;
  FlatBucket& operator=(FlatBucket&&) = delete;

  State state() const { return state_; }
  std::int64_t elements() const { return elements_; }
  at::ScalarType dtype() const { return dtype_; }
  std::int64_t bytes() const { return elements_ * static_cast<std::int64_t>(c10::elementSize(dtype_)); }
  const std::vector<FlatPlace>& places() const { return places_; }
  /// All of it. Parameters lie there whether there is memory or not; gradients' is undefined without memory.
  const at::Tensor& whole() const { return whole_; }
  /// What is this rank's: the parts that it keeps, or what has come of gradients that were sent.
  const at::Tensor& own() const { return own_; }
  /// In kMoving: on which lane, and the number of its work.
  CommLane& lane() const { return *lane_; }
  std::uint64_t ticket() const { return ticket_; }

  /// An operator runs with its memory: it must not be dropped.
  void begin_use() { ++users_; }
  void end_use() { --users_; }
  bool in_use() const { return users_ > 0; }
  /// Keeps this (memory that must not move, say) until release().
  void hold(std::shared_ptr<const void> held) { held_.push_back(std::move(held)); }
  /// Keeps nothing any longer.
  void release() { held_.clear(); }

  // ---- Parameters. Whoever accesses their memory without an operator is refused in every state but kHere.

  /// From kAway: they lie in `whole` now.
  void take(at::Tensor whole, at::Tensor own);
  /// kHere becomes kStale. In other states only what is said to those who are refused becomes another.
  void doubt(const std::string& message);
  /// From kStale: they are not out of date.
  void confirm();
  /// From kHere or kStale to kAway, while it is not in use: frees their memory, and releases what is kept.
  void drop(const std::string& message);
  /// From kAway to kMoving: a lane gathers them into `arriving`.
  void come(at::Tensor arriving, CommLane& lane, std::uint64_t ticket);
  /// From kStale to kMoving: a lane gathers them where they lie.
  void come(CommLane& lane, std::uint64_t ticket);
  /// From kMoving to kHere: the lane has done it. Releases what is kept.
  void arrive();
  /// From kMoving back to kAway or kStale: the lane has failed.
  void lose();
  /// Tells those who are refused that nothing keeps track of the bucket any longer. Called before its owner
  /// is destroyed.
  void leave(const std::string& message);

  // ---- Gradients.

  /// From kAway or kLent to kHere: makes memory, on the device of `like`, in which what is between the places
  /// is zero. Gives what there is, if the bucket has memory.
  const at::Tensor& make(const at::Tensor& like) { return whole_.defined() ? whole_ : make_anew(like); }
  /// From kHere to kMoving: a lane sends them, and `own` is what comes of that. If they do not `stay`, the
  /// memory is the lane's.
  void go(at::Tensor own, bool stay, CommLane& lane, std::uint64_t ticket);
  /// From kMoving to kHere or, if they do not stay, to kAway: the lane has done it.
  void settle();
  /// Leaves memory to those who have it, in any state, and what has come of gradients with it: to kAway.
  void forget();
  /// From kHere to kLent.
  void lend();
  /// What is lent, or here, is used again (kHere), unless somebody has it beside this bucket and the tensors
  /// that `owners` counts: then these keep it (kAway). Does nothing in other states.
  void take_back(const at::Tensor& like, c10::function_ref<std::size_t()> owners);
  /// What has come of them is not needed any longer. Releases what is kept.
  void reset_own();

 private:
  void check(std::initializer_list<State> allowed) const;
  void move(CommLane& lane, std::uint64_t ticket);
  const at::Tensor& make_anew(const at::Tensor& like);
  c10::StorageImpl& storage() const { return *whole_.storage().unsafeGetStorageImpl(); }

  std::int64_t elements_;
  at::ScalarType dtype_;
  std::vector<FlatPlace> places_;
  State state_ = State::kAway;
  at::Tensor whole_;
  at::Tensor own_;
  at::Tensor arriving_;                                                                     ///< kMoving
  c10::weak_intrusive_ptr<c10::StorageImpl> lent_{c10::intrusive_ptr<c10::StorageImpl>()};  ///< kLent
  CommLane* lane_ = nullptr;                                                                ///< kMoving
  std::uint64_t ticket_ = 0;
  int users_ = 0;
  std::vector<std::shared_ptr<const void>> held_;
};

/// Of a layout; `tensor_of` gives the parameter that is an item of it, as it lies in memory now.
template <class TensorOf>
FlatBucket flat_bucket(const ShardLayout& layout, std::size_t number, at::ScalarType dtype,
                       const TensorOf& tensor_of) {
  std::vector<FlatPlace> places;
  for (const ShardPiece& piece : layout.buckets[number].items) {
    const at::Tensor& tensor = tensor_of(piece.item);
    places.push_back({piece.offset, tensor.sizes().vec(), tensor.strides().vec(), piece.item});
  }
  return {layout.elements(number), dtype, std::move(places)};
}

}  // namespace reef
