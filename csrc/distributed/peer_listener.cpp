#include "distributed/peer_listener.h"

#include <fcntl.h>
#include <ifaddrs.h>
#include <netdb.h>
#include <netinet/in.h>
#include <poll.h>
#include <unistd.h>

#include <array>
#include <cerrno>
#include <cstring>
#include <memory>
#include <random>
#include <sstream>
#include <stdexcept>
#include <system_error>

namespace reef {
namespace {

std::runtime_error socket_failure(const std::string& what) {
  return std::runtime_error(what + ": " + std::generic_category().message(errno));
}

/// Waits until poll() finds an event, and leaves what it found in `places`. Returns false if there is none by
/// the deadline.
bool await_events(std::vector<pollfd>& places, Deadline deadline) {
  int ready = 0;
  do {
    ready = ::poll(places.data(), places.size(), static_cast<int>(time_left(deadline).count()));
  } while (ready < 0 && errno == EINTR && !has_passed(deadline));
  return ready > 0;
}

}  // namespace

Socket& Socket::operator=(Socket&& other) noexcept {
  std::swap(descriptor_, other.descriptor_);
  return *this;
}

Socket::~Socket() {
  if (descriptor_ >= 0) ::close(descriptor_);
}

std::optional<SocketAddress> address_of_interface(const std::string& name) {
  ifaddrs* list = nullptr;
  if (::getifaddrs(&list) != 0) return std::nullopt;
  const std::unique_ptr<ifaddrs, decltype(&::freeifaddrs)> all(list, &::freeifaddrs);
  for (const int family : {AF_INET, AF_INET6}) {
    for (const auto* each = list; each != nullptr; each = each->ifa_next) {
      if (each->ifa_addr == nullptr || each->ifa_addr->sa_family != family || each->ifa_name != name)
        continue;
      SocketAddress address;
      address.size = family == AF_INET ? sizeof(sockaddr_in) : sizeof(sockaddr_in6);
      std::memcpy(&address.bytes, each->ifa_addr, address.size);
      return address;
    }
  }
  return std::nullopt;
}

std::optional<SocketAddress> address_of_host(const std::string& host, const std::string& service) {
  addrinfo hints{};
  hints.ai_socktype = SOCK_STREAM;
  addrinfo* found = nullptr;
  if (::getaddrinfo(host.c_str(), service.empty() ? nullptr : service.c_str(), &hints, &found) != 0)
    return std::nullopt;
  const std::unique_ptr<addrinfo, decltype(&::freeaddrinfo)> all(found, &::freeaddrinfo);
  SocketAddress address;
  address.size = found->ai_addrlen;
  std::memcpy(&address.bytes, found->ai_addr, address.size);
  return address;
}

std::string PeerPlace::text() const { return host + ' ' + port + ' ' + std::to_string(number); }

PeerPlace PeerPlace::from_text(const std::string& text) {
  PeerPlace place;
  std::istringstream(text) >> place.host >> place.port >> place.number;
  return place;
}

PeerListener::PeerListener(const SocketAddress& address)
    : socket_(::socket(address.bytes.ss_family, SOCK_STREAM | SOCK_CLOEXEC | SOCK_NONBLOCK, 0)) {
  if (!socket_ || ::bind(socket_.get(), address.get(), address.size) != 0 ||
      ::listen(socket_.get(), SOMAXCONN) != 0)
    throw socket_failure("it cannot listen");
  SocketAddress bound;
  bound.size = sizeof bound.bytes;
  std::array<char, NI_MAXHOST> host{};
  std::array<char, NI_MAXSERV> port{};
  if (::getsockname(socket_.get(), bound.get(), &bound.size) != 0 ||
      ::getnameinfo(bound.get(), bound.size, host.data(), host.size(), port.data(), port.size(),
                    NI_NUMERICHOST | NI_NUMERICSERV) != 0)
    throw std::runtime_error("it cannot tell where it listens");
  std::random_device random;
  place_ = {host.data(), port.data(), std::uint64_t{random()} << 32 | random()};
}

bool PeerListener::Caller::hear() {
  char* const memory = reinterpret_cast<char*>(&hello) + received_bytes;
  const ssize_t come = ::recv(socket.get(), memory, sizeof hello - received_bytes, MSG_DONTWAIT);
  if (come < 0) return errno == EAGAIN || errno == EINTR;
  received_bytes += static_cast<std::size_t>(come);
  return come > 0;
}

std::optional<std::pair<int, Socket>> PeerListener::hear(const std::vector<pollfd>& found,
                                                         const std::set<int>& ranks) {
  std::optional<std::pair<int, Socket>> heard;
  std::vector<Caller> left;
  for (std::size_t i = 0; i < callers_.size(); ++i) {
    Caller& caller = callers_[i];
    if (!heard && found[i].revents != 0 && !caller.hear()) continue;
    const int rank = static_cast<int>(caller.hello.rank);
    if (heard || !caller.is_whole()) {
      left.push_back(std::move(caller));
    } else if (caller.hello.number == place_.number && ranks.contains(rank)) {
      heard.emplace(rank, std::move(caller.socket));
    }
  }
  callers_ = std::move(left);
  return heard;
}

std::pair<int, Socket> PeerListener::accept(const std::set<int>& ranks, Deadline deadline) {
  for (;;) {
    std::vector<pollfd> places;
    for (const Caller& caller : callers_) places.push_back({caller.socket.get(), POLLIN, 0});
    places.push_back({socket_.get(), POLLIN, 0});
    if (!await_events(places, deadline) || has_passed(deadline))
      throw std::runtime_error("it was not called by rank " + std::to_string(*ranks.begin()));
    if (auto heard = hear(places, ranks)) return std::move(*heard);
    if (places.back().revents == 0) continue;
    Socket came(::accept4(socket_.get(), nullptr, nullptr, SOCK_CLOEXEC));
    if (came) callers_.push_back({std::move(came)});
  }
}

Socket call_peer(const PeerPlace& place, int rank, int own_rank, Deadline deadline) {
  const std::string whom = "it cannot reach rank " + std::to_string(rank) + " at " + place.host;
  const std::optional<SocketAddress> address = address_of_host(place.host, place.port);
  if (!address) throw std::runtime_error(whom);
  Socket socket(::socket(address->bytes.ss_family, SOCK_STREAM | SOCK_CLOEXEC | SOCK_NONBLOCK, 0));
  if (!socket) throw socket_failure(whom);
  if (::connect(socket.get(), address->get(), address->size) != 0) {
    if (errno != EINPROGRESS) throw socket_failure(whom);
    std::vector<pollfd> one{{socket.get(), POLLOUT, 0}};
    if (!await_events(one, deadline)) throw std::runtime_error(whom + " in time");
    socklen_t size = sizeof errno;
    int error = 0;
    ::getsockopt(socket.get(), SOL_SOCKET, SO_ERROR, &error, &size);
    if ((errno = error) != 0) throw socket_failure(whom);
  }
  ::fcntl(socket.get(), F_SETFL, ::fcntl(socket.get(), F_GETFL) & ~O_NONBLOCK);
  const PeerHello hello{place.number, own_rank};
  if (::send(socket.get(), &hello, sizeof hello, MSG_NOSIGNAL) != sizeof hello) throw socket_failure(whom);
  return socket;
}

}  // namespace reef
