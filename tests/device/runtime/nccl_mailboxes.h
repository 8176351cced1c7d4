// The shared memory of the ranks of a played communicator, which all their processes map. It has a mailbox
// for each ordered pair of ranks and each line. Everything that ranks tell each other goes through these
// mailboxes, one piece at a time. Ranks that wait sleep in the kernel.
#pragma once

#include <array>
#include <atomic>
#include <cstddef>
#include <cstdint>
#include <string>
#include <vector>

namespace reef::played {

/// Identifies shared memory: an open file of one of the processes. The file has no name in any folder, so
/// nothing is left when the processes end, however they end.
struct SharedName {
  std::uint64_t number = 0;  // A random number.
  std::int32_t process = 0, file = 0;
};
/// Makes shared memory. It can be found by its name until this process forgets it or ends.
SharedName make_shared_memory();
/// Closes shared memory that this process has made. Processes that have mapped it can still use it. Does
/// nothing for any other name.
void forget_shared_memory(const SharedName& name);

/// Identifies the call that a message belongs to. The labels of sender and receiver must be equal.
using Label = std::array<std::uint64_t, 5>;

/// One message to or from another rank. Messages from one rank to another arrive in order.
struct Message {
  int peer = 0;
  bool leaves = false;  // True for a message to the peer, false for one from it.
  char* bytes = nullptr;
  std::size_t size = 0;
  Label label{};
  std::size_t done = 0;
  bool is_posted = false, is_over = false;
};

/// How an exchange of messages ended.
struct Outcome {
  enum class How : std::uint8_t {
    kDone,
    kDiffers,   // The peer sends something other than this rank receives.
    kReported,  // A rank has reported an error, so no exchange can continue.
    kAborted,   // This rank has aborted while it waited for the peer.
    kGone       // The peer's process has ended; this is only checked on Line::kHosts.
  };
  How how = How::kDone;
  int peer = -1;
  Label theirs{};  // The label that the peer sends if it differs.
};

/// Separate mailboxes for hosts, which make and split communicators, because at the same time streams may
/// still wait for each other.
enum class Line : std::uint8_t { kHosts, kStreams };
constexpr int kLines = 2;

class Mailboxes {
 public:
  static constexpr std::size_t kPieceBytes = 256 << 10;
  static constexpr int kMaxRanks = 64;

  /// Joins as `rank` without waiting for the other ranks. Throws std::runtime_error if the memory cannot be
  /// found, if others have joined with another number of ranks, or if this rank has joined already.
  Mailboxes(const SharedName& name, int ranks, int rank);
  ~Mailboxes();
  Mailboxes(const Mailboxes&) = delete;
  Mailboxes& operator=(const Mailboxes&) = delete;

  /// Sends and receives all messages, in whatever order they can move, and waits until all have arrived.
  /// There may be only one exchange on a line at a time.
  Outcome exchange(Line line, std::vector<Message> messages);

  /// Ends all current and later exchanges of this rank. The other ranks are not told.
  void abort();
  void wait_until_aborted();
  bool is_aborted() const { return aborted_.load(); }
  /// Ends all current and later exchanges of all ranks. Only the first report is kept.
  void report(const std::string& words);
  /// Returns the report, or an empty string if there is none.
  std::string reported();

  int ranks() const { return ranks_; }
  int rank() const { return rank_; }

 private:
  struct Shared;
  struct Mailbox;

  Mailbox& box(Line line, int from, int to);
  bool move(Line line, Message& message, Outcome& outcome);
  void wake(int rank);
  bool is_gone(int rank) const;
  template <class Condition>
  void sleep_until(const Condition& holds);

  int ranks_, rank_;
  std::size_t bytes_ = 0;
  Shared* shared_ = nullptr;
  std::atomic<bool> aborted_{false};
};

}  // namespace reef::played
