#include "shard/asked_gathers.h"

#include <algorithm>
#include <exception>
#include <thread>

namespace reef {

void AskedGathers::open(const ProcessGroupPtr& group, const std::string& name, int ranks) {
  requests_.emplace(group, name, ranks);
  if (!*requests_) requests_.reset();
}

// If the store is gone, so is its rank, of which those who wait for a message are told.
template <class What>
void AskedGathers::by_store(const What& what) {
  if (!requests_) return;
  try {
    what();
  } catch (const std::exception&) {
    requests_.reset();
  }
}

void AskedGathers::begin_step(std::int64_t step) {
  by_store([&] { requests_->begin_step(step); });
  patience_ = patience_at_first_;
  failed_ = false;
}

void AskedGathers::begin_part() {
  by_store([&] { requests_->begin_part(); });
  patience_ = patience_at_first_;
}

std::vector<std::int64_t> AskedGathers::begun() const {
  std::vector<std::int64_t> all;
  for (const Count& count : counts_) all.push_back(count.begun);
  return all;
}

void AskedGathers::forget() {
  for (Count& count : counts_) count.for_others = false;
}

bool AskedGathers::answer(bool keeps) {
  bool asked = false;
  by_store([&] { asked = take_part_in_asked(keeps); });
  return asked;
}

// Where ranks use parameters in one order, none waits so long that it asks, unless another is slow.
void AskedGathers::await(CommLane& lane, std::uint64_t ticket) {
  for (milliseconds waited{0}; requests_ && !lane.wait_for(ticket, std::min(patience_, kLook));
       waited += std::min(patience_, kLook)) {
    by_store([&] {
      take_part_in_asked(/*keeps=*/true);
      if (waited < patience_ && !requests_->has_failed()) return;
      patience_ = kLookAgain;
      ask();
    });
  }
  lane.wait(ticket);
}

void AskedGathers::tell_failed() {
  failed_ = true;
  by_store([&] {
    requests_->tell_failed();
    ask();
  });
}

// By then nobody waits for a gather that another has not begun.
void AskedGathers::end(milliseconds most) {
  const auto until = std::chrono::steady_clock::now() + most;
  by_store([&] {
    if (!requests_->were_made()) return;
    requests_->make_no_more();
    for (; !requests_->all_make_no_more() && std::chrono::steady_clock::now() < until;
         std::this_thread::sleep_for(kLookAgain))
      take_part_in_asked(/*keeps=*/false);
  });
}

void AskedGathers::ask() {
  for (std::size_t bucket = 0; bucket < counts_.size(); ++bucket) {
    Count& count = counts_[bucket];
    if (!own_.is_coming(bucket) || count.asked == count.begun) continue;
    requests_->make({bucket, count.begun});
    count.asked = count.begun;
  }
}

// Beside what this rank gathers itself, which may be what the others have not come to. A rank that is slow
// will use what it is asked for, and keeps that; one whose pass has failed will not, nor one that waits
// elsewhere.
bool AskedGathers::take_part_in_asked(bool keeps) {
  const auto asked = requests_->take();
  for (const auto& [bucket, number] : asked) {
    const Count& count = counts_[bucket];
    if (count.begun < number && keeps && !failed_ && own_.gather_for_others(bucket)) keep_for_others(bucket);
    while (count.begun < number) own_.take_part(bucket);
  }
  return !asked.empty();
}

// Of what it does not come to, the last: what a rank that waits needs now, and has on its way.
void AskedGathers::keep_for_others(std::size_t bucket) {
  counts_[bucket].for_others = true;
  for_others_.push_back(bucket);
  if (for_others_.size() <= kForOthersAtOnce) return;
  counts_[for_others_.front()].for_others = false;
  for_others_.pop_front();
}

}  // namespace reef
