// A link's numbers from what was measured: links that were made up are found again.
#include "reef/link.h"

#include <gtest/gtest.h>

#include <cmath>
#include <functional>
#include <random>
#include <string>
#include <vector>

#include "support/config_error.h"

namespace reef {
namespace {

using test::config_error;

/// Ten sizes, one message a round, and eight together; each off by a share of at most `noise`.
std::vector<LinkSample> measured(const Link& link, double noise = 0) {
  std::mt19937_64 random(7);
  std::uniform_real_distribution<double> share(1 - noise, 1 + noise);
  std::vector<LinkSample> samples;
  for (const double rounds : {8.0, 1.0}) {
    for (int i = 0; i < 10; ++i) {
      LinkSample sample{rounds, 8, 8.0 * (1024 << i), 0};
      sample.seconds =
          (rounds * link.latency_seconds + 8 * link.message_seconds + sample.bytes / link.bytes_per_second) *
          share(random);
      samples.push_back(sample);
    }
  }
  return samples;
}

void is_near(const Link& found, const Link& link, double share) {
  const auto near = [&](double a, double b) { EXPECT_NEAR(a, b, share * b) << link_text(link); };
  near(found.latency_seconds, link.latency_seconds);
  near(found.bytes_per_second, link.bytes_per_second);
  near(found.message_seconds, link.message_seconds);
}

TEST(Link, IsFoundAgain) {
  for (const Link& link : {Link{0.436e-3, 1 / 9e-9, 0}, Link{30e-6, 5e9, 20e-6}, Link{5e-3, 12.5e6, 1e-3},
                           Link{0, 1e8, 50e-6}, Link{0, 1e8, 0}}) {
    const LinkFit exact = fit_link(measured(link));
    EXPECT_LT(exact.worst_error, 1e-9);
    EXPECT_NEAR(exact.link.latency_seconds, link.latency_seconds, 1e-9 * (link.latency_seconds + 1e-3));
    EXPECT_NEAR(exact.link.message_seconds, link.message_seconds, 1e-9 * (link.message_seconds + 1e-3));
    EXPECT_NEAR(exact.link.bytes_per_second, link.bytes_per_second, 1e-9 * link.bytes_per_second);
  }
}

TEST(Link, NoiseMovesItLittle) {
  const Link link{1e-3, 12.5e6, 0.2e-3};
  const LinkFit fit = fit_link(measured(link, 0.02));
  is_near(fit.link, link, 0.1);
  EXPECT_LE(fit.worst_error, 0.05);
  EXPECT_GT(fit.worst_error, 0.002);
}

// The best of all links around it: no number may be moved a little and fit better.
TEST(Link, IsTheLeastOfSquares) {
  const std::vector<LinkSample> samples = measured({1e-3, 12.5e6, 0.2e-3}, 0.3);
  const auto squares = [&](const Link& link) {
    double sum = 0;
    for (const LinkSample& each : samples) {
      const double predicted = each.rounds * link.latency_seconds + each.messages * link.message_seconds +
                               each.bytes / link.bytes_per_second;
      sum += std::pow(predicted / each.seconds - 1, 2);
    }
    return sum;
  };
  const Link best = fit_link(samples).link;
  for (const double share : {0.99, 1.01}) {
    for (double Link::*number : {&Link::latency_seconds, &Link::bytes_per_second, &Link::message_seconds}) {
      Link moved = best;
      moved.*number *= share;
      EXPECT_LE(squares(best), squares(moved));
    }
  }
}

TEST(Link, RefusesSamplesThatTellNoBandwidth) {
  const auto says = [](const std::function<void()>& call, const std::string& part) {
    EXPECT_NE(config_error(call).find(part), std::string::npos) << config_error(call);
  };
  says([] { fit_link({}); }, "0 samples that do not tell a bandwidth");
  says([] { fit_link({{1, 1, 1000, 1e-3}, {1, 1, 1000, 1e-3}}); }, "do not tell a bandwidth");
  says([] { fit_link({{1, 1, 1000, 1e-3}, {1, 1, 100000, 1e-3}}); }, "do not tell a bandwidth");
  says([] { fit_link({{1, 1, 1000, 1e-3}, {1, 1, 100000, 1e-4}}); }, "do not tell a bandwidth");
  says([] { fit_link({{1, 1, 1000, 0}}); }, "not positive in all it has");
}

// Noise adds time and never takes it away.
TEST(Link, BoundsHoldWhateverNoiseAdds) {
  std::mt19937_64 random(11);
  std::exponential_distribution<double> noise(0.5);
  for (const Link& link : {Link{0.436e-3, 1 / 9e-9, 0}, Link{30e-6, 5e9, 20e-6}, Link{0, 1e8, 0}}) {
    std::vector<LinkSample> samples = measured(link);
    for (LinkSample& each : samples) each.seconds *= 1 + noise(random);
    const LinkFit bound = bound_link(samples);
    EXPECT_GE(bound.link.latency_seconds, link.latency_seconds);
    EXPECT_LE(bound.link.bytes_per_second, link.bytes_per_second);
    EXPECT_EQ(bound.link.message_seconds, 0);
    EXPECT_LE(bound.worst_error, 1);
    check_link(bound.link);
  }
  EXPECT_EQ(bound_link({{2, 4, 1000, 1e-3}, {1, 4, 100000, 1e-4}}).link.latency_seconds, 1e-4);
  EXPECT_NE(config_error([] { bound_link({}); }).find("no samples"), std::string::npos);
  EXPECT_NE(config_error([] { bound_link({{1, 1, 0, 1}}); }).find("not positive"), std::string::npos);
}

TEST(Link, TextSaysUnits) {
  EXPECT_EQ(link_text({0.436e-3, 1.25e8, 2e-5}), "0.436 ms of latency, 0.020 ms a message, 125.0 MB/s");
  EXPECT_EQ(LinkFit({{0.436e-3, 1.25e8, 2e-5}, 0.071, {{}, {}}}).text(),
            "0.436 ms of latency, 0.020 ms a message, 125.0 MB/s, within 7 % of 2 measurements");
}

}  // namespace
}  // namespace reef
