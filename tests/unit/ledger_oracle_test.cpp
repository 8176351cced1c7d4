// The ledger against an independent witness: an allocator underneath it that writes down every request it
// serves. This program's first Ledger is made after the witness is in place, so both see the same blocks from
// the start.
#include <c10/core/CPUAllocator.h>
#include <gtest/gtest.h>
#include <torch/torch.h>

#include <mutex>
#include <random>
#include <unordered_map>

#include "ledger/block_table.h"
#include "reef/ledger.h"

namespace reef {
namespace {

class Witness final : public c10::Allocator {
 public:
  static Witness& instance() {
    static auto* const witness = [] {
      auto* made = new Witness;
      made->below_ = c10::GetCPUAllocator();
      c10::SetCPUAllocator(made, 0);
      return made;
    }();
    return *witness;
  }

  c10::DataPtr allocate(std::size_t bytes) override {
    c10::DataPtr block = below_->allocate(bytes);
    void* data = block.get();
    if (data == nullptr) return block;
    block.release_context();
    const std::lock_guard lock(mutex_);
    sizes_[data] = static_cast<std::int64_t>(bytes);
    log_.push_back(static_cast<std::int64_t>(bytes));
    return {data, data, &free, block.device()};
  }
  c10::DeleterFnPtr raw_deleter() const override { return &free; }
  void copy_data(void* to, const void* from, std::size_t bytes) const override {
    default_copy_data(to, from, bytes);
  }

  std::vector<std::int64_t> take_log() {
    const std::lock_guard lock(mutex_);
    return std::exchange(log_, {});
  }
  std::int64_t live() {
    const std::lock_guard lock(mutex_);
    std::int64_t sum = 0;
    for (const auto& [data, bytes] : sizes_) sum += bytes;
    return sum;
  }

 private:
  static void free(void* data) {
    Witness& self = instance();
    {
      const std::lock_guard lock(self.mutex_);
      const auto block = self.sizes_.find(data);
      if (block != self.sizes_.end()) {
        self.log_.push_back(-block->second);
        self.sizes_.erase(block);
      }
    }
    self.below_->raw_deleter()(data);
  }

