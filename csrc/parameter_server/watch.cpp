#include "parameter_server/watch.h"

#include <algorithm>
#include <optional>
#include <utility>

#include "distributed/heartbeat.h"
#include "distributed/members.h"
#include "reef/error.h"

namespace reef {
namespace {

constexpr int kLooks = 10;  // in the time after which a rank counts as silent, as in Heartbeat
constexpr milliseconds kProcessesEvery{200};
constexpr milliseconds kEndingTakes{2000};
constexpr milliseconds kLookEvery{20};

const MemberGroup* with_members(const ProcessGroupPtr& group) {
  const auto* ours = dynamic_cast<const MemberGroup*>(group.get());
  return ours != nullptr && ours->members != nullptr && ours->heart != nullptr ? ours : nullptr;
}

/// The sentence of a rank whose process has ended; nullopt.
std::optional<std::string> ended(const MemberGroup& group, int rank) {
  try {
    group.members->throw_if_ended({group.rank_of_member(rank)});
    return std::nullopt;
  } catch (const std::exception& error) {
    return message_of(error);
  }
}

}  // namespace

struct Watch::Seen {
  std::string beat;
  int same = 0;
  bool told = false;  ///< that it is silent, since its last beat
  bool ended = false;
};

Watch::Watch(const ProcessGroupPtr& group, std::vector<int> ranks, Tell tell)
    : group_(group), ours_(with_members(group)), ranks_(std::move(ranks)), tell_(std::move(tell)) {
  if (ours_ != nullptr && !ranks_.empty()) thread_ = std::thread([this] { run(); });
}

Watch::~Watch() {
  {
    const std::lock_guard lock(mutex_);
    closing_ = true;
    changed_.notify_all();
  }
  if (thread_.joinable()) thread_.join();
}

void Watch::run() {
  const milliseconds interval = ours_->heart->silence() / kLooks;
  std::vector<Seen> seen(ranks_.size());
  int unanswered = 0;
  for (Deadline next_beats = std::chrono::steady_clock::now() + interval;;) {
    {
      std::unique_lock lock(mutex_);
      const auto pause = std::min(interval, kProcessesEvery);
      if (changed_.wait_for(lock, pause, [this] { return closing_; })) return;
    }
    for (std::size_t i = 0; i < ranks_.size(); ++i) {
      if (seen[i].ended) continue;
      const auto text = ended(*ours_, ranks_[i]);
      if (!text) continue;
      seen[i].ended = true;
      tell_(Found::kEnded, ranks_[i], *text);
    }
    if (!has_passed(next_beats)) continue;
    look_at_beats(seen, unanswered);
    next_beats = std::chrono::steady_clock::now() + interval;
  }
}

void Watch::look_at_beats(std::vector<Seen>& seen, int& unanswered) {
  const milliseconds silence = ours_->heart->silence();
  std::vector<int> of_members;
  for (const int rank : ranks_) of_members.push_back(ours_->rank_of_member(rank));
  std::optional<std::vector<std::string>> beats;
  try {
    beats =
        within(std::chrono::steady_clock::now() + silence / kLooks, ours_->heart->beats_reader(of_members));
  } catch (const std::exception&) {
    return;  // the store is closed: its server is gone, and connections tell
  }
  if (!beats) {
    if (++unanswered == kLooks)
      tell_(Found::kSilent, -1,
            "the store has not answered for " + seconds_text(silence) + ": its host is stopped, or hangs");
    return;
  }
  unanswered = 0;
  for (std::size_t i = 0; i < ranks_.size(); ++i) {
    if (seen[i].ended) continue;
    const bool beats_on = (*beats)[i] != seen[i].beat || (*beats)[i].empty();
    if (beats_on) {
      seen[i] = {(*beats)[i]};
    } else if (++seen[i].same >= kLooks && !seen[i].told) {
      seen[i].told = true;
      tell_(Found::kSilent, ranks_[i],
            ours_->members->text_of(of_members[i]) + " has given no sign of life for " +
                seconds_text(silence) + ": it is stopped, or its machine hangs");
    }
  }
}

std::string text_of_gone(const ProcessGroupPtr& group, int rank) {
  const MemberGroup* const ours = with_members(group);
  if (ours == nullptr) return "rank " + std::to_string(rank) + " has closed its connection";
  const Deadline deadline = std::chrono::steady_clock::now() + kEndingTakes;
  for (; !has_passed(deadline); std::this_thread::sleep_for(kLookEvery)) {
    if (auto text = ended(*ours, rank)) return *text;
  }
  return ours->members->text_of(ours->rank_of_member(rank)) +
         " has closed its connection, or has said nothing for the group's timeout";
}

void state_silence(const ProcessGroupPtr& group, int rank) {
  const MemberGroup* const ours = with_members(group);
  if (ours == nullptr || rank < 0) return;
  const milliseconds silence = ours->heart->silence();
  within(std::chrono::steady_clock::now() + silence,
         [members = ours->members, of_member = ours->rank_of_member(rank), silence] {
           try {
             return members->publish_silence(of_member, silence);
           } catch (const std::exception&) {
             return std::string();  // nobody can be told
           }
         });
}

}  // namespace reef
