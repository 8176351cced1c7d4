#include "distributed/connect_peers.h"

#include <c10/util/Exception.h>
#include <fcntl.h>
#include <ifaddrs.h>
#include <netdb.h>
#include <netinet/in.h>
#include <poll.h>
#include <sys/socket.h>
#include <unistd.h>

#include <array>
#include <cerrno>
#include <cstring>
#include <optional>
#include <random>
#include <sstream>
#include <stdexcept>
#include <string>
#include <system_error>
#include <torch/csrc/distributed/c10d/ProcessGroup.hpp>
#include <vector>

#include "deadline.h"
#include "distributed/bytes_over_ranks.h"
#include "distributed/gloo.h"
#include "distributed/members.h"
#include "reef/error.h"

namespace reef {
namespace {

constexpr milliseconds kLongest{10000};

/// The first bytes on a connection: the number of the rank that is called, and the rank of the caller.
struct Hello {
  std::uint64_t number = 0;
  std::int64_t rank = -1;
};

struct Address {
  sockaddr_storage bytes{};
  socklen_t size = 0;

  const sockaddr* get() const { return reinterpret_cast<const sockaddr*>(&bytes); }
  sockaddr* get() { return reinterpret_cast<sockaddr*>(&bytes); }
};

std::runtime_error failed(const std::string& what) {
  return std::runtime_error(what + ": " + std::generic_category().message(errno));
}

/// Owns a socket, and closes it.
class Socket {
 public:
  explicit Socket(int descriptor = -1) : descriptor_(descriptor) {}
  Socket(Socket&& other) noexcept : descriptor_(other.release()) {}
  ~Socket() {
    if (descriptor_ >= 0) ::close(descriptor_);
  }
  Socket& operator=(Socket&&) = delete;

  int get() const { return descriptor_; }
  int release() { return std::exchange(descriptor_, -1); }
  explicit operator bool() const { return descriptor_ >= 0; }

  /// Waits for `events` of poll(). Returns false if there are none by the deadline.
  bool await(short events, Deadline deadline) const {
    pollfd one{descriptor_, events, 0};
    int ready = 0;
    do {
      ready = ::poll(&one, 1, static_cast<int>(time_left(deadline).count()));
    } while (ready < 0 && errno == EINTR && !has_passed(deadline));
    return ready > 0;
  }
  void set_blocking(bool blocks) const {
    const int flags = ::fcntl(descriptor_, F_GETFL);
    ::fcntl(descriptor_, F_SETFL, blocks ? flags & ~O_NONBLOCK : flags | O_NONBLOCK);
  }

 private:
  int descriptor_;
};

std::optional<Address> address_of_interface(const std::string& name) {
  ifaddrs* list = nullptr;
  if (::getifaddrs(&list) != 0) return std::nullopt;
  const std::unique_ptr<ifaddrs, decltype(&::freeifaddrs)> all(list, &::freeifaddrs);
  for (const int family : {AF_INET, AF_INET6}) {
    for (const auto* each = list; each != nullptr; each = each->ifa_next) {
      if (each->ifa_addr == nullptr || each->ifa_addr->sa_family != family || each->ifa_name != name)
        continue;
      Address address;
      address.size = family == AF_INET ? sizeof(sockaddr_in) : sizeof(sockaddr_in6);
      std::memcpy(&address.bytes, each->ifa_addr, address.size);
      return address;
    }
  }
  return std::nullopt;
}

/// Resolves a host name or a numeric address. `service`: a port; "": none.
std::optional<Address> address_of_host(const std::string& host, const std::string& service = "") {
  addrinfo hints{};
  hints.ai_socktype = SOCK_STREAM;
  addrinfo* found = nullptr;
  if (::getaddrinfo(host.c_str(), service.empty() ? nullptr : service.c_str(), &hints, &found) != 0)
    return std::nullopt;
  const std::unique_ptr<addrinfo, decltype(&::freeaddrinfo)> all(found, &::freeaddrinfo);
  Address address;
  address.size = found->ai_addrlen;
  std::memcpy(&address.bytes, found->ai_addr, address.size);
  return address;
}

/// Returns an address of this rank on the network of the group's gloo. Follows the rules by which LibTorch
/// chooses that network.
Address own_address(c10d::ProcessGroup& group) {
  const auto* const ours = dynamic_cast<const MemberGroup*>(&group);
  const GlooNetwork network = ours != nullptr && ours->members
                                  ? ours->members->network()
                                  : GlooNetwork{process_environment("GLOO_SOCKET_IFNAME").value_or("")};
  const std::string interface = network.interface.substr(0, network.interface.find(','));
  const std::optional<Address> address =
      !interface.empty() ? address_of_interface(interface)
                         : address_of_host(network.one_machine ? "127.0.0.1" : Process::self().host);
  if (!address) throw std::runtime_error("it has no address on its group's network");
  return *address;
}

/// Where a rank listens, and the random number that its callers must know. Travels as one line of text.
struct Place {
  std::string host, port;
  std::uint64_t number = 0;

