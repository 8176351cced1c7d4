#include "distributed/store.h"

#include <fcntl.h>
#include <netdb.h>
#include <poll.h>
#include <sys/file.h>
#include <sys/socket.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <filesystem>
#include <map>
#include <memory>
#include <mutex>
#include <system_error>
#include <thread>
#include <torch/csrc/distributed/c10d/FileStore.hpp>
#include <torch/csrc/distributed/c10d/TCPStore.hpp>

#include "distributed/sigpipe.h"
#include "reef/error.h"

namespace reef {
namespace {

constexpr milliseconds kRetryEvery{50};
constexpr milliseconds kPatiencePerAddress{3000};  // a host name can have several
// The one who leaves a file's store as the last removes the file if, when it began to leave, so many had
// begun to. With the number of ranks there, which is what FileStore expects, files stay: the last to be
// through need not have been the last to begin. And of a bring-up that failed as well, in the way of the
// next.
constexpr int kLeaving = 1;
constexpr milliseconds kPatienceWithFolder{3000};
// A value that no rank sets.
constexpr const char* kNoValue = "reef: no value";

std::string reason(int error_number) { return std::generic_category().message(error_number); }

/// Tries once to connect to `address`; 0, or the error number.
int try_connect(const addrinfo& address, Deadline deadline) {
  const int descriptor = ::socket(address.ai_family, SOCK_STREAM | SOCK_NONBLOCK | SOCK_CLOEXEC, 0);
  if (descriptor < 0) return errno;
  int error = 0;
  if (::connect(descriptor, address.ai_addr, address.ai_addrlen) != 0) error = errno;
  if (error == EINPROGRESS) {
    pollfd waiting = {.fd = descriptor, .events = POLLOUT, .revents = 0};
    const auto patience = std::min(time_left(deadline), kPatiencePerAddress);
    const int ready = ::poll(&waiting, 1, static_cast<int>(patience.count()));
    socklen_t size = sizeof(error);
    if (ready <= 0) {
      error = ready == 0 ? ETIMEDOUT : errno;
    } else if (::getsockopt(descriptor, SOL_SOCKET, SO_ERROR, &error, &size) != 0) {
      error = errno;
    }
  }
  ::close(descriptor);
  return error;
}

/// Waits until something listens at host:port; "" or why nothing did. TCPStore would itself retry, but for up
/// to twice its timeout and without a reason.
std::string wait_for_listener(const std::string& host, std::uint16_t port, Deadline deadline) {
  std::string why;
  do {
    addrinfo hints{};
    hints.ai_socktype = SOCK_STREAM;
    addrinfo* found = nullptr;
    const int unresolved = ::getaddrinfo(host.c_str(), std::to_string(port).c_str(), &hints, &found);
    if (unresolved != 0) {
      why = std::string("the host name cannot be resolved: ") + ::gai_strerror(unresolved);
    } else {
      const std::unique_ptr<addrinfo, decltype(&::freeaddrinfo)> addresses(found, &::freeaddrinfo);
      for (const auto* each = found; each != nullptr; each = each->ai_next) {
        const int error = try_connect(*each, deadline);
        if (error == 0) return "";
        why = reason(error);
      }
    }
    std::this_thread::sleep_for(std::min(kRetryEvery, time_left(deadline)));
  } while (!has_passed(deadline));
  return why;
}

std::string who(const Rendezvous& rendezvous) {
  return "rank " + std::to_string(rendezvous.rank) + " of " + std::to_string(rendezvous.world_size);
}

/// Keeps what this process serves until it ends: another rank may be connecting for the next group while this
/// one is done with the last, or may still have to read why the last one failed. multiTenant shares it among
/// groups.
void keep_serving(const std::string& address, const StorePtr& store) {
  static std::mutex mutex;
  static auto* const served = new std::map<std::string, StorePtr>();  // alive in destructors of statics, too
  const std::lock_guard lock(mutex);
  served->emplace(address, store);
}

StorePtr open_tcp(const Rendezvous& rendezvous, milliseconds timeout, Deadline deadline) {
  const auto address = address_text(rendezvous);
  if (!rendezvous.serves) {
    const auto why =
        within(deadline + kRetryEvery, [host = rendezvous.host, port = rendezvous.port, deadline] {
          return wait_for_listener(host, port, deadline);
        }).value_or("the host name could not be resolved in time");
    if (!why.empty()) {
      throw ProcessGroupError(
          who(rendezvous) + " could not reach the store at " + address + " within " + seconds_text(timeout) +
              " (" + why +
              "): check that rank 0 runs, and that the address is its host and reachable from here.",
          rendezvous.rank);
    }
  }
  c10d::TCPStoreOptions options;
  options.port = rendezvous.port;
  options.isServer = rendezvous.serves;
  options.waitWorkers = false;  // members.cpp waits, and can say who is missing
  options.multiTenant = true;
  options.timeout = time_left(deadline);
  StorePtr store;
  try {
    store = within(deadline, [options, host = rendezvous.host]() -> StorePtr {
              const SigpipeBlocked on_the_servers_thread;
              return c10::make_intrusive<c10d::TCPStore>(host, options);
            }).value_or(nullptr);
  } catch (const std::exception& error) {
    const auto text = message_of(error);
    if (text.find("EADDRINUSE") != std::string::npos) {
      throw ProcessGroupError(
          who(rendezvous) + " cannot serve the store at " + address + ": port " +
              std::to_string(rendezvous.port) +
              " is in use on this host; choose another port, or end the process that holds it.",
          rendezvous.rank);
    }
    throw ProcessGroupError(who(rendezvous) + " could not open the store at " + address + ": " + text,
                            rendezvous.rank);
  }
  if (store == nullptr) {
    throw ProcessGroupError(
        who(rendezvous) +
            (rendezvous.serves
                 ? " serves the store, but cannot reach itself at " + address + " within " +
                       seconds_text(timeout) + ": the address must be one of this host."
                 : " found something listening at " + address + " that did not answer as a store within " +
                       seconds_text(timeout) + ": choose a port that no other program uses."),
        rendezvous.rank);
  }
  if (rendezvous.serves) keep_serving(address, store);
  return store;
}

/// Locks the folder of `path` against all processes that use this class. Goes on without the lock if it
/// cannot be taken: some network file systems cannot lock folders, and another program may hold it.
class FolderLock {
 public:
  explicit FolderLock(const std::string& path)
      : descriptor_(
            ::open(std::filesystem::path(path).parent_path().c_str(), O_RDONLY | O_DIRECTORY | O_CLOEXEC)) {
    lock();
  }
  ~FolderLock() { ::close(descriptor_); }
  FolderLock(const FolderLock&) = delete;
  FolderLock& operator=(const FolderLock&) = delete;

