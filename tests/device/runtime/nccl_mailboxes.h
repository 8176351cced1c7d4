// What the ranks of a played communicator share: memory that their processes have mapped, with a mailbox for
// each ordered pair of ranks and each line. Everything that ranks tell each other is put into these
// mailboxes, a piece at a time. Who waits sleeps in the kernel.
#pragma once

#include <array>
#include <atomic>
#include <cstddef>
#include <cstdint>
#include <string>
#include <vector>

namespace reef::played {

/// Says where processes find the memory to share: it is an open file of one of them, without a name in any
/// folder, so that nothing is left of it when they end, however they end.
struct SharedName {
  std::uint64_t number = 0;  // random
  std::int32_t process = 0, file = 0;
};
/// Makes memory to be shared. It can be found by its name until this process forgets it or ends.
SharedName make_shared_memory();
/// Closes what this process has made. Whoever has mapped it keeps it. Does nothing for any other name.
void forget_shared_memory(const SharedName& name);

/// What a message is about. Sender and receiver must say the same.
using Label = std::array<std::uint64_t, 5>;

/// One message to or from another rank. Messages from one rank to another arrive in order.
struct Message {
  int peer = 0;
  bool leaves = false;  // to the peer; otherwise from it
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
    kDiffers,   // the peer sends something else than this rank receives
    kReported,  // a rank has reported what went wrong, so no exchange can go on
    kAborted,   // this rank has aborted while it waited for the peer
    kGone       // the peer's process has ended; only looked for on the line of hosts
  };
  How how = How::kDone;
  int peer = -1;
  Label theirs{};  // what the peer sends instead
};

/// Hosts make and split communicators while streams may still wait for each other.
enum class Line : std::uint8_t { kHosts, kStreams };
constexpr int kLines = 2;

class Mailboxes {
 public:
  static constexpr std::size_t kPieceBytes = 256 << 10;
  static constexpr int kMaxRanks = 64;

  /// Joins as `rank`. Does not wait for the others. Throws std::runtime_error if the memory cannot be found,
  /// or other ranks use it otherwise: with another number of ranks, or as the same rank.
  Mailboxes(const SharedName& name, int ranks, int rank);
  ~Mailboxes();
  Mailboxes(const Mailboxes&) = delete;
  Mailboxes& operator=(const Mailboxes&) = delete;

  /// Sends and receives all messages, whichever can move first, and waits until all have arrived. One
  /// exchange of a line at a time.
  Outcome exchange(Line line, std::vector<Message> messages);

  /// Ends the exchanges of this rank, now and later. The other ranks do not get to know.
  void abort();
  void wait_until_aborted();
  bool is_aborted() const { return aborted_.load(); }
  /// Ends the exchanges of all ranks, now and later. The first report counts.
  void report(const std::string& words);
  /// What has been reported, empty if nothing.
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