  std::string text() const { return host + ' ' + port + ' ' + std::to_string(number); }
  static Place from_text(const std::string& text) {
    Place place;
    std::istringstream(text) >> place.host >> place.port >> place.number;
    return place;
  }
};

class Listener {
 public:
  explicit Listener(c10d::ProcessGroup& group) {
    const Address address = own_address(group);
    socket_.emplace(::socket(address.bytes.ss_family, SOCK_STREAM | SOCK_CLOEXEC, 0));
    if (!*socket_ || ::bind(socket_->get(), address.get(), address.size) != 0 ||
        ::listen(socket_->get(), SOMAXCONN) != 0)
      throw failed("it cannot listen");
    socket_->set_blocking(false);
    Address bound;
    bound.size = sizeof bound.bytes;
    std::array<char, NI_MAXHOST> host{};
    std::array<char, NI_MAXSERV> port{};
    if (::getsockname(socket_->get(), bound.get(), &bound.size) != 0 ||
        ::getnameinfo(bound.get(), bound.size, host.data(), host.size(), port.data(), port.size(),
                      NI_NUMERICHOST | NI_NUMERICSERV) != 0)
      throw std::runtime_error("it cannot tell where it listens");
    std::random_device random;
    place_ = {host.data(), port.data(), std::uint64_t{random()} << 32 | random()};
  }
  const Place& place() const { return place_; }

  /// Waits for a call of one of `ranks`. Returns which it is, and the connection. Drops calls of others.
  std::pair<int, Socket> accept(const std::set<int>& ranks, Deadline deadline) const {
    while (socket_->await(POLLIN, deadline)) {
      Socket came(::accept4(socket_->get(), nullptr, nullptr, SOCK_CLOEXEC));
      Hello hello;
      if (!came || !came.await(POLLIN, deadline)) continue;
      const bool is_whole =
          ::recv(came.get(), &hello, sizeof hello, MSG_WAITALL | MSG_DONTWAIT) == sizeof hello;
      const int rank = static_cast<int>(hello.rank);
      if (is_whole && hello.number == place_.number && ranks.contains(rank)) return {rank, std::move(came)};
    }
    throw std::runtime_error("it was not called by rank " + std::to_string(*ranks.begin()));
  }

 private:
  std::optional<Socket> socket_;
  Place place_;
};

Socket call(const Place& place, int rank, int own_rank, Deadline deadline) {
  const std::string whom = "it cannot reach rank " + std::to_string(rank) + " at " + place.host;
  const std::optional<Address> address = address_of_host(place.host, place.port);
  if (!address) throw std::runtime_error(whom);
  Socket socket(::socket(address->bytes.ss_family, SOCK_STREAM | SOCK_CLOEXEC | SOCK_NONBLOCK, 0));
  if (!socket) throw failed(whom);
  if (::connect(socket.get(), address->get(), address->size) != 0) {
    if (errno != EINPROGRESS) throw failed(whom);
    if (!socket.await(POLLOUT, deadline)) throw std::runtime_error(whom + " in time");
    socklen_t size = sizeof errno;
    int error = 0;
    ::getsockopt(socket.get(), SOL_SOCKET, SO_ERROR, &error, &size);
    if ((errno = error) != 0) throw failed(whom);
  }
  socket.set_blocking(true);
  const Hello hello{place.number, own_rank};
  if (::send(socket.get(), &hello, sizeof hello, MSG_NOSIGNAL) != sizeof hello) throw failed(whom);
  return socket;
}

PeerConnections connected(const Listener& listener, const std::vector<Place>& places, int own_rank,
                          const std::set<std::pair<int, int>>& pairs, milliseconds timeout) {
  PeerConnections connections;
  const Deadline deadline = std::chrono::steady_clock::now() + kLongest;
  const auto add = [&](int rank, Socket socket) {
    connections[rank] =
        std::make_shared<PeerConnection>(socket.release(), "rank " + std::to_string(rank), timeout);
  };
  std::set<int> callers;
  for (const auto& [smaller, larger] : pairs) {
    if (smaller == own_rank) callers.insert(larger);
    if (larger == own_rank) add(smaller, call(places.at(smaller), smaller, own_rank, deadline));
  }
  while (!callers.empty()) {
    auto [rank, socket] = listener.accept(callers, deadline);
    callers.erase(rank);
    add(rank, std::move(socket));
  }
  return connections;
}

}  // namespace

PeerConnections connect_peers(const ProcessGroupPtr& group, const std::set<std::pair<int, int>>& pairs) {
  if (pairs.empty()) return {};
  const int own_rank = group->getRank();
  std::string wrong;
  const auto attempt = [&](const auto& act) {
    try {
      if (wrong.empty()) act();
    } catch (const std::exception& error) {
      wrong = message_of(error);
      TORCH_WARN("reef: rank ", own_rank, " has no connections of its own to others: ", wrong,
                 ". Messages of pipelines go by gloo, which takes longer.");
    }
  };
  std::optional<Listener> listener;
  PeerConnections connections;
  attempt([&] { listener.emplace(*group); });
  std::vector<Place> places;
  bool all_listen = true;
  for (const std::string& text : gather_texts(listener ? listener->place().text() : "", group, c10::kCPU)) {
    places.push_back(Place::from_text(text));
    all_listen = all_listen && !text.empty();
  }
  if (!all_listen) return {};
  attempt([&] {
    const milliseconds timeout = timeout_of_gloo(*group->getBackend(c10::kCPU));
    connections = connected(*listener, places, own_rank, pairs, timeout);
  });
  for (const std::string& of_one : gather_texts(wrong, group, c10::kCPU)) {
    if (!of_one.empty()) return {};
  }
  return connections;
}

}  // namespace reef
