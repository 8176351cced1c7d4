#pragma once

#include <cstddef>
#include <cstdint>
#include <deque>
#include <map>
#include <mutex>
#include <optional>
#include <set>
#include <string>
#include <thread>
#include <vector>

namespace reef {

/// What a rank has made so far of the calls that all ranks of a group make alike, in one order.
struct CallsMade {
  static constexpr std::size_t kKept = 256;
  static constexpr const char* kShardBegins = "reef::shard";  ///< the call
  static constexpr const char* kLocalUpdatesBegin = "reef::LocalUpdates";
  static constexpr const char* kDdpHookBegins = "reef::DdpHook";

  struct Call {
    std::string text;
    std::string of;  ///< which shard's; "": none's
    bool operator==(const Call&) const = default;
  };

  std::int64_t count = 0;
  std::deque<Call> last;        ///< so many of them at most
  std::set<std::string> ended;  ///< shards, whose calls this rank will not make any more
  bool by_one_thread = true;    ///< else their order means nothing

  void add(Call call);
  /// Call number `number`, counted from 0; nullptr if it has not been made, or is no longer known.
  const Call* at(std::int64_t number) const;
  /// The first call that the two have not made alike, of those that are known of both, or that one has made
  /// and the other will not make.
  std::optional<std::int64_t> first_difference(const CallsMade& other) const;

 private:
  std::optional<std::int64_t> first_that_never_comes(const CallsMade& other) const;
};

/// The calls of this rank in all groups of a family (a group and its subgroups), and whether they are those
/// of other ranks. This asks for no time: a rank that is late has made fewer calls, and a rank that has gone
/// another way has made another call in the place of one. Used by any thread.
class CallOrder {
 public:
  /// Ranks count as in the first group of the family.
  explicit CallOrder(int rank) : rank_(rank) {}

  /// This rank's `name` of a group is the same on all of `ranks`, and of no other.
  void begin_group(const std::string& name, const std::vector<int>& ranks);
  void end_group(const std::string& name);
  /// Calls of a second thread end the comparing in this group, and those of threads that serve the program
  /// (ServesProgram) are left out.
  void add(const std::string& group, const std::string& call, const std::string& of_shard = "");
  /// A shard has ended on this rank. The next that begins may have its name.
  void end_shard(const std::string& group, const std::string& shard);

  /// All of it, for the others.
  std::string record() const;
  /// Whose records are to be compared with this one: of each group the next four.
  std::vector<int> watched() const;

  struct Difference {
    std::string group;
    std::int64_t number;
    std::vector<int> ranks;  ///< of the group
  };
  std::optional<Difference> difference(const std::string& record_of_other) const;

  /// What each rank does there: "call 7 of the group is the backward pass of step 3 on ranks 0 and 2, and
  /// full_state_dict() on rank 1". `records` are those of other ranks.
  std::string text(const Difference& difference, const std::map<int, std::string>& records) const;

 private:
  struct OfGroup {
    std::vector<int> ranks;
    std::optional<std::thread::id> thread;
    CallsMade calls;
  };

  const int rank_;
  mutable std::mutex mutex_;
  std::map<std::string, OfGroup> groups_;
};

/// While it lives, this thread does what the program's thread has given it, in an order of its own.
class ServesProgram {
 public:
  ServesProgram() { ++depth; }
  ~ServesProgram() { --depth; }
  ServesProgram(const ServesProgram&) = delete;
  ServesProgram& operator=(const ServesProgram&) = delete;
  static bool is_on() { return depth > 0; }

 private:
  static inline thread_local int depth = 0;
};

/// "rank 2" or "ranks 1, 2 and 3".
std::string ranks_text(const std::vector<int>& ranks);

}  // namespace reef
