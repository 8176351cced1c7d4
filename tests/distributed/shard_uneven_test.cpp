// Ranks that have other numbers of batches: those that wait are told who has gone where.
#include <optional>

#include "distributed/shard_net.h"
#include "reef/collectives.h"
#include "reef/error.h"

namespace reef::shard_tests {
namespace {

struct Row {
  const char* name;
  std::function<void(std::optional<Shard>&)> instead;  ///< of another step; throws where it waits
  bool waits;
  const char* text;
};

const std::vector<Row> kRows = {
    {"a state dict", [](std::optional<Shard>& sharded) { sharded->full_state_dict(); }, true,
     "full_state_dict() of shard 1 on rank "},
    {"its parameters", [](std::optional<Shard>& sharded) { sharded->gather(); }, true,
     "gather() of shard 1 on rank "},
    {"the end of the shard", [](std::optional<Shard>& sharded) { sharded.reset(); }, false,
     " has ended shard 1"},
};

TEST(ShardUneven, AllThatWaitAreToldWhoHasGoneWhere) {
  if (size() == 1) GTEST_SKIP() << "nobody waits";
  for (const Stage stage : {Stage::kReplicate, Stage::kParameters}) {
    for (const Row& row : kRows) {
      const std::string text = where(kCases.front(), stage, 7000) + ", " + row.name;
      const ProcessGroupPtr apart = init_process_group();  // which is lost then
      Net net(5);
      std::optional<Shard> sharded = shard(*net, apart, {.stage = stage, .bucket_bytes = 7000});
      const Optimizer optimizer = kCases.front().make(sharded->parameters());
      const auto backward = [&](int step) { net->forward(batch(Ranks::kAlike, 0, 2 * step)).backward(); };
      backward(0);
      optimizer->step();
      std::string told;
      try {
        rank() + 1 == size() ? row.instead(sharded) : backward(1);
      } catch (const RanksOutOfStep& error) {
        told = message_of(error);
      } catch (const c10::Error& error) {  // of an operator that waits for a parameter
        told = message_of(error);
        EXPECT_NE(stage, Stage::kReplicate) << text << ": " << told;
      }
      const bool waits = rank() + 1 < size() || row.waits;
      EXPECT_EQ(told.find("the ranks are out of step: ") != std::string::npos, waits) << text << ": " << told;
      EXPECT_EQ(told.find(row.text) != std::string::npos, waits) << text << ": " << told;
      EXPECT_EQ(told.find(" step 2 of shard 1") != std::string::npos, waits) << text << ": " << told;
      barrier(group());  // the others are told while this rank is in another group
      EXPECT_THROW(barrier(apart), RanksOutOfStep) << text;
    }
  }
}

}  // namespace
}  // namespace reef::shard_tests
