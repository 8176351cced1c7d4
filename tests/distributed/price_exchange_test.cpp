// Exchanges between real ranks against what they are priced at, and the measurement of the link between them.
#include "reef/price_exchange.h"

#include <gtest/gtest.h>
#include <torch/torch.h>

#include <algorithm>
#include <cstdio>
#include <numeric>
#include <string>
#include <vector>

#include "exchanges.h"
#include "reef/collectives.h"
#include "reef/error.h"
#include "reef/measure_exchange_work.h"
#include "reef/measure_link.h"
#include "reef/shard.h"
#include "shard/gradient_exchange.h"

namespace reef {
namespace {

using at::Tensor;
using exchanges::group;
using exchanges::next_number;
using exchanges::rank;
using exchanges::size;

/// What every rank has, in order.
std::vector<double> all_have(const std::vector<double>& numbers) {
  Tensor all = torch::zeros({size(), static_cast<std::int64_t>(numbers.size())}, at::kDouble);
  all[rank()] = torch::tensor(numbers, at::kDouble);
  all_reduce({all}, group());
  return {all.data_ptr<double>(), all.data_ptr<double>() + all.numel()};
}

// Compares with the ranks' own counters, exactly. The bytes of kOkTopK depend on the gradients; with many
// entries they are within a tenth.
TEST(PriceExchange, BytesAreThoseThatRanksSend) {
  for (const Stage stage : {Stage::kReplicate, Stage::kGradients}) {
    for (const StepSchedule& density : {StepSchedule(), StepSchedule(0.02)}) {
      for (const std::int64_t elements : {1000, 300000}) {
        const bool divided = stage != Stage::kReplicate;
        const CompressionOptions options{.density = density, .bits = 5};
        const std::vector<std::int64_t> shape = {elements / 50, 50};
        const ExchangePrices prices = price_exchange(
            {1e-3, 1e8}, elements,
            {.ranks = size(), .divided = divided, .compression_options = options, .shapes = {{shape}}});
        EXPECT_EQ(prices.methods.size(), 11U);
        const std::int64_t padded = (((elements + 255) / 256 * 256 + size() - 1) / size() + 255) / 256 * 256;
        for (const ExchangePrice& price : prices.methods) {
          const auto exchange =
              make_gradient_exchange(group(), next_number(), size(),
                                     {.stage = stage,
                                      .compression = price.method,
                                      .compression_options = options_taken(price.method, options)});
          torch::manual_seed(static_cast<std::uint64_t>(rank()));
          const Tensor flat = torch::randn({padded * size()});
          const FlatPlace place{0, shape, {50, 1}};
          const int steps = price.method == Compression::kPowerSgdAlternating ? 2 : 1;
          for (int step = 1; step <= steps; ++step) {
            exchange->begin_step(step);
            exchange->exchange({0, flat, divided ? exchange->ranks().own_slice(flat) : flat, place});
            exchange->end_step(true);
          }
          const std::vector<double> sent = all_have({static_cast<double>(exchange->ranks().sent_bytes())});
          const std::string row = std::string(name_of(price.method)) + " of " + std::to_string(elements) +
                                  (divided ? ", divided" : "");
          const double most = *std::max_element(sent.begin(), sent.end());
          if (price.method == Compression::kOkTopK) {
            const double entries = density.at(1, 0.001) * static_cast<double>(elements);
            if (entries > 1000) {
              EXPECT_NEAR(most, price.sent_bytes, 0.1 * price.sent_bytes) << row;
            }
            continue;
          }
          EXPECT_EQ(most, static_cast<double>(steps * price.sent_bytes)) << row;
          EXPECT_EQ(std::accumulate(sent.begin(), sent.end(), 0.0),
                    static_cast<double>(steps * price.all_bytes))
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
  for (const std::int64_t elements : {1, 100'000, 1 << 22}) {
    const ExchangeWork work = measure_exchange_work(group(), 0.01, elements);
    std::vector<double> numbers;
    for (const auto member : kExchangeWorkMembers) numbers.push_back(work.*member);
    for (const double each : numbers) EXPECT_GT(each, 0);
    const std::vector<double> all = all_have(numbers);
    for (std::size_t i = 0; i < all.size(); ++i) EXPECT_EQ(all[i], numbers[i % numbers.size()]);
  }
  EXPECT_TRUE(torch::equal(torch::rand({3}), next));  // the program's generator is left alone
  EXPECT_THROW(measure_exchange_work(group(), 2), ConfigError);
  EXPECT_THROW(measure_exchange_work(group(), 0.01, 0), ConfigError);
}

// All ranks take the method that the prices say, and train as if it had been named.
TEST(CompressionAuto, IsTheFastestOfWhatIsAllowed) {
  for (const Stage stage : {Stage::kReplicate, Stage::kParameters}) {
    for (const std::vector<ExchangeClass>& allow :
         {std::vector<ExchangeClass>{}, std::vector<ExchangeClass>{ExchangeClass::kExact},
          std::vector<ExchangeClass>{ExchangeClass::kUnbiased}}) {
      const auto trained = [&](const ShardOptions& options, auto&& see) {
        torch::manual_seed(3);
        torch::nn::Linear net(100, 50);
        {
          Shard sharded = shard(*net, group(), options);
          see(sharded, *net);
          torch::optim::SGD optimizer(sharded.parameters(), 0.1);
          for (int step = 0; step < 3; ++step) {
            optimizer.zero_grad();
            torch::manual_seed(static_cast<std::uint64_t>(10 * step + rank()));
            net->forward(torch::randn({4, 100})).pow(2).mean().backward();
            optimizer.step();
          }
          sharded.gather();
        }
        return net->weight.detach();
      };
      ShardOptions named{.stage = stage};
      const Tensor chosen = trained({.stage = stage,
                                     .compression = Compression::kAuto,
                                     .compression_options = {.density = 0.05},
                                     .allow = allow},
                                    [&](Shard& sharded, torch::nn::Module& net) {
                                      named.compression = sharded.compression();
                                      named.compression_options =
                                          options_taken(named.compression, {.density = 0.05});
                                      const auto& prices = sharded.compression_prices();
                                      EXPECT_EQ(prices.has_value(), size() > 1);
                                      if (!prices) return;
                                      EXPECT_EQ(prices->fastest(allow).method, sharded.compression());
                                      EXPECT_EQ(prices->ranks, size());
                                      sharded.refresh(net);
                                      EXPECT_EQ(named.compression, sharded.compression());
                                      EXPECT_TRUE(sharded.compression_prices().has_value());
                                    });
      EXPECT_TRUE(torch::equal(chosen, trained(named, [](Shard&, torch::nn::Module&) {})));
      if (!allow.empty() && size() > 1) {
        EXPECT_EQ(named.compression,
                  allow.front() == ExchangeClass::kExact ? Compression::kNone : Compression::kQsgd);
      }
      const std::vector<double> all = all_have({static_cast<double>(named.compression)});
      for (const double each : all) EXPECT_EQ(each, static_cast<double>(named.compression));
    }
  }
}

TEST(CompressionAuto, RefusesWhatItCannotPrice) {
  torch::nn::Linear net(10, 10);
  const auto says = [&](const ShardOptions& options, const std::string& part) {
    try {
      shard(*net, group(), options);
      ADD_FAILURE() << "not refused: " << part;
    } catch (const ConfigError& error) {
      EXPECT_NE(message_of(error).find(part), std::string::npos) << message_of(error);
    }
  };
  says({.allow = {ExchangeClass::kExact}}, "which chooses nothing");
  says({.compression = Compression::kAuto, .mixed_precision = MixedPrecision{.sums = at::kBFloat16}},
       "prices float32 on the CPU");
  if (size() > 1) {
    says({.stage = Stage::kOptimizer, .compression = Compression::kAuto, .shard_degree = 1},
         "leave shard_degree out");
  }
}

}  // namespace
}  // namespace reef
