#pragma once

#include <cstdint>
#include <exception>
#include <memory>
#include <string>
#include <string_view>
#include <torch/csrc/distributed/c10d/ProcessGroup.hpp>
#include <utility>
#include <vector>

#include "deadline.h"
#include "distributed/attempt_fate.h"
#include "distributed/gloo.h"
#include "distributed/heartbeat.h"
#include "distributed/process.h"
#include "distributed/store.h"
#include "reef/error.h"
#include "reef/rendezvous.h"

namespace reef {

/// Why a group cannot go on, in the words that all of its ranks use.
struct Verdict {
  enum class Kind : std::uint8_t { kGone, kOutOfStep };
  Kind kind = Kind::kGone;
  int failed_rank = -1;  ///< kGone; -1: it could not be told
  std::string sentence;
};

/// The ranks of one group as processes on hosts: who has come, why the bring-up failed, who is gone. All that
/// the ranks tell each other for this goes through the store, and the first to state a reason states it for
/// all.
class Members : public std::enable_shared_from_this<Members> {
 public:
  /// `store` must hold keys of one attempt to bring up this group alone. A connection of its own is made to
  /// it.
  /// `interface`: of the network that the ranks share, as ProcessGroupOptions says.
  Members(const StorePtr& store, Rendezvous rendezvous, milliseconds timeout, std::string interface = "");

  /// Says that this rank has come, and waits until every rank has. Returns false if the attempt is over
  /// without this rank, which then joins the next one. Throws ProcessGroupError if two processes claim one
  /// rank or disagree on the world size, if ranks are missing at the deadline (their numbers), or as
  /// throw_if_failed(). `call` is greater than that of every earlier call of this machine.
  bool check_in(std::int64_t call, Deadline deadline);

  /// Says that this rank is connected to the others, and waits until every rank is. Throws likewise.
  void await_connected(Deadline deadline);

  /// Throws ProcessGroupError if a rank has published why it failed, or a process of this machine has ended.
  void throw_if_failed() const;

  /// Publishes why this rank cannot join, unless another was first, and makes the error that every rank
  /// throws. Waits up to a second for the others to hear it if the store lives in this process.
  ProcessGroupError failed(const std::string& reason);

  /// The group's store, in which waiting for a key ends as throw_if_failed() does.
  StorePtr watched(const StorePtr& store, Deadline deadline) const;

  /// After check_in: this rank's sign of life, and its eye on others'.
  std::shared_ptr<Heartbeat> heartbeat(milliseconds silence);

  /// After check_in: throws DistError that names one of `ranks` (none: of all) that has ended on this
  /// machine, if one has.
  void throw_if_ended(const std::vector<int>& ranks) const;

  /// After check_in: "rank 2 (process 7 on host alpha)".
  std::string text_of(int rank) const;
  /// States that this rank is silent, unless another reason is known. Gives what has been stated.
  std::string publish_silence(int rank, milliseconds silence);

  int rank() const { return rendezvous_.rank; }
  int world_size() const { return rendezvous_.world_size; }

  /// After check_in: all ranks share this machine and its network.
  bool on_one_machine() const;
  /// After check_in: the one that gloo listens on.
  GlooNetwork network() const;

  /// After a collective among `ranks` (none: all) failed with `error_text`: who is gone. The same on all
  /// ranks that reach the store. Another rank that has ended may have had no more to do, and is named last.
  /// Takes two seconds at most, one more where this process holds the store and others do not ask, and four
  /// if the store's host has vanished without closing its connections.
  /// `known`: a verdict that this rank has heard already, for where the store does not answer; else "".
  Verdict name_the_gone(const std::string& error_text, const std::vector<int>& ranks,
                        const std::string& known);

 private:
  /// A step that all ranks must have done before any of them goes on.
  struct Stage {
    const char* name;
    const char* what;
    AttemptFate::Kind before;    ///< while ranks do it
    AttemptFate::Kind through;   ///< when all have done it
    AttemptFate::Kind too_late;  ///< when some have not done it in time
  };
  bool await(const Stage& stage, Deadline deadline);
  std::string missing_text(const Stage& stage) const;
  ProcessGroupError claimed_twice(const Process& other) const;
  /// Returns whether the processes of all other ranks that came to the attempt have ended, so that its
  /// failure does not concern this rank.
  bool have_ended_since() const;
  void throw_if_failed(const AttemptFate& fate, const std::vector<int>& gone) const;
  Verdict ask(const std::string& error_text, const std::vector<int>& ranks, const std::string& known);
  bool reach_store();
  std::vector<int> ended() const;
  std::vector<int> ended(const std::vector<int>& ranks) const;
  int by_address(std::string_view error_text) const;
  std::string gone_text(const std::vector<int>& gone, int first) const;
  std::string silent_text(const std::vector<int>& ranks) const;
  Verdict without_store(const std::vector<int>& gone) const;
  std::string publish_out_of_step(const std::string& sentence);
  Verdict publish(const Verdict& verdict);
  Verdict hear();
  void let_others_hear(int listeners);

  StorePtr store_;
  Rendezvous rendezvous_;
  milliseconds timeout_;
  std::string interface_;
  Process self_;
  std::vector<Process> processes_;  ///< by rank; empty before check_in is through
  int server_rank_ = -1;            ///< whose process holds the store; -1: none of the ranks'
};

/// A group that init_process_group made, or a subgroup of one: it knows the members of the first, and a rank
/// that is gone is gone for all of these groups.
class MemberGroup final : public c10d::ProcessGroup {
 public:
  /// `group_name` is the same on all of its ranks, and no other group's of these members.
  MemberGroup(StorePtr store, int rank, int size, std::string group_name,
              std::shared_ptr<Members> group_members, std::shared_ptr<Heartbeat> group_heart,
              std::vector<int> ranks_of_members = {});
  ~MemberGroup() override;
  MemberGroup(const MemberGroup&) = delete;
  MemberGroup& operator=(const MemberGroup&) = delete;

  const std::string name;
  const std::shared_ptr<Members> members;
  const std::shared_ptr<Heartbeat> heart;  ///< nullptr: none
  const std::vector<int> ranks;            ///< of a subgroup: which of the members' its own are

  int rank_of_member(int rank) const { return ranks.empty() ? rank : ranks[static_cast<std::size_t>(rank)]; }
};

/// Of a group that has one; else nullptr.
Heartbeat* heart_of(c10d::ProcessGroup& group);

/// Notes that this rank makes a call that all ranks of `group` make alike, in the same order as all such
/// calls: before it waits for them. Where a rank has made another in its place, or the shard whose call it is
/// has ended there, those that wait are told.
void note_call(c10d::ProcessGroup& group, const std::string& call, const std::string& of_shard = "");
void note_shard_ends(c10d::ProcessGroup& group, const std::string& shard);

/// What to throw after collective `name` failed with `error` on `group`, whoever made the group: RankFailed
/// or RanksOutOfStep.
std::exception_ptr rank_failed(c10d::ProcessGroup& group, const std::string& name,
                               const std::exception& error);

/// What to throw where collective `name` has come through, but what `rank` of `group` has sent cannot be what
/// it had to send: RankFailed. `what` says what it has sent.
std::exception_ptr rank_sent_nonsense(c10d::ProcessGroup& group, const std::string& name, int rank,
                                      const std::string& what);

}  // namespace reef
