#include "shard/flat_bucket.h"

#include <ATen/ops/empty.h>

#include <algorithm>

#include "page/huge_pages.h"
#include "page/storage_access.h"
#include "reef/ledger.h"

namespace reef {

using at::Tensor;

FlatBucket::FlatBucket(std::int64_t elements, at::ScalarType dtype, std::vector<FlatPlace> places)
    : elements_(elements), dtype_(dtype), places_(std::move(places)) {}

void FlatBucket::check(std::initializer_list<State> allowed) const {
  TORCH_INTERNAL_ASSERT(
      std::find(allowed.begin(), allowed.end(), state_) != allowed.end(),
      "a FlatBucket was given a call that its state does not allow: ", static_cast<int>(state_));
}

void FlatBucket::move(CommLane& lane, std::uint64_t ticket) {
  state_ = State::kMoving;
  lane_ = &lane;
  ticket_ = ticket;
}

// ---- Parameters.

void FlatBucket::take(Tensor whole, Tensor own) {
  check({State::kAway});
  whole_ = std::move(whole);
  own_ = std::move(own);
  state_ = State::kHere;
}

void FlatBucket::doubt(const std::string& message) {
  if (state_ == State::kAway || arriving_.defined()) return refuse_access(storage(), message);
  mark_stale(storage(), message);
  if (state_ == State::kHere) state_ = State::kStale;
}

void FlatBucket::confirm() {
  check({State::kStale});
  unmark_stale(storage());
  state_ = State::kHere;
}

void FlatBucket::drop(const std::string& message) {
  check({State::kHere, State::kStale});
  TORCH_INTERNAL_ASSERT(!in_use(), "memory of a FlatBucket was to be freed while an operator runs with it");
  release();
  if (state_ == State::kStale) unmark_stale(storage());
  refuse_access(storage(), message);
  storage().set_data_ptr_noswap({nullptr, storage().device()});
  state_ = State::kAway;
}

void FlatBucket::come(Tensor arriving, CommLane& lane, std::uint64_t ticket) {
  check({State::kAway});
  arriving_ = std::move(arriving);
  move(lane, ticket);
}

void FlatBucket::come(CommLane& lane, std::uint64_t ticket) {
  check({State::kStale});
  move(lane, ticket);
}

void FlatBucket::arrive() {
  check({State::kMoving});
  release();
  if (arriving_.defined()) {
    allow_access(storage());
    storage().set_data_ptr_noswap(
        arriving_.storage().unsafeGetStorageImpl()->set_data_ptr({nullptr, storage().device()}));
    arriving_.reset();
  } else {
    unmark_stale(storage());
  }
  state_ = State::kHere;
}

void FlatBucket::lose() {
  check({State::kMoving});
  release();
  state_ = arriving_.defined() ? State::kAway : State::kStale;
  arriving_.reset();
}

void FlatBucket::leave(const std::string& message) {
  if (unmark_stale(storage())) refuse_access(storage(), message);
}

// ---- Gradients.

const Tensor& FlatBucket::make_anew(const Tensor& like) {
  check({State::kAway, State::kLent});
  const CategoryScope gradients(Category::kGradient);
  Tensor made = on_huge_pages(at::empty({elements_}, like.options().requires_grad(false).dtype(dtype_)));
  std::int64_t end = 0;
  const auto pad = [&](std::int64_t next) { made.narrow(0, end, next - end).zero_(); };
  for (const FlatPlace& place : places_) {
    pad(place.offset);
    end = place.offset + c10::multiply_integers(place.shape);
  }
  pad(elements_);
  state_ = State::kHere;
  return whole_ = std::move(made);
}

void FlatBucket::go(Tensor own, bool stay, CommLane& lane, std::uint64_t ticket) {
  check({State::kHere});
  own_ = std::move(own);
  if (!stay) whole_.reset();
  move(lane, ticket);
}

void FlatBucket::settle() {
  check({State::kMoving});
  state_ = whole_.defined() ? State::kHere : State::kAway;
}

void FlatBucket::forget() {
  whole_.reset();
  reset_own();
  state_ = State::kAway;
}

void FlatBucket::lend() {
  check({State::kHere});
  lent_ = whole_.storage().getWeakStorageImpl();
  whole_.reset();
  state_ = State::kLent;
}

void FlatBucket::take_back(const Tensor& like, c10::function_ref<std::size_t()> owners) {
  if (state_ == State::kLent) {
    auto storage = lent_.lock();
    state_ = storage ? State::kHere : State::kAway;
    if (storage) whole_ = all_of(c10::Storage(std::move(storage)), like, dtype_);
  }
  if (state_ == State::kHere && whole_.storage().use_count() > 1 + owners()) forget();
}

void FlatBucket::reset_own() {
  own_.reset();
  release();
}

}  // namespace reef
