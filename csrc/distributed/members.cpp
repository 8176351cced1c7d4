#include "distributed/members.h"

#include <algorithm>
#include <iterator>
#include <sstream>
#include <thread>
#include <torch/csrc/distributed/c10d/Store.hpp>

#include "distributed/watched_store.h"

namespace reef {
namespace {

constexpr milliseconds kPollFirst{5};
constexpr milliseconds kPollLast{200};
constexpr milliseconds kNamingTakes{2000};
constexpr milliseconds kAddressTrustedAfter{1000};  // by then every survivor has said that it lives
constexpr milliseconds kStoreAnswersWithin{1000};
constexpr milliseconds kOthersHearWithin{1000};

constexpr const char* kVerdict = "verdict";
constexpr const char* kHeard = "heard";
constexpr const char* kOutOfStep = "out_of_step ";  // in place of a rank

std::string key(const char* stage, int rank) { return std::string(stage) + '/' + std::to_string(rank); }

/// Identifies the call, and its process, by which a rank came to an attempt.
struct Claim {
  std::int64_t call = 0;
  Process process;
};

std::string to_record(const Claim& claim) {
  return std::to_string(claim.call) + '\n' + to_record(claim.process);
}

Claim claim_from(const std::string& record) {
  const auto line = record.find('\n');
  return {std::stoll(record.substr(0, line)), Process::from_record(record.substr(line + 1))};
}

std::string to_record(const Verdict& verdict) {
  if (verdict.kind == Verdict::Kind::kOutOfStep) return kOutOfStep + verdict.sentence;
  return std::to_string(verdict.failed_rank) + ' ' + verdict.sentence;
}

Verdict verdict_from(const std::string& record) {
  const auto blank = record.find(' ');
  if (record.starts_with(kOutOfStep)) return {Verdict::Kind::kOutOfStep, -1, record.substr(blank + 1)};
  return {Verdict::Kind::kGone, std::stoi(record.substr(0, blank)), record.substr(blank + 1)};
}

using Kind = Verdict::Kind;
using FateKind = AttemptFate::Kind;

/// Returns whether the call that made `claim` no longer takes part in the attempt. `self` is this process,
/// which calls with number `call`.
bool is_over(const Claim& claim, const AttemptFate& fate, const Process& self, std::int64_t call) {
  if (has_ended(claim.process, self)) return true;
  if (is_same(claim.process, self) && claim.call < call) return true;
  switch (fate.kind) {
    case FateKind::kOpen:
    case FateKind::kTogether:
      return false;
    case FateKind::kUp:
      // A process that lives uses its group, and whether one of another machine lives cannot be told.
      return claim.process.machine != self.machine;
    default:
      return true;
  }
}

}  // namespace

Members::Members(const StorePtr& store, Rendezvous rendezvous, milliseconds timeout, std::string interface)
    : store_(store->clone()),
      rendezvous_(std::move(rendezvous)),
      timeout_(timeout),
      interface_(std::move(interface)),
      self_(Process::self()) {}

bool Members::check_in(std::int64_t call, Deadline deadline) {
  const auto own = to_record(Claim{call, self_});
  const auto claimed = store_->compareSet(key("member", rendezvous_.rank), "", own);
  const AttemptFate fate = AttemptFate::of(*store_);
  if (claimed != own) {
    const Claim earlier = claim_from(claimed);
    if (!is_over(earlier, fate, self_, call)) throw claimed_twice(earlier.process);
    AttemptFate{FateKind::kAnew, ""}.decide(*store_, FateKind::kOpen);
    return false;
  }
  if (fate.kind == FateKind::kFailed) {
    if (have_ended_since()) return false;
    throw ProcessGroupError(fate.reason, rendezvous_.rank);
  }
  if (fate.kind != FateKind::kOpen && fate.kind != FateKind::kTogether) return false;
  const auto size = std::to_string(rendezvous_.world_size);
  const auto agreed = store_->compareSet("world_size", "", size);
  if (agreed != size) {
    throw ProcessGroupError("rank " + std::to_string(rendezvous_.rank) + " (" + self_.text() +
                                ") was started for a world of " + size + ", others for a world of " + agreed +
                                ", and all met at " + address_text(rendezvous_) +
                                ": start every rank with the same world size.",
                            rendezvous_.rank);
  }
  // Who serves the store, for the day when it cannot be asked.
  if (rendezvous_.rank == 0) store_->set("server", rendezvous_.serves ? "0" : "-1");
  if (!await({"checked_in", "check in", FateKind::kOpen, FateKind::kTogether, FateKind::kMissed}, deadline))
    return false;

  std::vector<std::string> keys;
  for (int rank = 0; rank < rendezvous_.world_size; ++rank) keys.push_back(key("member", rank));
  for (const auto& bytes : store_->multiGet(keys)) {
    processes_.push_back(claim_from(std::string(bytes.begin(), bytes.end())).process);
  }
  server_rank_ = std::stoi(store_->get_to_str("server"));
  return true;
}

bool Members::have_ended_since() const {
  for (int rank = 0; rank < rendezvous_.world_size; ++rank) {
    if (rank == rendezvous_.rank) continue;
    const auto record = value_of(*store_, key("member", rank));
    if (record && !has_ended(claim_from(std::string(record->begin(), record->end())).process, self_))
      return false;
  }
  return true;
}

ProcessGroupError Members::claimed_twice(const Process& other) const {
  return {"rank " + std::to_string(rendezvous_.rank) + " of " + std::to_string(rendezvous_.world_size) +
              " is claimed twice, by " + other.text() + " and " + self_.text() +
              ": give each process its own rank, and each job its own address (this one is " +
              address_text(rendezvous_) + ").",
          rendezvous_.rank};
}

void Members::await_connected(Deadline deadline) {
  await({"connected", "connect to the others", FateKind::kTogether, FateKind::kUp, FateKind::kFailed},
        deadline);
}

bool Members::await(const Stage& stage, Deadline deadline) {
  // One counter, not a key per rank, is polled: the cost does not grow with the number of ranks.
  const auto count = std::string(stage.name) + "_count";
  store_->set(key(stage.name, rendezvous_.rank), "1");
  store_->add(count, 1);
  for (auto pause = kPollFirst;; pause = std::min(pause * 2, kPollLast)) {
    // Read before the count: a rank that is through may have done its work and ended by the time we look.
    const auto gone = ended();
    auto fate = store_->add(count, 0) >= rendezvous_.world_size
                    ? AttemptFate{stage.through, ""}.decide(*store_, stage.before)
                    : AttemptFate::of(*store_);
    if (fate.kind == stage.before && gone.empty() && has_passed(deadline))
      fate = AttemptFate{stage.too_late, missing_text(stage)}.decide(*store_, stage.before);
    if (fate.kind == stage.through || fate.kind == FateKind::kUp) return true;
    if (fate.kind == FateKind::kAnew) return false;
    throw_if_failed(fate, gone);
    std::this_thread::sleep_for(std::min(pause, time_left(deadline)));
  }
}

std::string Members::missing_text(const Stage& stage) const {
  std::vector<int> missing;
  for (int rank = 0; rank < rendezvous_.world_size; ++rank) {
    if (!store_->check({key(stage.name, rank)})) missing.push_back(rank);
  }
  return ranks_text(missing) + " of " + std::to_string(rendezvous_.world_size) + " did not " + stage.what +
         " at " + address_text(rendezvous_) + " within " + seconds_text(timeout_) +
         ": look at the output of each, and check that it was started with this address.";
}

void Members::throw_if_failed() const {
  const auto gone = ended();
  throw_if_failed(AttemptFate::of(*store_), gone);
}

void Members::throw_if_failed(const AttemptFate& fate, const std::vector<int>& gone) const {
  if (fate.has_failed()) throw ProcessGroupError(fate.reason, rendezvous_.rank);
  if (!gone.empty()) {
    throw ProcessGroupError(
        text_of(gone.front()) + " ended while the group was coming up: look at its output.",
        rendezvous_.rank);
  }
}

ProcessGroupError Members::failed(const std::string& reason) {
  try {
    const AttemptFate own{FateKind::kFailed, reason};
    auto fate = own.decide(*store_, FateKind::kOpen);
    if (fate.kind == FateKind::kTogether) fate = own.decide(*store_, FateKind::kTogether);
    let_others_hear(rendezvous_.world_size);
    return {fate.has_failed() ? fate.reason : reason, rendezvous_.rank};
  } catch (const std::exception&) {
    return {reason + " The store " + address_text(rendezvous_) +
                " cannot be reached any more: look at the output of rank 0 first.",
            rendezvous_.rank};
  }
}

StorePtr Members::watched(const StorePtr& store, Deadline deadline) const {
  return c10::make_intrusive<WatchedStore>(
      store, [members = shared_from_this()] { members->throw_if_failed(); }, deadline);
}

void Members::throw_if_ended(const std::vector<int>& ranks) const {
  const auto gone = ended(ranks);
  if (!gone.empty()) C10_THROW_ERROR(DistError, text_of(gone.front()) + " has ended");
}

std::shared_ptr<Heartbeat> Members::heartbeat(milliseconds silence) {
  const auto members = shared_from_this();
  return std::make_shared<Heartbeat>(
      store_, rendezvous_.rank, rendezvous_.world_size, silence, kVerdict,
      Heartbeat::Findings{
          [members, silence](int rank) { return members->publish_silence(rank, silence); },
          [members](const std::string& sentence) { return members->publish_out_of_step(sentence); }});
}

std::string Members::publish_silence(int rank, milliseconds silence) {
  return store_->compareSet(kVerdict, "",
                            to_record({Kind::kGone, rank,
                                       text_of(rank) + " has given no sign of life for " +
                                           seconds_text(silence) + ": it is stopped, or its machine hangs"}));
}

std::string Members::publish_out_of_step(const std::string& sentence) {
  return store_->compareSet(kVerdict, "", to_record({Kind::kOutOfStep, -1, sentence}));
}

bool Members::on_one_machine() const {
  return std::all_of(processes_.begin(), processes_.end(),
                     [this](const Process& each) { return each.machine == self_.machine; });
}

GlooNetwork Members::network() const {
  const std::string from_environment = process_environment("GLOO_SOCKET_IFNAME").value_or("");
  return {.interface = interface_.empty() ? from_environment : interface_, .one_machine = on_one_machine()};
}

std::vector<int> Members::ended() const {
  std::vector<int> result;
  for (std::size_t rank = 0; rank < processes_.size(); ++rank) {
    if (has_ended(processes_[rank], self_)) result.push_back(static_cast<int>(rank));
  }
  return result;
}

std::vector<int> Members::ended(const std::vector<int>& ranks) const {
  auto result = ended();
  if (ranks.empty()) return result;
  std::erase_if(result, [&](int rank) { return std::find(ranks.begin(), ranks.end(), rank) == ranks.end(); });
  return result;
}

std::string Members::text_of(int rank) const {
  return "rank " + std::to_string(rank) + " (" + processes_[static_cast<std::size_t>(rank)].text() + ")";
}

bool Members::reach_store() {
  try {
    // Sending succeeds into a broken connection; the answer is what tells.
    const auto alive = key("alive", rendezvous_.rank);
    store_->set(alive, "1");
    store_->wait({alive}, kStoreAnswersWithin);
    return true;
  } catch (const std::exception&) {
    return false;
  }
}

int Members::by_address(std::string_view error_text) const {
  int found = -1;
  for (int rank = 0; rank < rendezvous_.world_size; ++rank) {
    const auto& process = processes_[static_cast<std::size_t>(rank)];
    if (process.machine == self_.machine || store_->check({key("alive", rank)})) continue;
    const bool stands = std::any_of(
        process.addresses.begin(), process.addresses.end(),
        [&](const auto& address) { return error_text.find('[' + address + ']') != std::string_view::npos; });
    if (!stands) continue;
    if (found >= 0) return -1;
    found = rank;
  }
  return found;
}

/// "rank 2 (process 7 on host h) is gone, and so is rank 3".
std::string Members::gone_text(const std::vector<int>& gone, int first) const {
  std::vector<int> others;
  std::copy_if(gone.begin(), gone.end(), std::back_inserter(others),
               [first](int rank) { return rank != first; });
  auto text = text_of(first) + " is gone";
  if (!others.empty()) text += (others.size() == 1 ? ", and so is " : ", and so are ") + ranks_text(others);
  return text;
}

/// Whoever waits in the collective fails with it and says so; who is stuck elsewhere, or still computes, does
/// not.
std::string Members::silent_text(const std::vector<int>& ranks) const {
  std::vector<int> silent;
  for (int rank = 0; rank < rendezvous_.world_size; ++rank) {
    const bool asked = ranks.empty() || std::find(ranks.begin(), ranks.end(), rank) != ranks.end();
    if (asked && !store_->check({key("alive", rank)})) silent.push_back(rank);
  }
  if (silent.empty()) return "; all have failed in a collective";
  return "; all but " + ranks_text(silent) + " have failed in a collective, so look at " +
         (silent.size() == 1 ? "that one" : "those");
}

Verdict Members::name_the_gone(const std::string& error_text, const std::vector<int>& ranks,
                               const std::string& known) {
  // A store whose host has vanished from the network answers nothing, and c10d waits for it without a limit.
  const auto limit =
      std::chrono::steady_clock::now() + kNamingTakes + kStoreAnswersWithin + kOthersHearWithin;
  const auto named = within(limit, [members = shared_from_this(), error_text, ranks, known] {
    return members->ask(error_text, ranks, known);
  });
  if (named) return *named;
  if (!known.empty()) return verdict_from(known);
  const std::vector<int> gone = ended();
  if (gone.empty() && server_rank_ >= 0 &&
      processes_[static_cast<std::size_t>(server_rank_)].machine == self_.machine) {
    return {Kind::kGone, server_rank_,
            text_of(server_rank_) + ", which serves the store, does not answer: it is stopped"};
  }
  return without_store(gone);
}

Verdict Members::ask(const std::string& error_text, const std::vector<int>& ranks, const std::string& known) {
  const auto start = std::chrono::steady_clock::now();
  bool reachable = reach_store();
  for (bool time_is_up = false;; std::this_thread::sleep_for(4 * kPollFirst)) {
    const auto gone = time_is_up && ended(ranks).empty() ? ended() : ended(ranks);
    try {
      if (reachable) {
        if (store_->check({kVerdict})) return hear();
        // A rank that failed in a collective states why before it ends. Those that ended silently are the
        // cause.
        if (!gone.empty()) return publish({Kind::kGone, gone.front(), gone_text(gone, gone.front())});
        const auto waited = std::chrono::steady_clock::now() - start;
        const int suspect = waited > kAddressTrustedAfter ? by_address(error_text) : -1;
        if (suspect >= 0)
          return publish({Kind::kGone, suspect, text_of(suspect) + " is gone or cannot be reached"});
        if (time_is_up)
          return publish({Kind::kGone, -1, "no rank's process is known to have ended" + silent_text(ranks)});
      }
    } catch (const std::exception&) {
      reachable = false;
    }
    if (!reachable && !known.empty()) return verdict_from(known);
    if (!reachable && (time_is_up || !gone.empty())) return without_store(gone);
    time_is_up = has_passed(start + kNamingTakes);
  }
}

Verdict Members::without_store(const std::vector<int>& gone) const {
  const auto store = "the store " + address_text(rendezvous_) + " cannot be reached any more";
  // A rank that serves the store and fails in a collective stays until the others have heard why. So if it is
  // gone, it was the first, and those gone with it have followed.
  const bool with_server = std::find(gone.begin(), gone.end(), server_rank_) != gone.end();
  if (with_server) return {Kind::kGone, server_rank_, gone_text(gone, server_rank_)};
  if (gone.size() == 1) return {Kind::kGone, gone.front(), gone_text(gone, gone.front())};
  if (gone.size() > 1)
    return {Kind::kGone, -1, ranks_text(gone) + " are gone; which was first cannot be told: " + store};
  if (rendezvous_.store == StoreKind::kFile) return {Kind::kGone, -1, store};
  if (server_rank_ < 0)
    return {Kind::kGone, -1, store + ": the process that served it (torchrun's agent) is gone"};
  if (processes_[static_cast<std::size_t>(server_rank_)].machine != self_.machine) {
    return {Kind::kGone, server_rank_,
            text_of(server_rank_) + ", which served the store, cannot be reached any more"};
  }
  return {Kind::kGone, -1, store + ": " + text_of(server_rank_) + " has closed it"};
}

Verdict Members::publish(const Verdict& verdict) {
  store_->compareSet(kVerdict, "", to_record(verdict));
  return hear();
}

Verdict Members::hear() {
  auto verdict = verdict_from(store_->get_to_str(kVerdict));
  let_others_hear(rendezvous_.world_size - (verdict.failed_rank >= 0 ? 1 : 0));
  return verdict;
}

void Members::let_others_hear(int listeners) {
  store_->add(kHeard, 1);
  if (!rendezvous_.serves) return;
  const auto deadline = std::chrono::steady_clock::now() + kOthersHearWithin;
  while (store_->add(kHeard, 0) < listeners && !has_passed(deadline)) std::this_thread::sleep_for(kPollFirst);
}

Heartbeat* heart_of(c10d::ProcessGroup& group) {
  const auto* ours = dynamic_cast<const MemberGroup*>(&group);
  return ours == nullptr ? nullptr : ours->heart.get();
}

MemberGroup::MemberGroup(StorePtr store, int rank, int size, std::string group_name,
                         std::shared_ptr<Members> group_members, std::shared_ptr<Heartbeat> group_heart,
                         std::vector<int> ranks_of_members)
    : c10d::ProcessGroup(std::move(store), rank, size),
      name(std::move(group_name)),
      members(std::move(group_members)),
      heart(std::move(group_heart)),
      ranks(std::move(ranks_of_members)) {
  if (heart == nullptr) return;
  std::vector<int> of_members;
  for (int each = 0; each < size; ++each) of_members.push_back(rank_of_member(each));
  heart->calls().begin_group(name, of_members);
}

MemberGroup::~MemberGroup() {
  if (heart != nullptr) heart->calls().end_group(name);
}

namespace {

// Does it with the order of calls of the group, if it has one, and its name there.
template <class What>
void with_calls(c10d::ProcessGroup& group, const What& what) {
  const auto* ours = dynamic_cast<const MemberGroup*>(&group);
  if (ours != nullptr && ours->heart != nullptr) what(ours->heart->calls(), ours->name);
}

}  // namespace

void note_call(c10d::ProcessGroup& group, const std::string& call, const std::string& of_shard) {
  with_calls(group, [&](CallOrder& calls, const std::string& name) { calls.add(name, call, of_shard); });
}
void note_shard_ends(c10d::ProcessGroup& group, const std::string& shard) {
  with_calls(group, [&](CallOrder& calls, const std::string& name) { calls.end_shard(name, shard); });
}

namespace {

// Begins a sentence: which rank this is, as its program counts, and what has failed.
std::string failed_here(c10d::ProcessGroup& group, const std::string& name) {
  const auto* ours = dynamic_cast<const MemberGroup*>(&group);
  auto who = "rank " + std::to_string(group.getRank()) + " of " + std::to_string(group.getSize());
  if (ours != nullptr && !ours->ranks.empty()) {
    who = "rank " + std::to_string(ours->members->rank()) + " of " +
          std::to_string(ours->members->world_size()) + " (" + who + " in a subgroup)";
  }
  return who + ": " + name + " failed: ";
}

}  // namespace

std::exception_ptr rank_failed(c10d::ProcessGroup& group, const std::string& name,
                               const std::exception& error) {
  auto text = message_of(error);
  text = text.substr(0, text.find('\n'));
  const auto* ours = dynamic_cast<const MemberGroup*>(&group);
  const auto prefix = failed_here(group, name);
  if (ours == nullptr || ours->members == nullptr) {
    return std::make_exception_ptr(
        RankFailed(prefix +
                       "a rank is gone or stuck; which one cannot be told, because the group was not made by "
                       "reef::init_process_group. The backend says: " +
                       text,
                   -1));
  }
  const auto verdict = ours->members->name_the_gone(text, ours->ranks,
                                                    ours->heart == nullptr ? "" : ours->heart->stopped_by());
  if (verdict.kind == Kind::kOutOfStep) {
    return std::make_exception_ptr(RanksOutOfStep(
        prefix + verdict.sentence +
        ". All ranks make such calls alike: run as many passes and steps on each, and where batches end "
        "earlier on some, end the loop on all of them; start the job again."));
  }
  if (verdict.failed_rank < 0) {
    return std::make_exception_ptr(RankFailed(prefix + verdict.sentence + ". The backend says: " + text, -1));
  }
  return std::make_exception_ptr(RankFailed(
      prefix + verdict.sentence + "; look at its output, and start the job again.", verdict.failed_rank));
}

std::exception_ptr rank_sent_nonsense(c10d::ProcessGroup& group, const std::string& name, int rank,
                                      const std::string& what) {
  const auto* ours = dynamic_cast<const MemberGroup*>(&group);
  const bool has_members = ours != nullptr && ours->members != nullptr;
  const int failed = has_members ? ours->rank_of_member(rank) : rank;
  return std::make_exception_ptr(RankFailed(
      failed_here(group, name) +
          (has_members ? ours->members->text_of(failed) : "rank " + std::to_string(failed)) + " has sent " +
          what + "; look at its output, at its memory and at the network, and start the job again.",
      failed));
}

}  // namespace reef
