#include "page/fault_trouble.h"

#include <gtest/gtest.h>

#include <chrono>

namespace reef {
namespace {

using namespace std::chrono_literals;

constexpr FaultTrouble::Time kBegin{std::chrono::hours{5}};

TEST(FaultTrouble, OneThatComesAgainAndAgainIsCounted) {
  FaultTrouble trouble;
  for (int time = 1; time <= 20; ++time) {
    EXPECT_EQ(trouble.times_now(4096, kBegin + time * 1900ms), time);
    EXPECT_EQ(trouble.times_now(8192, kBegin + time * 10ms), time);
  }
}

// In days of training, at an address that is used all the time.
TEST(FaultTrouble, OneThatComesNowAndThenIsNot) {
  FaultTrouble trouble;
  for (int time = 1; time <= 1000; ++time) EXPECT_EQ(trouble.times_now(4096, kBegin + time * 3s), 1);
}

TEST(FaultTrouble, OneThatWasServedBeginsAnew) {
  FaultTrouble trouble;
  trouble.times_now(4096, kBegin);
  EXPECT_EQ(trouble.times_now(4096, kBegin), 2);
  trouble.over(4096);
  EXPECT_EQ(trouble.times_now(4096, kBegin), 1);
}

}  // namespace
}  // namespace reef
