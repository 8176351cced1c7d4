#include "device/runtime/nccl_mailboxes.h"

#include <fcntl.h>
#include <linux/futex.h>
#include <poll.h>
#include <sys/mman.h>
#include <sys/random.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <cstring>
#include <ctime>
#include <limits>
#include <map>
#include <mutex>
#include <stdexcept>
#include <system_error>

namespace reef::played {
namespace {

using Word = std::atomic<std::uint32_t>;
static_assert(Word::is_always_lock_free && sizeof(Word) == 4, "the kernel waits for a change of such a word");

constexpr long kLookAgainNanoseconds = 200'000'000;
constexpr std::size_t kWordsBytes = 1024;

void sleep_while(Word& word, std::uint32_t is) {
  const timespec wait{0, kLookAgainNanoseconds};
  syscall(SYS_futex, &word, FUTEX_WAIT, is, &wait, nullptr, 0);
}

std::system_error failed(const char* what) { return {errno, std::generic_category(), what}; }

// The files that this process has made.
struct Made {
  std::mutex mutex;
  std::map<std::uint64_t, int> files;
};
Made& made() {
  static Made all;
  return all;
}

class File {
 public:
  explicit File(int number) : number_(number) {}
  ~File() {
    if (number_ >= 0) close(number_);
  }
  File(const File&) = delete;
  File& operator=(const File&) = delete;
  int number() const { return number_; }

