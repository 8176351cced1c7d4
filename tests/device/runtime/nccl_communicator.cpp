#include "device/runtime/nccl_communicator.h"

#include <algorithm>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <utility>

#include "device/runtime/played_cuda.h"

namespace reef::played {
namespace {

std::mutex last_error_mutex;
std::string last_words;

void must(cudaError_t error, const char* what) {
  if (error != cudaSuccess)
    throw Refusal{ncclUnhandledCudaError, std::string(what) + ": CUDA error " + std::to_string(error)};
}

bool is_captured(cudaStream_t stream) {
  cudaStreamCaptureStatus status = cudaStreamCaptureStatusNone;
  must(cudaStreamIsCapturing(stream, &status), "cudaStreamIsCapturing");
  return status != cudaStreamCaptureStatusNone;
}

std::shared_ptr<Mailboxes> join(const SharedName& name, int ranks, int rank) {
  try {
    return std::make_shared<Mailboxes>(name, ranks, rank);
  } catch (const std::exception& error) {
    throw Refusal{ncclInvalidUsage, error.what()};
  }
}

std::string name_of(int rank) { return "rank " + std::to_string(rank); }

}  // namespace

void set_last_error(const std::string& words) {
  std::fprintf(stderr, "played NCCL: %s\n", words.c_str());
  const std::lock_guard lock(last_error_mutex);
  last_words = words;
}

const char* last_error() {
  static thread_local std::string copy;
  const std::lock_guard lock(last_error_mutex);
  copy = last_words;
  return copy.c_str();
}

Newcomer newcomer() {
  Newcomer device;
  must(cudaGetDevice(&device.ordinal), "cudaGetDevice");
  must(cudaDeviceGetPCIBusId(device.device.data(), static_cast<int>(device.device.size()), device.ordinal),
       "cudaDeviceGetPCIBusId");
  return device;
}

}  // namespace reef::played

using namespace reef::played;

class ncclComm::Turn {
 public:
  Turn(ncclComm& of, std::uint64_t ticket) : of_(of), ticket_(ticket) {}
  ~Turn() { pass(); }
  Turn(const Turn&) = delete;
  Turn& operator=(const Turn&) = delete;

  bool has_come() const { return of_.turn_ == ticket_; }
  void pass() {
    if (is_over_) return;
    is_over_ = true;
    const std::lock_guard lock(of_.mutex_);
    of_.passed_.insert(ticket_);
    while (of_.passed_.erase(of_.turn_) > 0) ++of_.turn_;
    of_.changed_.notify_all();
  }

 private:
  ncclComm& of_;
  std::uint64_t ticket_;
  bool is_over_ = false;
};

ncclComm::ncclComm(const SharedName& name, int ranks, int rank, const Newcomer& as)
    : ranks_(ranks), rank_(rank), device_(as), mailboxes_(join(name, ranks, rank)) {}

std::shared_ptr<Mailboxes> ncclComm::open_mailboxes() {
  const std::lock_guard lock(mutex_);
  if (mailboxes_ == nullptr) throw Refusal{ncclInvalidUsage, "the communicator has been " + ended_};
  return mailboxes_;
}

std::vector<Newcomer> ncclComm::gather(const Newcomer& mine) {
  const std::shared_ptr<Mailboxes> mailboxes = open_mailboxes();
  std::vector<Newcomer> all(static_cast<std::size_t>(ranks_), mine);
  Newcomer sent = mine;
  std::vector<Message> messages;
  for (int peer = 0; peer < ranks_; ++peer) {
    if (peer == rank_) continue;
    messages.push_back({peer, true, reinterpret_cast<char*>(&sent), sizeof sent, {}});
    messages.push_back({peer, false, reinterpret_cast<char*>(&all[peer]), sizeof sent, {}});
  }
  const Outcome outcome = mailboxes->exchange(Line::kHosts, std::move(messages));
  if (outcome.how == Outcome::How::kDone) return all;
  const std::string peer = name_of(outcome.peer);
  throw Refusal{ncclRemoteError, outcome.how == Outcome::How::kGone ? "the process of " + peer + " has ended"
                                 : outcome.how == Outcome::How::kReported
                                     ? mailboxes->reported()
                                     : "aborted while " + peer + " was awaited"};
}

void ncclComm::meet() {
  try {
    const std::vector<Newcomer> all = gather(device_);
    if (std::getenv("REEF_PLAYED_NCCL_SHARES_DEVICES") != nullptr) return;
    for (int a = 0; a < ranks_; ++a)
      for (int b = a + 1; b < ranks_; ++b)
        if (all[a].device == all[b].device)
          throw Refusal{ncclInvalidUsage, "Duplicate GPU detected : " + name_of(a) + " and " + name_of(b) +
                                              " both on CUDA device " + all[a].device.data()};
  } catch (const Refusal&) {
    end("refused");
    throw;
  }
}

