#pragma once

#include <sys/uio.h>

#include <atomic>
#include <chrono>
#include <cstddef>
#include <functional>
#include <memory>
#include <string>
#include <vector>

#include <torch/csrc/distributed/c10d/Work.hpp>

#include "deadline.h"
#include "fork.h"

namespace reef {

/// A TCP connection to another rank, which carries bytes in order, both ways. A small message costs one
/// system call at each end; one of gloo's costs three, and its loop spins for a lock meanwhile.
class PeerConnection final : private AtFork {
 public:
  /// Owns the socket `descriptor`, which is connected to `other` ("rank 2"). No call waits for longer than
  /// `timeout` for the next byte to go or to come.
  PeerConnection(int descriptor, std::string other, milliseconds timeout);
  ~PeerConnection();
  PeerConnection(const PeerConnection&) = delete;
  PeerConnection& operator=(const PeerConnection&) = delete;

  using Pieces = std::vector<iovec>;
  /// Sends the bytes of `pieces` from byte `sent` on until the socket takes no more, without waiting. Returns
  /// how many bytes have been sent in all; that is `sent` if the connection is broken.
  std::size_t send_at_once(const Pieces& pieces, std::size_t sent);
  /// Sends all bytes of `pieces` from byte `sent` on. Waits for room. Throws DistError.
  void send(const Pieces& pieces, std::size_t sent);
  /// Waits for so many bytes. Throws DistError.
  void receive(void* memory, std::size_t bytes);
  /// Shuts the connection down, so that all waits at both ends fail. May be called on any thread, and does
  /// not wait.
  void close();

 private:
  [[noreturn]] void fail(const std::string& why) const;
  [[noreturn]] void fail_with_errno() const;
  void before_fork() override {}
  void after_fork_in_parent() override {}
  /// A child that lives on must not keep others from hearing that this rank is gone.
  void after_fork_in_child() override;

  int descriptor_;
  std::string other_;
  milliseconds timeout_;
  std::vector<char> ahead_;  ///< from `taken_` to `come_`: bytes received before they were asked for
  std::size_t taken_ = 0, come_ = 0;
};

/// A transfer on a connection, which the thread that waits for it makes, and which any thread can abort.
class PeerTransfer final : public c10d::Work {
 public:
  PeerTransfer(std::shared_ptr<PeerConnection> connection, std::function<void()> transfer)
      : connection_(std::move(connection)), transfer_(std::move(transfer)) {}
  /// Makes the transfer. Returns false if it was aborted. Throws what it throws.
  bool wait(std::chrono::milliseconds timeout = kNoTimeout) override;
  void abort() override;

 private:
  std::shared_ptr<PeerConnection> connection_;
  std::function<void()> transfer_;
  std::atomic<bool> aborted_ = false;
};

}  // namespace reef