 private:
  int number_;
};

}  // namespace

// The shared memory. It is initialized to zeros, which is the right initial state of everything in it.
struct Mailboxes::Shared {
  struct Member {
    Word process;  // 0 until the rank has joined.
    Word pulse;    // Changes whenever something changes that this rank may wait for.
  };
  std::atomic<std::uint64_t> number;
  Word ranks;   // 0 until a rank has joined.
  Word report;  // 0: nothing, 1: being written, 2: complete.
  char words[kWordsBytes];
  Member members[kMaxRanks];
};

// Holds one piece of a message. It is empty if all posted pieces have been taken.
struct Mailboxes::Mailbox {
  Word posted, taken;
  std::size_t bytes;
  Label label;
  char piece[kPieceBytes];
};

SharedName make_shared_memory() {
  SharedName name{0, getpid(), memfd_create("played_nccl", MFD_CLOEXEC)};
  if (name.file < 0) throw failed("memory to share cannot be made");
  if (getrandom(&name.number, sizeof name.number, 0) != sizeof name.number ||
      pwrite(name.file, &name.number, sizeof name.number, 0) != sizeof name.number) {
    close(name.file);
    throw failed("memory to share cannot be written");
  }
  const std::lock_guard lock(made().mutex);
  made().files[name.number] = name.file;
  return name;
}

void forget_shared_memory(const SharedName& name) {
  const std::lock_guard lock(made().mutex);
  const auto found = made().files.find(name.number);
  if (found == made().files.end()) return;
  close(found->second);
  made().files.erase(found);
}

Mailboxes::Mailboxes(const SharedName& name, int ranks, int rank) : ranks_(ranks), rank_(rank) {
  const std::string path = "/proc/" + std::to_string(name.process) + "/fd/" + std::to_string(name.file);
  const File file(open(path.c_str(), O_RDWR | O_CLOEXEC));
  std::uint64_t number = 0;
  if (file.number() < 0 || pread(file.number(), &number, sizeof number, 0) != sizeof number ||
      number != name.number)
    throw std::runtime_error("the process that made the unique id has ended or does not hold it any more");
  const std::size_t boxes = static_cast<std::size_t>(kLines) * ranks * ranks;
  bytes_ = sizeof(Shared) + boxes * sizeof(Mailbox);
  // Enlarges the file by writing its last byte, in a mailbox that is never used. The file never shrinks, so
  // this is safe even if ranks disagree on their number, which is detected below.
  if (pwrite(file.number(), "", 1, static_cast<off_t>(bytes_ - 1)) != 1)
    throw failed("memory to share cannot be made larger");
  void* const at = mmap(nullptr, bytes_, PROT_READ | PROT_WRITE, MAP_SHARED, file.number(), 0);
  if (at == MAP_FAILED) throw failed("memory to share cannot be mapped");
  shared_ = static_cast<Shared*>(at);
  std::uint32_t others = 0, other = 0;
  std::string wrong;
  if (!shared_->ranks.compare_exchange_strong(others, static_cast<std::uint32_t>(ranks)) &&
      others != static_cast<std::uint32_t>(ranks))
    wrong = "it was joined as one of " + std::to_string(others) + " ranks";
  else if (!shared_->members[rank].process.compare_exchange_strong(other,
                                                                   static_cast<std::uint32_t>(getpid())))
    wrong = "process " + std::to_string(other) + " has joined as this rank";
  if (wrong.empty()) return;
  munmap(at, bytes_);
  throw std::runtime_error("rank " + std::to_string(rank) + " of " + std::to_string(ranks) +
                           " cannot join with this unique id: " + wrong);
}

Mailboxes::~Mailboxes() { munmap(shared_, bytes_); }

Mailboxes::Mailbox& Mailboxes::box(Line line, int from, int to) {
  auto* const first = reinterpret_cast<Mailbox*>(shared_ + 1);
  return first[(static_cast<std::size_t>(line) * ranks_ + from) * ranks_ + to];
}

void Mailboxes::wake(int rank) {
  Word& pulse = shared_->members[rank].pulse;
  pulse.fetch_add(1);
  syscall(SYS_futex, &pulse, FUTEX_WAKE, std::numeric_limits<int>::max(), nullptr, nullptr, 0);
}

// A killed process is gone even if its parent has not waited for it yet.
bool Mailboxes::is_gone(int rank) const {
  const auto process = static_cast<pid_t>(shared_->members[rank].process.load());
  if (process == 0 || process == getpid()) return false;
  const File handle(static_cast<int>(syscall(SYS_pidfd_open, process, 0)));
  if (handle.number() < 0) return errno == ESRCH;
  pollfd end{handle.number(), POLLIN, 0};
  return poll(&end, 1, 0) > 0;
}

// Moves one piece of the message if possible. Returns whether anything has changed.
bool Mailboxes::move(Line line, Message& message, Outcome& outcome) {
  Mailbox& mail = message.leaves ? box(line, rank_, message.peer) : box(line, message.peer, rank_);
  const bool is_empty = mail.posted.load() == mail.taken.load();
  if (message.leaves) {
    if (!is_empty) return false;
    if (message.is_posted) return message.is_over = true;
    mail.bytes = std::min(kPieceBytes, message.size - message.done);
    mail.label = message.label;
    if (mail.bytes > 0) std::memcpy(mail.piece, message.bytes + message.done, mail.bytes);
    message.done += mail.bytes;
    message.is_posted = message.done == message.size;
    mail.posted.fetch_add(1);
  } else {
    if (is_empty) return false;
    if (mail.label != message.label || mail.bytes > message.size - message.done) {
      outcome = {Outcome::How::kDiffers, message.peer, mail.label};
      return true;
    }
    if (mail.bytes > 0) std::memcpy(message.bytes + message.done, mail.piece, mail.bytes);
    message.done += mail.bytes;
    message.is_over = message.done == message.size;
    mail.taken.fetch_add(1);
  }
  wake(message.peer);
  return true;
}

Outcome Mailboxes::exchange(Line line, std::vector<Message> messages) {
  Word& pulse = shared_->members[rank_].pulse;
  const auto ranks = static_cast<std::size_t>(ranks_);
  std::vector<bool> waits(2 * ranks), gone(ranks);  // `waits` has an element for each rank and direction.
  for (;;) {
    const std::uint32_t before = pulse.load();
    // This is checked before the mailboxes are, because a rank that is gone cannot change them any more.
    for (std::size_t peer = 0; line == Line::kHosts && peer < ranks; ++peer)
      gone[peer] = (waits[2 * peer] || waits[2 * peer + 1]) && is_gone(static_cast<int>(peer));
    waits.assign(2 * ranks, false);
    bool moved = false;
    int awaited = -1;
    for (Message& message : messages) {
      const std::size_t way = 2 * static_cast<std::size_t>(message.peer) + (message.leaves ? 1 : 0);
      if (message.is_over || waits[way]) continue;  // Messages in one direction keep their order.
      Outcome outcome;
      moved |= move(line, message, outcome);
      if (outcome.how != Outcome::How::kDone) return outcome;
      waits[way] = !message.is_over;
      if (!message.is_over && (awaited < 0 || gone[message.peer])) awaited = message.peer;
    }
    if (awaited < 0) return {};
    if (aborted_.load()) return {Outcome::How::kAborted, awaited, {}};
    if (shared_->report.load() == 2) return {Outcome::How::kReported, awaited, {}};
    if (moved) continue;
    if (gone[awaited]) return {Outcome::How::kGone, awaited, {}};
    sleep_while(pulse, before);
  }
}

void Mailboxes::abort() {
  aborted_.store(true);
  wake(rank_);
}

template <class Condition>
void Mailboxes::sleep_until(const Condition& holds) {
  Word& pulse = shared_->members[rank_].pulse;
  for (;;) {
    const std::uint32_t before = pulse.load();
    if (holds()) return;
    sleep_while(pulse, before);
  }
}

void Mailboxes::wait_until_aborted() {
  sleep_until([this] { return aborted_.load(); });
}

void Mailboxes::report(const std::string& words) {
  std::uint32_t nothing = 0;
  if (!shared_->report.compare_exchange_strong(nothing, 1)) return;
  shared_->words[words.copy(shared_->words, kWordsBytes - 1)] = '\0';
  shared_->report.store(2);
  for (int rank = 0; rank < ranks_; ++rank) wake(rank);
}

std::string Mailboxes::reported() {
  if (shared_->report.load() == 0) return "";
  sleep_until([this] { return shared_->report.load() == 2; });
  return shared_->words;
}

}  // namespace reef::played