void ncclComm::issue(std::vector<Call> calls) {
  const cudaStream_t stream = calls.front().stream;
  const bool captured = is_captured(stream);
  const std::lock_guard in_order(issuing_);
  auto mailboxes = open_mailboxes();
  std::shared_ptr<Turn> turn;  // a graph's work has none: it runs when the graph does, if no other runs
  if (!captured) {
    const std::lock_guard lock(mutex_);
    turn = std::make_shared<Turn>(*this, issued_++);
  }
  enqueue(stream, Work::kCommunication, [this, turn, calls = std::move(calls), mailboxes] {
    {
      std::unique_lock lock(mutex_);
      changed_.wait(lock, [&] { return !runs_ && (turn == nullptr || turn->has_come()); });
      runs_ = true;
    }
    run(calls, *mailboxes);
    {
      const std::lock_guard lock(mutex_);
      runs_ = false;
      changed_.notify_all();
    }
    if (turn != nullptr) turn->pass();
  });
}

void ncclComm::run(const std::vector<Call>& calls, Mailboxes& mailboxes) {
  if (mailboxes.is_aborted())
    return say(ncclRemoteError, describe(calls.front()) + " does nothing, as it comes after ncclCommAbort");
  const Outcome outcome = calls.front().is_collective() ? run_collective(calls.front(), mailboxes)
                                                        : run_messages(calls, mailboxes);
  if (outcome.how == Outcome::How::kDone) return;
  const auto concerned = std::find_if(calls.begin(), calls.end(), [&](const Call& each) {
    return each.is_collective() || each.root == outcome.peer;
  });
  explain(*concerned, outcome, mailboxes);
}

void ncclComm::explain(const Call& call, const Outcome& outcome, Mailboxes& mailboxes) {
  const std::string peer = name_of(outcome.peer);
  if (outcome.how == Outcome::How::kAborted)
    return say(ncclRemoteError, describe(call) + " was aborted while it waited for " + peer);
  if (outcome.how == Outcome::How::kDiffers)
    mailboxes.report("the ranks of a communicator make different calls: " + name_of(rank_) + " is in " +
                     describe(call) + ", and " + peer + " is in " + describe(outcome.theirs));
  say(ncclInvalidUsage, mailboxes.reported());
  mailboxes.wait_until_aborted();  // Otherwise the program would read memory that was never written.
}

void ncclComm::say(ncclResult_t result, const std::string& words) {
  const std::lock_guard lock(mutex_);
  if (trouble_ != ncclSuccess) return;
  trouble_ = result;
  set_last_error("rank " + std::to_string(rank_) + " of " + std::to_string(ranks_) + ": " + words);
  changed_.notify_all();
}

ncclResult_t ncclComm::trouble() {
  const std::lock_guard lock(mutex_);
  return trouble_;
}

void ncclComm::finish() {
  std::unique_lock lock(mutex_);
  changed_.wait(lock, [this] { return turn_ == issued_ || trouble_ != ncclSuccess; });
}

void ncclComm::finalize() {
  open_mailboxes();
  finish();
  end("finalized");
}

void ncclComm::destroy() {
  {
    const std::lock_guard lock(mutex_);
    if (mailboxes_ == nullptr && ended_ != "finalized")
      throw Refusal{ncclInvalidUsage, "the communicator has been " + ended_ + " before it is destroyed"};
  }
  finish();
  if (trouble() == ncclSuccess)
    end("destroyed");
  else
    abort();
}

void ncclComm::abort() {
  std::unique_lock lock(mutex_);
  if (mailboxes_ == nullptr && ended_ != "finalized")
    throw Refusal{ncclInvalidUsage, "the communicator has been " + ended_ + " before it is aborted"};
  if (mailboxes_ != nullptr) mailboxes_->abort();
  changed_.wait(lock, [this] { return !runs_; });
  mailboxes_.reset();
  ended_ = "aborted";
}

void ncclComm::end(const char* how) {
  const std::lock_guard lock(mutex_);
  mailboxes_.reset();
  ended_ = how;
}

ncclRedOp_t ncclComm::make_op(ncclDataType_t type, const Reduction& reduction) {
  open_mailboxes();
  const std::lock_guard lock(mutex_);
  ops_[next_op_] = {type, reduction};
  return static_cast<ncclRedOp_t>(next_op_++);
}

void ncclComm::destroy_op(ncclRedOp_t op) {
  open_mailboxes();
  const std::lock_guard lock(mutex_);
  if (ops_.erase(op) == 0) throw Refusal{ncclInvalidArgument, "there is no such op to destroy"};
}

Reduction ncclComm::reduction(ncclRedOp_t op, ncclDataType_t type) {
  if (op < ncclNumOps) return {op};
  const std::lock_guard lock(mutex_);
  const auto found = ops_.find(op);
  if (found == ops_.end()) throw Refusal{ncclInvalidArgument, "the communicator has no such op"};
  if (found->second.type != type)
    throw Refusal{ncclInvalidArgument, "the op was made for elements of another type"};
  return found->second.reduction;
}

void* ncclComm::register_memory() {
  open_mailboxes();
  const std::lock_guard lock(mutex_);
  return *registered_.insert(new char).first;
}

void ncclComm::deregister_memory(void* handle) {
  const std::lock_guard lock(mutex_);
  if (registered_.erase(handle) == 0) throw Refusal{ncclInvalidArgument, "no memory is registered as this"};
  delete static_cast<char*>(handle);
}
