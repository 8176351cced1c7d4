#include "distributed/peer_connection.h"

#include <c10/util/Exception.h>
#include <netinet/in.h>
#include <netinet/tcp.h>
#include <sys/socket.h>
#include <sys/time.h>
#include <unistd.h>

#include <algorithm>
#include <array>
#include <cerrno>
#include <cstring>
#include <system_error>
#include <utility>

namespace reef {
namespace {

constexpr std::size_t kAheadBytes = 16 << 10;
constexpr std::size_t kMostPieces = 64;  // of one call of sendmsg()

/// Returns the parts of `pieces` from byte `sent` on, at most as many as one call of sendmsg() is given.
PeerConnection::Pieces behind(const PeerConnection::Pieces& pieces, std::size_t sent) {
  PeerConnection::Pieces left;
  for (const iovec& piece : pieces) {
    const std::size_t skipped = std::min(sent, piece.iov_len);
    sent -= skipped;
    if (skipped == piece.iov_len) continue;
    left.push_back({static_cast<char*>(piece.iov_base) + skipped, piece.iov_len - skipped});
    if (left.size() == kMostPieces) break;
  }
  return left;
}

ssize_t send_some(int descriptor, PeerConnection::Pieces& pieces, int flags) {
  msghdr message{};
  message.msg_iov = pieces.data();
  message.msg_iovlen = pieces.size();
  ssize_t sent = 0;
  do {
    sent = ::sendmsg(descriptor, &message, flags | MSG_NOSIGNAL);
  } while (sent < 0 && errno == EINTR);
  return sent;
}

}  // namespace

PeerConnection::PeerConnection(int descriptor, std::string other, milliseconds timeout)
    : AtFork(Order::kTables),
      descriptor_(descriptor),
      other_(std::move(other)),
      timeout_(timeout),
      ahead_(kAheadBytes) {
  const int on = 1;
  ::setsockopt(descriptor_, IPPROTO_TCP, TCP_NODELAY, &on, sizeof on);
  ::setsockopt(descriptor_, SOL_SOCKET, SO_KEEPALIVE, &on, sizeof on);
  timeval limit{};
  limit.tv_sec = timeout.count() / 1000;
  limit.tv_usec = timeout.count() % 1000 * 1000;
  ::setsockopt(descriptor_, SOL_SOCKET, SO_RCVTIMEO, &limit, sizeof limit);
  ::setsockopt(descriptor_, SOL_SOCKET, SO_SNDTIMEO, &limit, sizeof limit);
}

PeerConnection::~PeerConnection() {
  if (descriptor_ >= 0) ::close(descriptor_);
}

void PeerConnection::after_fork_in_child() {
  ::close(descriptor_);
  descriptor_ = -1;
}

std::size_t PeerConnection::send_at_once(const Pieces& pieces, std::size_t sent) {
  while (true) {
    Pieces left = behind(pieces, sent);
    if (left.empty()) return sent;
    const ssize_t now = send_some(descriptor_, left, MSG_DONTWAIT);
    if (now <= 0) return sent;
    sent += static_cast<std::size_t>(now);
  }
}

void PeerConnection::send(const Pieces& pieces, std::size_t sent) {
  while (true) {
    Pieces left = behind(pieces, sent);
    if (left.empty()) return;
    const ssize_t now = send_some(descriptor_, left, 0);
    if (now < 0) fail_with_errno();
    sent += static_cast<std::size_t>(now);
  }
}

void PeerConnection::receive(void* memory, std::size_t bytes) {
  auto* to = static_cast<char*>(memory);
  while (bytes > 0) {
    if (taken_ < come_) {
      const std::size_t count = std::min(bytes, come_ - taken_);
      std::memcpy(to, ahead_.data() + taken_, count);
      taken_ += count;
      to += count;
      bytes -= count;
      continue;
    }
    const bool directly = bytes >= ahead_.size();
    const ssize_t now =
        ::recv(descriptor_, directly ? to : ahead_.data(), directly ? bytes : ahead_.size(), 0);
    if (now == 0) fail("was closed at its other end");
    if (now < 0 && errno == EINTR) continue;
    if (now < 0) fail_with_errno();
    if (directly) {
      to += now;
      bytes -= static_cast<std::size_t>(now);
    } else {
      taken_ = 0;
      come_ = static_cast<std::size_t>(now);
    }
  }
}

void PeerConnection::close() { ::shutdown(descriptor_, SHUT_RDWR); }

void PeerConnection::fail(const std::string& why) const {
  C10_THROW_ERROR(DistError, "the connection to " + other_ + " " + why);
}

void PeerConnection::fail_with_errno() const {
  if (errno == EAGAIN || errno == EWOULDBLOCK)
    fail("was still for " + std::to_string(timeout_.count()) + " ms, the timeout of its group");
  fail("broke: " + std::generic_category().message(errno));
}

bool PeerTransfer::wait(std::chrono::milliseconds /*timeout: the connection's*/) {
  try {
    transfer_();
  } catch (const std::exception&) {
    if (aborted_) return false;
    throw;
  }
  return true;
}

void PeerTransfer::abort() {
  aborted_ = true;
  connection_->close();
}

}  // namespace reef
