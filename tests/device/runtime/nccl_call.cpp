#include "device/runtime/nccl_call.h"

#include <algorithm>
#include <cstring>

#include "device/runtime/played_cuda.h"

namespace reef::played {
namespace {

// The size of the part of a reduction that is processed at once, so that the inputs of all ranks are never in
// memory as a whole.
constexpr std::size_t kReducedBytes = 1 << 20;

const char* name_of(Function function) {
  constexpr const char* kNames[] = {"ncclAllReduce", "ncclReduce",   "ncclBroadcast", "ncclReduceScatter",
                                    "ncclAllGather", "ncclAlltoAll", "ncclGather",    "ncclScatter",
                                    "ncclSend",      "ncclRecv"};
  return kNames[static_cast<std::size_t>(function)];
}
const char* name_of(ncclDataType_t type) {
  constexpr const char* kNames[ncclNumTypes] = {"int8",    "uint8",    "int32",      "uint32",
                                                "int64",   "uint64",   "float16",    "float32",
                                                "float64", "bfloat16", "float8e4m3", "float8e5m2"};
  return kNames[type];
}
const char* name_of(ncclRedOp_t op) {
  constexpr const char* kNames[] = {"sum", "prod", "max", "min", "avg", "sum of multiples"};
  return kNames[op];
}

char* reached(const void* address) { return static_cast<char*>(reach(address)); }
void copy(char* to, const char* from, std::size_t bytes) {
  if (bytes > 0 && to != from) std::memmove(to, from, bytes);
}

// The messages of one collective: one from each rank to every other rank, many of them empty.
class Round {
 public:
  Round(const Call& call, Mailboxes& mailboxes)
      : label_(call.label()),
        mailboxes_(mailboxes),
        messages_(2 * static_cast<std::size_t>(mailboxes.ranks())) {}

  void send(int peer, const char* bytes, std::size_t size) {
    messages_[2 * peer] = {peer, true, const_cast<char*>(bytes), size, label_};
  }
  void receive(int peer, char* bytes, std::size_t size) {
    messages_[2 * peer + 1] = {peer, false, bytes, size, label_};
  }
  Outcome run() {
    for (int peer = 0; peer < mailboxes_.ranks(); ++peer) {
      Message& leaves = messages_[2 * peer];
      Message& arrives = messages_[2 * peer + 1];
      if (leaves.size == 0) send(peer, nullptr, 0);
      if (arrives.size == 0) receive(peer, nullptr, 0);
      if (peer == mailboxes_.rank()) copy(arrives.bytes, leaves.bytes, arrives.size);
    }
    std::erase_if(messages_, [this](const Message& each) { return each.peer == mailboxes_.rank(); });
    return mailboxes_.exchange(Line::kStreams, std::move(messages_));
  }

