// Calls between ranks, all of which are this process.
#include "distributed/peer_listener.h"

#include <gtest/gtest.h>
#include <sys/socket.h>

#include <algorithm>
#include <cstdint>
#include <functional>
#include <numeric>
#include <random>
#include <set>
#include <string>
#include <vector>

#include "support/error_of.h"

namespace reef {
namespace {

using test::error_of;

Deadline in(int seconds) { return std::chrono::steady_clock::now() + std::chrono::seconds(seconds); }

PeerListener listens_on_loopback() { return PeerListener(*address_of_host("127.0.0.1")); }

/// Connects, and says the first `bytes` of `hello`.
Socket says(const PeerPlace& place, PeerHello hello, std::size_t bytes) {
  const SocketAddress address = *address_of_host(place.host, place.port);
  Socket socket(::socket(AF_INET, SOCK_STREAM, 0));
  EXPECT_EQ(::connect(socket.get(), address.get(), address.size), 0);
  if (bytes > 0 && ::send(socket.get(), &hello, bytes, MSG_NOSIGNAL) != static_cast<ssize_t>(bytes))
    ADD_FAILURE() << "cannot send";
  return socket;
}

void expect_same_connection(const Socket& one, const Socket& other) {
  const std::uint32_t sent = 0x5eef;
  std::uint32_t received = 0;
  ASSERT_EQ(::send(one.get(), &sent, sizeof sent, MSG_NOSIGNAL), static_cast<ssize_t>(sizeof sent));
  ASSERT_EQ(::recv(other.get(), &received, sizeof received, MSG_WAITALL), static_cast<ssize_t>(sizeof sent));
  EXPECT_EQ(received, sent);
}

struct Stray {
  std::string what;
  std::function<Socket(const PeerPlace&)> call;
};

std::vector<Stray> strays() {
  constexpr std::size_t kWhole = sizeof(PeerHello);
  const auto right = [](const PeerPlace& place) { return PeerHello{place.number, 3}; };
  return {
      {"says nothing", [=](const PeerPlace& at) { return says(at, right(at), 0); }},
      {"says one byte", [=](const PeerPlace& at) { return says(at, right(at), 1); }},
      {"says all but one byte", [=](const PeerPlace& at) { return says(at, right(at), kWhole - 1); }},
      {"hangs up", [=](const PeerPlace& at) { return says(at, right(at), 0), Socket(); }},
      {"hangs up after half", [=](const PeerPlace& at) { return says(at, right(at), kWhole / 2), Socket(); }},
      {"has another number",
       [=](const PeerPlace& at) {
         return says(at, {at.number + 1, 3}, kWhole);
       }},
      {"is a rank that is not expected",
       [=](const PeerPlace& at) {
         return says(at, {at.number, 4}, kWhole);
       }},
      {"is no rank", [=](const PeerPlace& at) {
         return says(at, {at.number, -1}, kWhole);
       }}};
}

TEST(PeerListener, AStrayCallKeepsNoRankWaiting) {
  for (const Stray& stray : strays()) {
    SCOPED_TRACE(stray.what);
    PeerListener listener = listens_on_loopback();
    const Socket held = stray.call(listener.place());
    const Socket called = call_peer(listener.place(), 0, 3, in(60));
    const auto [rank, accepted] = listener.accept({3}, in(60));
    EXPECT_EQ(rank, 3);
    expect_same_connection(called, accepted);
  }
}

// Ranks call in any order, with strays between them.
TEST(PeerListener, EveryRankIsAcceptedOnce) {
  for (std::uint32_t seed = 0; seed < 40; ++seed) {
    SCOPED_TRACE(seed);
    std::mt19937 random(seed);
    PeerListener listener = listens_on_loopback();
    std::vector<int> ranks(random() % 6 + 1);
    std::iota(ranks.begin(), ranks.end(), 5);
    std::shuffle(ranks.begin(), ranks.end(), random);
    const std::vector<Stray> all = strays();
    std::vector<Socket> held, called;
    for (const int rank : ranks) {
      for (std::uint32_t i = random() % 3; i > 0; --i)
        held.push_back(all[random() % all.size()].call(listener.place()));
      called.push_back(call_peer(listener.place(), 1, rank, in(60)));
    }
    std::set<int> missing(ranks.begin(), ranks.end());
    while (!missing.empty()) {
      const auto [rank, accepted] = listener.accept(missing, in(60));
      ASSERT_EQ(missing.erase(rank), 1U);
      const auto at = std::find(ranks.begin(), ranks.end(), rank) - ranks.begin();
      expect_same_connection(called[static_cast<std::size_t>(at)], accepted);
    }
  }
}

TEST(PeerListener, AProofMayComeInPieces) {
  PeerListener listener = listens_on_loopback();
  const PeerHello hello{listener.place().number, 3};
  const Socket called = says(listener.place(), hello, 5);
  const std::string nobody = error_of([&] { listener.accept({3}, std::chrono::steady_clock::now()); });
  EXPECT_EQ(nobody, "it was not called by rank 3");
  const char* const rest = reinterpret_cast<const char*>(&hello) + 5;
  ASSERT_EQ(::send(called.get(), rest, sizeof hello - 5, MSG_NOSIGNAL), ssize_t{sizeof hello - 5});
  EXPECT_EQ(listener.accept({3}, in(60)).first, 3);
}

TEST(PeerListener, PlacesTravelAsText) {
  const PeerListener listener = listens_on_loopback(), other = listens_on_loopback();
  const PeerPlace& place = listener.place();
  const PeerPlace copy = PeerPlace::from_text(place.text());
  EXPECT_EQ(copy.host, "127.0.0.1");
  EXPECT_EQ(copy.port, place.port);
  EXPECT_EQ(copy.number, place.number);
  EXPECT_NE(other.place().number, place.number);
}

TEST(PeerListener, SaysWhatCannotBeReached) {
  PeerPlace place;
  {
    const PeerListener listener = listens_on_loopback();
    place = listener.place();
  }
  EXPECT_EQ(error_of([&] { call_peer(place, 2, 0, in(60)); }),
            "it cannot reach rank 2 at 127.0.0.1: Connection refused");
  EXPECT_EQ(error_of([&] { PeerListener(*address_of_host("192.0.2.1")); }),  // an address for documentation
            "it cannot listen: Cannot assign requested address");
}

TEST(PeerListener, FindsAddresses) {
  EXPECT_FALSE(address_of_interface("no such interface"));
  EXPECT_FALSE(address_of_host("no such host.invalid"));
  const auto loopback = address_of_interface("lo");
  if (!loopback) GTEST_SKIP() << "no interface is called lo here";
  EXPECT_EQ(loopback->bytes.ss_family, AF_INET);
  EXPECT_NE(PeerListener(*loopback).place().port, "0");
}

}  // namespace
}  // namespace reef
