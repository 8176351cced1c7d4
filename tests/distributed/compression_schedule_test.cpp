// Options of a compression that change with the steps, as a shard counts them.
#include <cstdint>
#include <vector>

#include "shard_net.h"

namespace reef::shard_tests {
namespace {

// The first step is the schedule's first.
TEST(CompressionSchedule, BeginsWithTheFirstStep) {
  if (size() == 1) return;
  ShardOptions options{.bucket_bytes = 5000, .compression = Compression::kTopK};
  options.compression_options.density = {{0, 0.5}, {1, 0.01}};
  Net net(7);
  Shard sharded = shard(*net, group(), options);
  const Optimizer optimizer = kCases[0].make(sharded.parameters());
  std::vector<std::int64_t> sent = {sharded.sent_bytes()};
  for (int step = 0; step < 2; ++step) {
    optimizer->zero_grad();
    net->forward(batch(ranks_at(options.stage), rank(), step)).backward();
    optimizer->step();
    sent.push_back(sharded.sent_bytes());
  }
  EXPECT_GT(sent[1] - sent[0], 20 * (sent[2] - sent[1]));
}

}  // namespace
}  // namespace reef::shard_tests