  void lock() noexcept {
    const Deadline deadline = std::chrono::steady_clock::now() + kPatienceWithFolder;
    while (::flock(descriptor_, LOCK_EX | LOCK_NB) != 0 && (errno == EWOULDBLOCK || errno == EINTR) &&
           !has_passed(deadline)) {
      std::this_thread::sleep_for(milliseconds{1});
    }
  }
  void unlock() noexcept { ::flock(descriptor_, LOCK_UN); }

 private:
  int descriptor_;
};

/// The last process to end removes the file. A process that opened it just before the removal would keep
/// stale records, and write to a new file of the same name; so no process opens it while another one ends.
class MeetingFile final : private FolderLock, public c10d::FileStore {
 public:
  explicit MeetingFile(const std::string& path) : FolderLock(path), c10d::FileStore(path, kLeaving) {
    unlock();
  }
  ~MeetingFile() override { lock(); }
  c10::intrusive_ptr<c10d::Store> clone() override { return c10::make_intrusive<MeetingFile>(path_); }
};

StorePtr open_file(const Rendezvous& rendezvous, Deadline deadline) {
  // FileStore retries an open that fails for five minutes.
  const int descriptor = ::open(rendezvous.path.c_str(), O_RDWR | O_CREAT | O_CLOEXEC, 0644);
  if (descriptor < 0) {
    throw ProcessGroupError(who(rendezvous) + " cannot open the store " + address_text(rendezvous) + ": " +
                                reason(errno) + "; name a file in a folder that every rank can write.",
                            rendezvous.rank);
  }
  ::close(descriptor);
  StorePtr store;
  try {
    store = within(deadline, [path = rendezvous.path]() -> StorePtr {
              return c10::make_intrusive<MeetingFile>(path);
            }).value_or(nullptr);
  } catch (const std::exception& error) {
    throw ProcessGroupError(
        who(rendezvous) + " cannot use the store " + address_text(rendezvous) + ": " + message_of(error),
        rendezvous.rank);
  }
  if (store == nullptr) {
    throw ProcessGroupError(who(rendezvous) + " could not lock the store " + address_text(rendezvous) +
                                " in time: name a file on a file system that has locks.",
                            rendezvous.rank);
  }
  return store;
}

}  // namespace

std::string address_text(const Rendezvous& rendezvous) {
  if (rendezvous.store == StoreKind::kFile) return "file://" + rendezvous.path;
  const bool brackets = rendezvous.host.find(':') != std::string::npos;
  return "tcp://" + (brackets ? "[" + rendezvous.host + "]" : rendezvous.host) + ":" +
         std::to_string(rendezvous.port);
}

StorePtr open_store(const Rendezvous& rendezvous, milliseconds timeout, Deadline deadline) {
  auto store = rendezvous.store == StoreKind::kFile ? open_file(rendezvous, deadline)
                                                    : open_tcp(rendezvous, timeout, deadline);
  store->setTimeout(time_left(deadline));
  return store;
}

// Where a key is not there, stores answer with what was expected, if that is not empty, and set nothing.
std::optional<std::vector<std::uint8_t>> value_of(c10d::Store& store, const std::string& key) {
  const std::string text(kNoValue);
  const std::vector<std::uint8_t> none(text.begin(), text.end());
  std::vector<std::uint8_t> value = store.compareSet(key, none, none);
  if (value == none) return std::nullopt;
  return value;
}

}  // namespace reef
