// A pass of backward: how it begins, ends, and is abandoned.
#include <ATen/core/grad_mode.h>
#include <ATen/ops/full.h>
#include <ATen/ops/zeros.h>
#include <c10/util/accumulate.h>

#include <algorithm>
#include <chrono>
#include <cstring>
#include <torch/csrc/distributed/c10d/ProcessGroup.hpp>
#include <utility>

#include "autograd/outermost_graph.h"
#include "distributed/host_numbers.h"
#include "distributed/members.h"
#include "reef/error.h"
#include "shard/reducer.h"

namespace reef {

using at::Tensor;

namespace {

constexpr std::size_t kReasonBytes = 300;  // of what one rank tells the others

// What has been thrown, in one line, cut between characters.
std::string reason(const std::string& thrown) {
  std::string text = thrown.substr(0, thrown.find('\n'));
  if (text.empty()) return "it ended before all gradients were there";
  if (text.size() <= kReasonBytes) return text;
  std::size_t end = kReasonBytes - 3;
  while (end > 0 && (static_cast<unsigned char>(text[end]) & 0xC0U) == 0x80U) --end;
  return text.substr(0, end) + "...";
}

}  // namespace

void Reducer::ready(std::size_t number) {
  const at::NoGradGuard no_grad;
  const std::lock_guard lock(mutex_);
  Item& item = items_[number];
  if (!item.parameter.tensor.grad().defined()) {
    throw ConfigError("rank " + std::to_string(group_->getRank()) + ": the gradient of parameter " +
                      item.parameter.name +
                      " was taken before it could be reduced; what steps in backward (GradientRelease) knows "
                      "nothing of the other ranks: step when backward is over.");
  }
  begin_gradients();
  if (item.bucket < next_bucket_) {
    throw ConfigError(
        "rank " + std::to_string(group_->getRank()) + ": parameter " + item.parameter.name +
        " has got another gradient after its gradients were sent, in one pass of backward: it is used "
        "in several graphs that run within each other; checkpoint with use_reentrant=False.");
  }
  take(item);
  // Another graph of the pass may add to it once more.
  if (!syncing_ || item.sum == Sum::kComplete || runs_within_another_graph()) return;
  item.sum = Sum::kComplete;
  --incomplete_[item.bucket];
  send_whole_buckets();
}

// An error in its first nodes ends a pass, too. Autograd forgets who listens to a parameter that gets memory
// of another dtype.
void Reducer::graph_begins() {
  const std::lock_guard lock(mutex_);
  if (during_ != During::kNoPass || when_asked_) return;
  const auto reached = [](const Item& item) {
    if (graph_runs(*item.accumulator)) return true;
    const auto now = torch::autograd::impl::try_get_grad_accumulator(item.parameter.tensor);
    return now != nullptr && now != item.accumulator && graph_runs(*now);
  };
  if (std::any_of(items_.begin(), items_.end(), reached)) begin_pass();
}

// A pass begins with the outermost of the graphs that run within each other, if that reaches a parameter, and
// ends with it. If that fails, it is abandoned.
void Reducer::begin_pass() {
  if (during_ != During::kNoPass) return;
  during_ = During::kPass;
  note_pass();
  const auto self = std::weak_ptr<Reducer*>(self_);
  at_end_of_outermost_graph(
      [self] {
        if (const auto reducer = self.lock()) (*reducer)->finish();
      },
      [self](const std::string& thrown) {
        if (const auto reducer = self.lock()) (*reducer)->abandon(thrown);
      });
}

// Of those that other ranks take part in.
void Reducer::note_pass() {
  if ((!syncing_ || local_) && !gathers_.answer) return;
  const char* const kind = syncing_ ? "the backward pass of step " : "a backward pass in no_sync of step ";
  note_call(*group_, kind + std::to_string(step_), shard_name_);
}

// A re-entrant checkpoint may reach parameters that the graph around it does not.
void Reducer::begin_gradients() {
  begin_pass();
  if (std::exchange(during_, During::kGradients) == During::kGradients || lent_) return;
  take_flats_back();
  see_sums();
  free_flats();
}

void Reducer::send_whole_buckets() {
  while (next_bucket_ < buckets_.size() && incomplete_[next_bucket_] == 0) send(next_bucket_++);
}

// At the end of backward, on the thread that ran it.
void Reducer::finish() {
  const at::NoGradGuard no_grad;
  const std::lock_guard lock(mutex_);
  if (has_parts()) {
    for (Item& item : items_) see(item);
  }
  try {
    if (!syncing_) {
      const int by_rank = gathers_.answer ? who_abandons(false) : group_->getSize();
      if (by_rank < group_->getSize()) leave_pass(by_rank, nullptr);
      return keep_sums();
    }
    if (local_) {
      finish_locally();
      return end_pass();
    }
    reduce(/*has_batch=*/true);
  } catch (...) {
    give_up();
    throw;
  }
  end_pass();
}

// Gives false, and has changed nothing, if no rank has a batch.
bool Reducer::reduce(bool has_batch) {
  std::exception_ptr wrong;
  try {
    reducing_();
    check_momentum();
  } catch (const std::exception& error) {
    wrong = std::current_exception();
    why_ = reason(message_of(error));
  } catch (...) {
    wrong = std::current_exception();
    why_ = reason("");
  }
  const bool abandons = lost_sums_ || wrong != nullptr;
  send_the_rest();
  const Heard heard = hear_of(abandons, has_batch);
  const std::vector<bool>& used = heard.used;
  if (heard.abandoned) leave_pass(who_abandons(abandons), wrong);
  if (!heard.has_batch) {
    forget_gathers();
    end_step(/*used=*/false);
    return false;
  }
  std::vector<NonFiniteElements> nonfinite;
  if (heard.nonfinite) nonfinite = who_is_not_finite();
  for (FlatBucket& bucket : buckets_) bucket.settle();
  forget_sums();
  giving_();  // an update that is under way may look at what was not finite
  nonfinite_ = std::move(nonfinite);
  lent_ = false;
  if (momentum_) momentum_->is_given = lines_[0].exchange->gives_momentum();
  give_gradients(used, /*is_void=*/heard.nonfinite);
  for (std::size_t i = 0; i < items_.size(); ++i) {
    if (used[i]) continue;
    const FlatPlace& place = flat_place_of(i);
    const std::size_t bucket = items_[i].bucket;
    exchange_of(bucket).leave_out(bucket, place.offset, c10::multiply_integers(place.shape));
  }
  end_step(/*used=*/!heard.nonfinite);
  reduced_(/*over_ranks=*/true);
  return true;
}

bool Reducer::pass_without_batch() {
  const at::NoGradGuard no_grad;
  const std::lock_guard lock(mutex_);
  note_pass();
  during_ = During::kPass;
  if (has_parts()) {
    for (Item& item : items_) see(item);
  }
  bool reduced = false;
  try {
    if (gathers_.tell_failed) gathers_.tell_failed();  // it does not come to what the others gather
    reduced = reduce(/*has_batch=*/false);
  } catch (...) {
    give_up();
    throw;
  }
  if (reduced) {
    end_pass();
  } else {
    give_up();
  }
  return reduced;
}

void Reducer::reduce_own() {
  const at::NoGradGuard no_grad;
  const std::lock_guard lock(mutex_);
  note_pass();
  during_ = During::kPass;
  try {
    for (Item& item : items_) {
      if (!has_parts()) break;
      see(item);
      if (!item.kept.is_same(item.stand_in)) item.kept.reset();  // it is this pass's
    }
    begin_gradients();
    for (Item& item : items_) {
      if (!item.parameter.tensor.grad().defined()) continue;
      take(item);
      item.sum = Sum::kComplete;
      --incomplete_[item.bucket];
      send_whole_buckets();
    }
    reduce(/*has_batch=*/true);
  } catch (...) {
    give_up();
    throw;
  }
  end_pass();
}

void Reducer::abandon_own(const std::string& why) noexcept {
  {
    const std::lock_guard lock(mutex_);
    note_pass();
    during_ = During::kPass;
  }
  abandon(why);
}

void Reducer::tell_failed() {
  const std::lock_guard lock(mutex_);
  if (gathers_.tell_failed) gathers_.tell_failed();
}

void Reducer::leave_own_out() {
  const at::NoGradGuard no_grad;
  const std::lock_guard lock(mutex_);
  forget_gathers();
}

// No other rank hears of it.
void Reducer::finish_locally() {
  reducing_();
  if (const int rank = group_->getRank(); lost_sums_) {
    throw PassAbandoned(
        "rank " + std::to_string(rank) +
            ": backward has failed in no_sync, so this pass is abandoned, and what passes in "
            "no_sync had added up before it: clear the gradients, and go on with the next batch.",
        rank);
  }
  send_the_rest();
  std::vector<bool> used;
  for (const Item& item : items_) used.push_back(item.sum != Sum::kNone);
  for (FlatBucket& bucket : buckets_) bucket.settle();
  forget_sums();
  giving_();
  nonfinite_.clear();
  lent_ = false;
  give_gradients(used, /*is_void=*/false);
  reduced_(/*over_ranks=*/false);
}

// Of a pass in no_sync.
void Reducer::keep_sums() {
  clear_parts();
  for (Item& item : items_) give_stand_in(item, item.sum != Sum::kNone);
  watch_parts();
  for (Item& item : items_) item.before = Before::kNotSeen;
  during_ = During::kNoPass;
}

// Of a pass that does not count; and all ranks go on when none waits for parameters.
void Reducer::forget_gathers() {
  if (!gathers_.abandon_pass) return;
  gathers_.abandon_pass();
  who_abandons(false);
  gathers_.abandon_pass();  // what has come for others meanwhile
}

// All ranks know that it is abandoned, by this one at least, and go on when none waits for parameters. Throws
// what was wrong here, or PassAbandoned.
void Reducer::leave_pass(int by_rank, const std::exception_ptr& wrong) {
  forget_gathers();
  Tensor told = at::zeros({static_cast<std::int64_t>(kReasonBytes)}, at::kByte);
  if (group_->getRank() == by_rank)
    std::copy(why_.begin(), why_.end(), told.mutable_data_ptr<std::uint8_t>());
  told = largest(told);
  const auto* const text = static_cast<const char*>(told.const_data_ptr());
  const std::string why(text, strnlen(text, kReasonBytes));
  if (syncing_) end_step(/*used=*/false);
  if (wrong != nullptr) std::rethrow_exception(wrong);
  throw PassAbandoned(
      "rank " + std::to_string(group_->getRank()) + ": backward has failed on rank " +
          std::to_string(by_rank) + " (" + why +
          "), so this pass is abandoned on every rank, and what passes in no_sync had added up before it: "
          "clear the gradients, and go on with the next batch.",
      by_rank);
}

void Reducer::end_step(bool used) {
  ++step_;
  for (Line& line : lines_) {
    line.exchange->end_step(used);
    line.exchange->begin_step(step_);
  }
}

void Reducer::send_the_rest() {
  begin_gradients();
  for (; next_bucket_ < buckets_.size(); ++next_bucket_) {
    for (const FlatPlace& place : buckets_[next_bucket_].places()) {
      if (items_[place.item].sum == Sum::kNone) leave_out(items_[place.item]);
    }
    send(next_bucket_);
  }
}

// Returns the largest of all ranks for each of these numbers, after all buckets have arrived. If `last` is
// defined, it is a number on the gradients' device that takes the place of the last one. All ranks call it
// alike. The host waits for a device at most once.
Tensor Reducer::largest(const Tensor& own, const Tensor& last) {
  const c10::Device device = items_.front().parameter.tensor.device();
  const c10::Device between = device_of_host_numbers(*group_, device);
  Line& line = line_of(buckets_.size());
  const Tensor values = page_locked(own, between);
  bool waits = options_.offload;
  if (last.defined() && between.is_cpu()) {
    values[values.numel() - 1].copy_(read_by_host(last));
    waits = false;  // behind all buckets
  }
  line.lane->submit(
      [&line, values, between, last] { largest_of_hosts(line.exchange->ranks(), values, between, last); });
  for (const Line& each : lines_) {
    await(*each.lane, CommLane::kAll);
    if (waits || !between.is_cpu()) each.lane->wait_on_host(CommLane::kAll);
  }
  return values;
}

void Reducer::await(CommLane& lane, std::uint64_t ticket) {
  if (!gathers_.answer) return lane.wait(ticket);
  constexpr std::chrono::milliseconds kAnswersEvery{20};
  while (!lane.wait_for(ticket, kAnswersEvery)) gathers_.answer();
}

// Gives it alike on all ranks, of which one has sent or received something that is not finite.
std::vector<NonFiniteElements> Reducer::who_is_not_finite() {
  std::vector<std::string> names;
  for (const Item& item : items_) names.push_back(item.parameter.name);
  return search_->of_all_ranks(names, lines_[0].exchange->ranks(),
                               [this](const Tensor& own) { return largest(own); });
}

// Gives the lowest rank that abandons the pass, or the ranks' number if none does.
int Reducer::who_abandons(bool abandons) {
  const int ranks = group_->getSize();
  const Tensor told = largest(at::full({1}, abandons ? ranks - group_->getRank() : 0, at::kLong));
  return ranks - static_cast<int>(told.item<std::int64_t>());
}

// Throws ConfigError, on all ranks, if they disagree on which sums there are.
Reducer::Heard Reducer::hear_of(bool abandons, bool has_batch) {
  const std::size_t items = items_.size();
  Tensor flags = at::zeros({static_cast<std::int64_t>(items) + 5}, at::kByte);
  auto* const own = flags.mutable_data_ptr<std::uint8_t>();
  for (std::size_t i = 0; i < items; ++i) own[i] = items_[i].sum != Sum::kNone ? 1 : 0;
  own[items] = abandons ? 1 : 0;
  own[items + 1] = has_batch ? 1 : 0;
  own[items + 2] = clears_;
  own[items + 3] = static_cast<std::uint8_t>(~clears_);
  Tensor found;
  if (search_) {
    for (const Line& line : lines_) await(*line.lane, CommLane::kAll);
    found = search_->found();
  }
  flags = largest(flags, found);
  const auto* const all = flags.const_data_ptr<std::uint8_t>();
  const bool alike = all[items + 2] == static_cast<std::uint8_t>(~all[items + 3]);
  if (!alike && all[items] == 0) {
    end_step(/*used=*/false);
    throw ConfigError(
        "rank " + std::to_string(group_->getRank()) +
        ": after backward in no_sync the gradients of some parts were cleared on one rank and not on "
        "another, "
        "so they disagree on what has been added up, and this pass is abandoned: clear the gradients of the "
        "same parts on all ranks, those without elements, too.");
  }
  return {std::vector<bool>(all, all + items), all[items] != 0, all[items + 1] != 0, all[items + 4] != 0};
}

void Reducer::end_pass() noexcept {
  during_ = During::kNoPass;
  next_bucket_ = 0;
  for (Item& item : items_) {
    item.before = Before::kNotSeen;
    item.sum = Sum::kNone;
    item.kept.reset();
  }
  for (std::size_t number = 0; number < buckets_.size(); ++number) {
    incomplete_[number] = buckets_[number].places().size();
    buckets_[number].reset_own();
  }
  lend_flats();
}

// An error has ended this rank's pass, and is on its way to the program. The others wait for its gradients:
// they get some, and are told that these are worth nothing. Where parameters are divided they wait for those,
// too, which this rank's operators would have gathered.
void Reducer::abandon(const std::string& thrown) noexcept {
  const at::NoGradGuard no_grad;
  const std::lock_guard lock(mutex_);
  if (during_ == During::kNoPass) return;
  if (local_ && syncing_) return give_up();
  lost_sums_ = !syncing_ && !gathers_.answer;
  try {
    why_ = reason(thrown);
    if (gathers_.tell_failed) gathers_.tell_failed();
    if (syncing_ && (gathers_.answer || options_.stage != Stage::kParameters)) {
      send_the_rest();
      hear_of(/*abandons=*/true, /*has_batch=*/true);
    }
    if (gathers_.answer || (syncing_ && options_.stage != Stage::kParameters)) {
      leave_pass(who_abandons(true), nullptr);
    }
  } catch (...) {  // the next pass finds the same, if the others are gone
  }
  give_up();
}

// Gradients are what they were. Memory that may be on its way is left to the lane.
void Reducer::give_up() noexcept {
  for (std::size_t bucket = 0; bucket < next_bucket_; ++bucket) buckets_[bucket].forget();
  if (has_parts()) {
    for (Item& item : items_) see(item);
    clear_parts();
  }
  for (Item& item : items_) {
    if (item.sum != Sum::kNone || item.before != Before::kNotSeen || item.kept.defined())
      item.parameter.tensor.mutable_grad() = item.kept;
  }
  if (syncing_ || gathers_.answer) forget_sums();
  end_pass();
}

}  // namespace reef