 private:
  Label label_;
  Mailboxes& mailboxes_;
  std::vector<Message> messages_;
};

// Runs any function that reduces. In a reduce-scatter, rank r gets block r; otherwise all ranks, or only the
// root, get block 0.
Outcome run_reduction(const Call& call, Mailboxes& mailboxes) {
  const int ranks = mailboxes.ranks(), self = mailboxes.rank();
  const bool scatters = call.function == Function::kReduceScatter;
  const auto receives = [&](int rank) { return call.function != Function::kReduce || rank == call.root; };
  const std::size_t element = bytes_of(call.type), part = kReducedBytes / element;
  const char* const from = reached(call.send);
  char* const to = reached(call.receive);
  std::vector<std::vector<char>> mine(ranks), theirs(ranks);
  std::size_t at = 0;
  do {
    const std::size_t count = std::min(part, call.count - at);
    Round round(call, mailboxes);
    std::vector<const char*> inputs;
    for (int peer = 0; peer < ranks; ++peer) {
      mine[peer].resize(receives(peer) ? count * element : 0);
      theirs[peer].resize(receives(self) ? count * element : 0);
      const std::size_t block = scatters ? static_cast<std::size_t>(peer) * call.count : 0;
      copy(mine[peer].data(), from + (block + at) * element, mine[peer].size());
      prepare(call.reduction, call.type, ranks, mine[peer].data(), mine[peer].size() / element);
      round.send(peer, mine[peer].data(), mine[peer].size());
      round.receive(peer, theirs[peer].data(), theirs[peer].size());
      inputs.push_back(theirs[peer].data());
    }
    const Outcome outcome = round.run();
    if (outcome.how != Outcome::How::kDone) return outcome;
    if (receives(self)) combine(call.reduction, call.type, inputs, to + at * element, count);
    at += count;
  } while (at < call.count);
  return {};
}

}  // namespace

bool Call::reduces() const {
  return function == Function::kAllReduce || function == Function::kReduce ||
         function == Function::kReduceScatter;
}

bool Call::has_root() const {
  return function == Function::kReduce || function == Function::kBroadcast || function == Function::kGather ||
         function == Function::kScatter;
}

Label Call::label() const {
  const auto sends = function == Function::kRecv ? Function::kSend : function;
  return {static_cast<std::uint64_t>(sends), static_cast<std::uint64_t>(type),
          reduces() ? static_cast<std::uint64_t>(reduction.op) : 0,
          has_root() ? static_cast<std::uint64_t>(root) : 0, count};
}

std::string describe(const Label& label) {
  Call call;
  call.function = static_cast<Function>(label[0]);
  call.type = static_cast<ncclDataType_t>(label[1]);
  call.reduction.op = static_cast<ncclRedOp_t>(label[2]);
  call.root = static_cast<int>(label[3]);
  call.count = label[4];
  return describe(call);
}

std::string describe(const Call& call) {
  const char* const root = call.has_root()                    ? ", root "
                           : call.function == Function::kRecv ? ", from rank "
                                                              : "";
  return std::string(name_of(call.function)) + " of " + std::to_string(call.count) + " " +
         name_of(call.type) + (call.reduces() ? std::string(", ") + name_of(call.reduction.op) : "") + root +
         (*root != '\0' ? std::to_string(call.root) : "");
}

Outcome run_collective(const Call& call, Mailboxes& mailboxes) {
  if (call.reduces()) {
    Call with_factor = call;
    if (call.reduction.device_factor != nullptr)
      std::memcpy(with_factor.reduction.factor.data(), reach(call.reduction.device_factor),
                  bytes_of(call.type));
    return run_reduction(with_factor, mailboxes);
  }
  const std::size_t bytes = call.bytes();
  const int self = mailboxes.rank();
  const bool is_root = self == call.root;
  const char* const from = reached(call.send);
  char* const to = reached(call.receive);
  Round round(call, mailboxes);
  for (int peer = 0; peer < mailboxes.ranks(); ++peer) {
    const std::size_t block = static_cast<std::size_t>(peer) * bytes;
    switch (call.function) {
      case Function::kBroadcast:
        if (is_root) round.send(peer, from, bytes);
        if (peer == call.root) round.receive(peer, to, bytes);
        break;
      case Function::kAllGather:
        round.send(peer, from, bytes);
        round.receive(peer, to + block, bytes);
        break;
      case Function::kAllToAll:
        round.send(peer, from + block, bytes);
        round.receive(peer, to + block, bytes);
        break;
      case Function::kGather:
        if (peer == call.root) round.send(peer, from, bytes);
        if (is_root) round.receive(peer, to + block, bytes);
        break;
      default:  // kScatter
        if (is_root) round.send(peer, from + block, bytes);
        if (peer == call.root) round.receive(peer, to, bytes);
    }
  }
  return round.run();
}

bool match_with_itself(const std::vector<Call>& calls, int rank, bool copies) {
  std::vector<const Call*> sends, receives;
  for (const Call& call : calls)
    if (call.root == rank) (call.function == Function::kSend ? sends : receives).push_back(&call);
  if (sends.size() != receives.size()) return false;
  for (std::size_t i = 0; i < sends.size(); ++i)
    if (sends[i]->label() != receives[i]->label()) return false;
  for (std::size_t i = 0; copies && i < sends.size(); ++i)
    copy(reached(receives[i]->receive), reached(sends[i]->send), sends[i]->bytes());
  return true;
}

Outcome run_messages(const std::vector<Call>& calls, Mailboxes& mailboxes) {
  match_with_itself(calls, mailboxes.rank(), true);
  std::vector<Message> messages;
  for (const Call& call : calls) {
    const bool leaves = call.function == Function::kSend;
    if (call.root != mailboxes.rank())
      messages.push_back(
          {call.root, leaves, reached(leaves ? call.send : call.receive), call.bytes(), call.label()});
  }
  return mailboxes.exchange(Line::kStreams, std::move(messages));
}

}  // namespace reef::played
