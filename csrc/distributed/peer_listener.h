#pragma once

#include <poll.h>
#include <sys/socket.h>

#include <cstddef>
#include <cstdint>
#include <optional>
#include <set>
#include <string>
#include <utility>
#include <vector>

#include "deadline.h"

namespace reef {

/// Owns a socket, and closes it.
class Socket {
 public:
  explicit Socket(int descriptor = -1) : descriptor_(descriptor) {}
  Socket(Socket&& other) noexcept : descriptor_(other.release()) {}
  Socket& operator=(Socket&& other) noexcept;
  ~Socket();

  int get() const { return descriptor_; }
  int release() { return std::exchange(descriptor_, -1); }
  explicit operator bool() const { return descriptor_ >= 0; }

 private:
  int descriptor_;
};

/// An address of IPv4 or IPv6, and a port.
struct SocketAddress {
  sockaddr_storage bytes{};
  socklen_t size = 0;

  const sockaddr* get() const { return reinterpret_cast<const sockaddr*>(&bytes); }
  sockaddr* get() { return reinterpret_cast<sockaddr*>(&bytes); }
};

/// Returns an address of a network interface, the one of IPv4 if it has both.
std::optional<SocketAddress> address_of_interface(const std::string& name);
/// Resolves a host name or a numeric address. `service`: a port; "": none.
std::optional<SocketAddress> address_of_host(const std::string& host, const std::string& service = "");

/// Where a rank listens, and the random number that its callers must know. Travels as one line of text.
struct PeerPlace {
  std::string host, port;
  std::uint64_t number = 0;

  std::string text() const;
  static PeerPlace from_text(const std::string& text);
};

/// The first bytes on a connection.
struct PeerHello {
  std::uint64_t number = 0;  ///< of the rank that is called
  std::int64_t rank = -1;    ///< of the caller
};

/// Listens for calls of other ranks, on any free port.
class PeerListener {
 public:
  /// Throws std::runtime_error if `address` is not one of this machine.
  explicit PeerListener(const SocketAddress& address);
  const PeerPlace& place() const { return place_; }

  /// Waits for a call of one of `ranks`. Returns which it is, and the connection. Drops calls of others; a
  /// caller that stays silent delays nobody. Throws std::runtime_error at the deadline.
  std::pair<int, Socket> accept(const std::set<int>& ranks, Deadline deadline);

 private:
  /// A connection that has not sent a whole PeerHello yet.
  struct Caller {
    Socket socket;
    PeerHello hello{};
    std::size_t received_bytes = 0;

    /// Receives what has arrived, without waiting. Returns false if the caller has hung up.
    bool hear();
    bool is_whole() const { return received_bytes == sizeof hello; }
  };

  /// Receives from each caller for which poll() has found an event. Returns the first that proves to be one
  /// of `ranks`. Drops callers that have hung up or prove to be none of them.
  std::optional<std::pair<int, Socket>> hear(const std::vector<pollfd>& found, const std::set<int>& ranks);

  Socket socket_;
  PeerPlace place_;
  std::vector<Caller> callers_;
};

/// Calls `rank` as `own_rank`. Throws std::runtime_error if it cannot be reached by the deadline.
Socket call_peer(const PeerPlace& place, int rank, int own_rank, Deadline deadline);

}  // namespace reef
