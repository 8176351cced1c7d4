// Bytes on a connection, whose two ends are in this process.
#include "distributed/peer_connection.h"

#include <gtest/gtest.h>
#include <sys/socket.h>
#include <sys/wait.h>
#include <unistd.h>

#include <array>
#include <cstdint>
#include <future>
#include <memory>
#include <random>
#include <string>
#include <thread>
#include <vector>

#include "support/error_of.h"

namespace reef {
namespace {

using test::error_of;

using Bytes = std::vector<std::uint8_t>;

constexpr milliseconds kPatience{60000};

struct Ends {
  std::shared_ptr<PeerConnection> near, far;
};

/// `buffer_bytes`: about what the kernel keeps of what is not received yet.
Ends connected(milliseconds timeout = kPatience, int buffer_bytes = 1 << 16) {
  std::array<int, 2> sockets{};
  EXPECT_EQ(::socketpair(AF_UNIX, SOCK_STREAM, 0, sockets.data()), 0);
  for (const int each : sockets)
    ::setsockopt(each, SOL_SOCKET, SO_SNDBUF, &buffer_bytes, sizeof buffer_bytes);
  return {std::make_shared<PeerConnection>(sockets[0], "rank 7", timeout),
          std::make_shared<PeerConnection>(sockets[1], "rank 3", timeout)};
}

Bytes random_bytes(std::mt19937& random, std::size_t count) {
  Bytes bytes(count);
  for (auto& each : bytes) each = static_cast<std::uint8_t>(random());
  return bytes;
}

std::size_t random_count(std::mt19937& random) {
  constexpr std::array<std::size_t, 9> kCounts = {0, 1, 7, 48, 4096, 16383, 16384, 16385, 300000};
  return kCounts[random() % kCounts.size()];
}

PeerConnection::Pieces pieces_of(Bytes& bytes, std::mt19937& random) {
  PeerConnection::Pieces pieces;
  for (std::size_t at = 0; at < bytes.size();) {
    const std::size_t count = std::min(bytes.size() - at, random() % 4 == 0 ? 1 : random_count(random));
    pieces.push_back({bytes.data() + at, count});
    at += count;
  }
  return pieces;
}

// However the bytes are cut on either side, and wherever what goes at once has ended.
TEST(PeerConnection, BytesComeAsTheyWereSent) {
  for (std::uint32_t seed = 0; seed < 60; ++seed) {
    std::mt19937 random(seed);
    const Ends ends = connected();
    std::vector<Bytes> messages;
    for (int i = 0; i < 5; ++i) messages.push_back(random_bytes(random, random_count(random)));
    Bytes all;
    for (const Bytes& each : messages) all.insert(all.end(), each.begin(), each.end());
    auto received = std::async(std::launch::async, [&, receives = std::mt19937(seed + 1)]() mutable {
      Bytes came(all.size());
      for (std::size_t at = 0; at < came.size();) {
        const std::size_t count = std::min(came.size() - at, random_count(receives));
        ends.far->receive(came.data() + at, count);
        at += count;
      }
      return came;
    });
    for (Bytes& each : messages) {
      const PeerConnection::Pieces pieces = pieces_of(each, random);
      const std::size_t sent = ends.near->send_at_once(pieces, 0);
      ASSERT_LE(sent, each.size());
      ends.near->send(pieces, sent);
    }
    EXPECT_EQ(received.get(), all) << "seed " << seed;
  }
}

TEST(PeerConnection, WhatWouldWaitDoesNotGoAtOnce) {
  const Ends ends = connected();
  Bytes bytes(8 << 20, 5);
  const PeerConnection::Pieces pieces = {{bytes.data(), bytes.size()}};
  const std::size_t sent = ends.near->send_at_once(pieces, 0);
  EXPECT_GT(sent, 0);
  EXPECT_LT(sent, bytes.size());
  EXPECT_EQ(ends.near->send_at_once(pieces, sent), sent);
}

TEST(PeerConnection, TheOtherEndIsNamedWhenItCloses) {
  Ends ends = connected();
  auto waits = std::async(std::launch::async, [near = ends.near] {
    char byte = 0;
    return error_of([&] { near->receive(&byte, 1); });
  });
  ends.far.reset();
  EXPECT_NE(waits.get().find("the connection to rank 7 was closed at its other end"), std::string::npos);
  Bytes bytes(1 << 20);
  const PeerConnection::Pieces pieces = {{bytes.data(), bytes.size()}};
  EXPECT_EQ(ends.near->send_at_once(pieces, 0), 0);
  EXPECT_NE(error_of([&] { ends.near->send(pieces, 0); }).find("the connection to rank 7 broke"),
            std::string::npos);
}

TEST(PeerConnection, NothingWaitsForLongerThanTheTimeout) {
  const Ends ends = connected(milliseconds(200));
  char byte = 0;
  Bytes bytes(8 << 20);
  for (const std::string& error : {error_of([&] { ends.near->receive(&byte, 1); }), error_of([&] {
                                     ends.near->send({{bytes.data(), bytes.size()}}, 0);
                                   })}) {
    EXPECT_NE(error.find("the connection to rank 7 was still for 200 ms"), std::string::npos) << error;
  }
}

TEST(PeerTransfer, AnAbortEndsTheWait) {
  for (const bool sends : {false, true}) {
    const Ends ends = connected();
    Bytes bytes(8 << 20);
    const auto transfer = c10::make_intrusive<PeerTransfer>(ends.near, [&] {
      if (sends) {
        ends.near->send({{bytes.data(), bytes.size()}}, 0);
      } else {
        ends.near->receive(bytes.data(), bytes.size());
      }
    });
    auto arrived = std::async(std::launch::async, [&] { return transfer->wait(); });
    EXPECT_EQ(arrived.wait_for(milliseconds(100)), std::future_status::timeout);
    transfer->abort();
    EXPECT_FALSE(arrived.get());
  }
}

TEST(PeerTransfer, AnErrorThatNobodyAskedForIsThrown) {
  Ends ends = connected();
  char byte = 0;
  ends.far.reset();
  const auto transfer = c10::make_intrusive<PeerTransfer>(ends.near, [&] { ends.near->receive(&byte, 1); });
  EXPECT_NE(error_of([&] { transfer->wait(); }).find("rank 7"), std::string::npos);
}

// A program that reads its data in processes of its own has forked them.
TEST(PeerConnection, AForkedChildKeepsNoConnectionOpen) {
  Ends ends = connected();
  std::array<int, 2> lives{};
  ASSERT_EQ(::pipe(lives.data()), 0);
  const pid_t child = ::fork();
  if (child == 0) {
    char byte = 0;
    ::close(lives[1]);
    ::_exit(::read(lives[0], &byte, 1) == 0 ? 0 : 1);  // until the parent lets it go
  }
  ends.far.reset();
  char byte = 0;
  EXPECT_NE(error_of([&] { ends.near->receive(&byte, 1); }).find("was closed"), std::string::npos);
  ::close(lives[1]);
  int status = -1;
  ::waitpid(child, &status, 0);
  EXPECT_EQ(status, 0);
}

}  // namespace
}  // namespace reef
