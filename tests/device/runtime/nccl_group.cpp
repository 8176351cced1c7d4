#include "device/runtime/nccl_group.h"

#include <algorithm>
#include <memory>
#include <mutex>
#include <set>
#include <thread>
#include <utility>
#include <vector>

#include "device/runtime/nccl_unplayed.h"

namespace reef::played {
namespace {

// The calls of one thread since ncclGroupStart.
struct Group {
  int depth = 0;
  ncclResult_t wrong = ncclSuccess;
  std::vector<std::pair<ncclComm_t, Call>> calls;
  std::vector<std::function<void()>> meetings;  // Each waits for the other ranks of a new communicator.
};
thread_local Group group;

struct Communicators {
  std::mutex mutex;
  std::set<ncclComm_t> all;
};
Communicators& communicators() {
  static auto* const known = new Communicators;
  return *known;
}

// Holds all meetings at the same time, because the ranks of one thread may wait for each other.
void hold_meetings(const std::vector<std::function<void()>>& meetings) {
  if (meetings.size() == 1) return meetings.front()();
  std::vector<std::thread> threads;
  std::vector<Refusal> refusals(meetings.size(), {ncclSuccess, ""});
  for (std::size_t i = 0; i < meetings.size(); ++i)
    threads.emplace_back([&, i] {
      try {
        meetings[i]();
      } catch (const Refusal& refusal) {
        refusals[i] = refusal;
      }
    });
  for (std::thread& thread : threads) thread.join();
  for (const Refusal& refusal : refusals)
    if (refusal.result != ncclSuccess) throw refusal;
}

void launch(std::vector<std::pair<ncclComm_t, Call>> calls) {
  std::vector<std::pair<ncclComm_t, std::vector<Call>>> messages;
  for (const auto& [communicator, call] : calls) {
    if (call.is_collective()) continue;
    const auto same = [of = communicator](const auto& each) { return each.first == of; };
    auto found = std::find_if(messages.begin(), messages.end(), same);
    if (found == messages.end()) found = messages.insert(found, {communicator, {}});
    found->second.push_back(call);
    if (call.stream != found->second.front().stream)
      refuse("sends and receives of one group on several streams are not played", ncclInvalidUsage);
  }
  for (const auto& [communicator, sent] : messages)
    if (!match_with_itself(sent, communicator->rank(), false))
      refuse("rank " + std::to_string(communicator->rank()) +
                 " sends to itself what it does not receive in the same group",
             ncclInvalidUsage);
  for (const auto& [communicator, call] : calls)
    if (call.is_collective()) communicator->issue({call});
  for (auto& [communicator, sent] : messages) communicator->issue(std::move(sent));
}

}  // namespace

void refuse(const std::string& words, ncclResult_t result) { throw Refusal{result, words}; }

ncclResult_t attempt(const std::function<void()>& act) {
  ncclResult_t result = ncclSuccess;
  try {
    act();
  } catch (const Refusal& refusal) {
    if (!refusal.words.empty()) set_last_error(refusal.words);
    result = refusal.result;
  } catch (const std::exception& error) {
    set_last_error(error.what());
    result = ncclSystemError;
  }
  if (group.depth > 0 && group.wrong == ncclSuccess) group.wrong = result;
  return result;
}

int refuse_unplayed(const char* function) {
  return attempt([&] { refuse(std::string(function) + " is not played", ncclInvalidUsage); });
}

void begin_group() { ++group.depth; }

void end_group() {
  if (group.depth == 0) refuse("ncclGroupEnd without ncclGroupStart", ncclInvalidUsage);
  if (--group.depth > 0) return;
  const Group done = std::exchange(group, {});
  if (done.wrong != ncclSuccess) refuse("", done.wrong);  // The words were reported already.
  hold_meetings(done.meetings);
  launch(done.calls);
}

ncclResult_t in_group(const std::function<void()>& act) {
  begin_group();
  const ncclResult_t result = attempt(act), ended = attempt(end_group);
  return result != ncclSuccess ? result : ended;
}

void add_call(ncclComm_t communicator, const Call& call) { group.calls.emplace_back(communicator, call); }
void add_meeting(std::function<void()> meeting) { group.meetings.push_back(std::move(meeting)); }

ncclComm_t make_communicator(const SharedName& name, int ranks, int rank, const Newcomer& as) {
  auto communicator = std::make_unique<ncclComm>(name, ranks, rank, as);
  const std::lock_guard lock(communicators().mutex);
  return *communicators().all.insert(communicator.release()).first;
}

ncclComm& known(ncclComm_t communicator) {
  const std::lock_guard lock(communicators().mutex);
  if (!communicators().all.contains(communicator)) refuse("there is no such communicator");
  return *communicator;
}

ncclComm& opened(ncclComm_t communicator) {
  known(communicator).open_mailboxes();
  return *communicator;
}

}  // namespace reef::played