  c10::Allocator* below_ = nullptr;
  std::mutex mutex_;
  std::unordered_map<void*, std::int64_t> sizes_;
  std::vector<std::int64_t> log_;
};

const bool kWitnessFirst = [] {
  Witness::instance();
  return true;
}();

struct Net : torch::nn::Module {
  Net() {
    embedding = register_module("embedding", torch::nn::Embedding(40, 32));
    lstm = register_module("lstm", torch::nn::LSTM(torch::nn::LSTMOptions(32, 32).batch_first(true)));
    norm = register_module("norm", torch::nn::LayerNorm(torch::nn::LayerNormOptions({32})));
    attention = register_module("attention", torch::nn::MultiheadAttention(32, 4));
    dropout = register_module("dropout", torch::nn::Dropout(0.3));
  }
  at::Tensor forward(const at::Tensor& tokens) {
    at::Tensor h = std::get<0>(lstm->forward(embedding(tokens)));
    h = norm(h + std::get<0>(attention->forward(h, h, h)));
    return torch::matmul(dropout(h).relu_(), embedding->weight.t());
  }
  torch::nn::Embedding embedding{nullptr};
  torch::nn::LSTM lstm{nullptr};
  torch::nn::LayerNorm norm{nullptr};
  torch::nn::MultiheadAttention attention{nullptr};
  torch::nn::Dropout dropout{nullptr};
};

void train_a_step(Net& net, torch::optim::Optimizer& optimizer) {
  const at::Tensor tokens = torch::randint(40, {4, 12});
  optimizer.zero_grad();
  const at::Tensor out = net.forward(tokens);
  torch::nn::functional::cross_entropy(out.view({-1, 40}), tokens.view({-1})).backward();
  torch::nn::utils::clip_grad_norm_(net.parameters(), 1.0);
  optimizer.step();
}

// Event by event: the same signed sizes in the same order, and after each of them no category below zero.
TEST(LedgerOracle, EveryEventOfRealTrainingIsTheWitnesss) {
  ASSERT_TRUE(kWitnessFirst);
  Ledger ledger;
  Net net;
  torch::optim::AdamW optimizer(net.parameters(), torch::optim::AdamWOptions(1e-3));
  ledger.watch(net);
  ledger.watch(optimizer);
  for (int step = 0; step < 3; ++step) {
    Witness::instance().take_log();
    const std::int64_t start = ledger.live().total();
    EXPECT_EQ(start, Witness::instance().live());
    ledger.start_timeline();
    train_a_step(net, optimizer);
    const std::vector<std::int64_t> witnessed = Witness::instance().take_log();
    const Timeline timeline = ledger.stop_timeline();

    std::vector<std::int64_t> counted;
    CategoryBytes live = timeline.start.at(0);
    std::int64_t total = start;
    for (const TimelineEvent& event : timeline.events) {
      live[event.category] += event.bytes;
      if (event.kind == TimelineEvent::Kind::kMove) {
        live[event.from] -= event.bytes;
      } else {
        counted.push_back(event.bytes);
        total += event.bytes;
      }
      ASSERT_EQ(live.total(), total);
      for (const std::int64_t bytes : live.of) ASSERT_GE(bytes, 0);
    }
    ASSERT_EQ(counted, witnessed);
    EXPECT_EQ(live, ledger.live());
    EXPECT_EQ(total, Witness::instance().live());
    EXPECT_EQ(total, allocator_live_bytes());
  }
}

// Observing must not change what is allocated: autograd steals a gradient only while nobody else refers to
// it.
TEST(LedgerOracle, ObservingChangesNoAllocation) {
  std::vector<std::vector<std::int64_t>> logs;
  std::vector<float> losses;
  for (const bool observed : {false, true}) {
    torch::manual_seed(0);
    std::optional<Ledger> ledger;
    if (observed) ledger.emplace();
    Net net;
    torch::optim::AdamW optimizer(net.parameters(), torch::optim::AdamWOptions(1e-3));
    if (observed) {
      ledger->watch(net);
      ledger->watch(optimizer);
    }
    Witness::instance().take_log();
    for (int step = 0; step < 2; ++step) train_a_step(net, optimizer);
    logs.push_back(Witness::instance().take_log());
    losses.push_back(net.forward(torch::arange(40).view({4, 10})).sum().item<float>());
  }
  EXPECT_EQ(logs[0], logs[1]);
  EXPECT_EQ(losses[0], losses[1]);
}

TEST(LedgerOracle, AdoptsBlocksOlderThanItself) {
  // Storages that never went through the counting allocator, as in a program that makes its model first.
  c10::Allocator* older = &Witness::instance();
  Ledger ledger;
  const std::int64_t before = ledger.live().total();
  at::Tensor model = at::empty({0}).set_(
      c10::Storage(c10::Storage::use_byte_size_t(), 4000, older->allocate(4000), older, true), 0, {1000},
      {1});
  EXPECT_EQ(ledger.live().total(), before);
  ledger.watch(model);
  EXPECT_EQ(ledger.live()[Category::kParameter], 4000);
  EXPECT_EQ(ledger.live().total(), allocator_live_bytes());
  model.reset();
  EXPECT_EQ(ledger.live().total(), before);
  EXPECT_EQ(ledger.live().total(), allocator_live_bytes());
}

TEST(BlockTable, AgreesWithAMapUnderRandomUse) {
  std::mt19937_64 random(7);
  BlockTable table;
  std::unordered_map<std::uint64_t, std::uint64_t> map;
  for (int i = 0; i < 200'000; ++i) {
    // Few distinct addresses, close together: probe runs collide and wrap.
    const std::uint64_t address = (1 + random() % 3000) * 64;
    Block* block = table.find(address);
    ASSERT_EQ(block != nullptr, map.contains(address));
    if (block == nullptr) {
      const std::uint64_t bytes = random() % (std::uint64_t{1} << 48);
      table.insert({address, bytes, 3, 2});
      map[address] = bytes;
    } else {
      ASSERT_EQ(block->bytes, map[address]);
      ASSERT_EQ(block->device, 3U);
      ASSERT_EQ(block->category, 2U);
      table.erase(block);
      map.erase(address);
    }
    ASSERT_EQ(table.size(), map.size());
    ASSERT_EQ(table.find(0), nullptr);
  }
}

}  // namespace
}  // namespace reef
