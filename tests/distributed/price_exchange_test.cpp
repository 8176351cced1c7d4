// Exchanges between real ranks against what they are priced at, and the measurement of the link between them.
#include "reef/price_exchange.h"

#include <gtest/gtest.h>
#include <torch/torch.h>

#include <algorithm>
#include <cstdio>
#include <numeric>
#include <string>
#include <vector>

#include "reef/collectives.h"
#include "reef/error.h"
#include "reef/measure_exchange_work.h"
#include "reef/measure_link.h"
#include "reef/process_group.h"
#include "shard/gradient_exchange.h"

namespace reef {
namespace {

using at::Tensor;

const ProcessGroupPtr& group() {
  static const ProcessGroupPtr the_group = init_process_group();
  return the_group;
}
int rank() { return group()->getRank(); }
int size() { return group()->getSize(); }

/// What every rank has, in order.
std::vector<double> all_have(const std::vector<double>& numbers) {
  Tensor all = torch::zeros({size(), static_cast<std::int64_t>(numbers.size())}, at::kDouble);
  all[rank()] = torch::tensor(numbers, at::kDouble);
  all_reduce({all}, group());
  return {all.data_ptr<double>(), all.data_ptr<double>() + all.numel()};
}

// Their own counters, exactly.
TEST(PriceExchange, BytesAreThoseThatRanksSend) {
  int number = 1;
  for (const Stage stage : {Stage::kReplicate, Stage::kGradients}) {
    for (const StepSchedule& density : {StepSchedule(), StepSchedule(0.02)}) {
      for (const std::int64_t elements : {1000, 300000}) {
        const bool divided = stage != Stage::kReplicate;
        const CompressionOptions options{.density = density};
        const ExchangePrices prices = price_exchange(
            {1e-3, 1e8}, elements, {.ranks = size(), .divided = divided, .compression_options = options});
        const std::int64_t padded = (((elements + 255) / 256 * 256 + size() - 1) / size() + 255) / 256 * 256;
        for (const ExchangePrice& price : prices.methods) {
          const auto exchange =
              make_gradient_exchange(group(), number++, size(),
                                     {.stage = stage,
                                      .compression = price.method,
                                      .compression_options = options_taken(price.method, options)});
          torch::manual_seed(static_cast<std::uint64_t>(rank()));
          const Tensor flat = torch::randn({padded * size()});
          exchange->begin_step(1);
          exchange->exchange({0, flat, divided ? exchange->ranks().own_slice(flat) : flat, {}});
          exchange->end_step(true);
          const std::vector<double> sent = all_have({static_cast<double>(exchange->ranks().sent_bytes())});
          const std::string row = std::string(name_of(price.method)) + " of " + std::to_string(elements) +
                                  (divided ? ", divided" : "");
          EXPECT_EQ(*std::max_element(sent.begin(), sent.end()), static_cast<double>(price.sent_bytes))
              << row;
          EXPECT_EQ(std::accumulate(sent.begin(), sent.end(), 0.0), static_cast<double>(price.all_bytes))
              << row;
        }
      }
    }
  }
}

TEST(MeasureLink, GivesEveryRankTheSameThatCanBePriced) {
  if (size() == 1) {
    EXPECT_THROW(measure_link(group()), ConfigError);
    return;
  }
  const LinkFit fit = measure_link(group());
  check_link(fit.link);
  std::vector<double> numbers = {fit.link.latency_seconds, fit.link.bytes_per_second,
                                 fit.link.message_seconds, fit.worst_error};
  ASSERT_EQ(fit.samples.size(), 20U);
  for (const LinkSample& sample : fit.samples) numbers.push_back(sample.seconds);
  const std::vector<double> all = all_have(numbers);
  for (std::size_t i = 0; i < all.size(); ++i) EXPECT_EQ(all[i], numbers[i % numbers.size()]);
  if (rank() == 0) std::printf("%s\n", fit.text().c_str());
}

TEST(MeasureExchangeWork, GivesEveryRankTheSame) {
  torch::manual_seed(1);
  const Tensor next = torch::rand({3});
  torch::manual_seed(1);
  const ExchangeWork work = measure_exchange_work(group(), 0.01);
  EXPECT_TRUE(torch::equal(torch::rand({3}), next));  // the program's generator is left alone
  const std::vector<double> numbers = {work.add, work.round, work.select, work.merge};
  for (const double each : numbers) EXPECT_GT(each, 0);
  const std::vector<double> all = all_have(numbers);
  for (std::size_t i = 0; i < all.size(); ++i) EXPECT_EQ(all[i], numbers[i % numbers.size()]);
  EXPECT_THROW(measure_exchange_work(group(), 2), ConfigError);
}

}  // namespace
}  // namespace reef
