// Where addresses stay: whoever reads or writes a tensor through a pointer, whenever it was taken, finds the
// right bytes, although pages leave at any moment.
#include <gtest/gtest.h>
#include <sys/wait.h>
#include <torch/torch.h>
#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <cstdint>
#include <cstring>
#include <filesystem>
#include <limits>
#include <random>
#include <thread>
#include <vector>

#include "budget/deep_net.h"
#include "reef/budget.h"
#include "reef/error.h"
#include "reef/ledger.h"
#include "support/environment.h"
#include "support/forked_children.h"
#include "support/forwarding_tier.h"
#include "userfault/frames.h"

namespace reef {
namespace {

constexpr std::uint64_t kMany = std::numeric_limits<std::int64_t>::max();

struct BudgetAddresses : testing::TestWithParam<const char*> {
  void SetUp() override {
    if (const std::string may = Budget(kMany).addresses(); may.find("stay") != 0) GTEST_SKIP() << may;
    torch::manual_seed(0);
  }
  bool waits_in_system_calls() const { return std::string(GetParam()) == "stay"; }
  test::Environment addresses{"REEF_ADDRESSES", GetParam()};
};

// Threads that count in words of tensors by raw pointers, each in its own, while all of it is several times
// the budget. Half of the tensors are older than the budget.
void count_through_pointers(std::int64_t tensor_words, std::uint64_t budget_bytes, std::uint64_t evictions) {
  constexpr std::int64_t kTensors = 64;
  constexpr std::int64_t kStride = 1024;
  std::vector<at::Tensor> tensors;
  for (std::int64_t i = 0; i < kTensors; ++i) tensors.push_back(torch::zeros({tensor_words}, torch::kInt));
  Budget budget(budget_bytes, at::TensorList(tensors));
  for (std::int64_t i = 0; i < kTensors; ++i) tensors.push_back(torch::zeros({tensor_words}, torch::kInt));
  std::vector<std::int32_t*> words;
  for (const at::Tensor& tensor : tensors) words.push_back(tensor.mutable_data_ptr<std::int32_t>());
  std::atomic<bool> over = false;
  std::vector<std::vector<std::int32_t>> counted(2, std::vector<std::int32_t>(tensors.size(), 0));
  const auto count = [&](std::size_t thread) {
    std::mt19937 random(static_cast<unsigned>(thread));
    while (!over) {
      const std::size_t i = random() % words.size();
      for (std::int64_t at = static_cast<std::int64_t>(thread); at < tensor_words; at += kStride)
        ++words[i][at];
      ++counted[thread][i];
    }
  };
  std::vector<std::thread> threads;
  for (std::size_t thread = 0; thread < counted.size(); ++thread) threads.emplace_back(count, thread);
  while (budget.use().evictions < evictions) std::this_thread::sleep_for(std::chrono::milliseconds(1));
  over = true;
  for (std::thread& thread : threads) thread.join();
  const BudgetUse use = budget.use();
  EXPECT_LE(use.peak_bytes, use.budget_bytes);
  EXPECT_GT(use.unannounced, 0);
  for (std::size_t i = 0; i < tensors.size(); ++i) {
    EXPECT_EQ(tensors[i].const_data_ptr<std::int32_t>(), words[i]);
    for (std::int64_t at = 0; at < tensor_words; ++at) {
      const auto thread = static_cast<std::size_t>(at % kStride);
      ASSERT_EQ(words[i][at], thread < counted.size() ? counted[thread][i] : 0) << i << ' ' << at;
    }
  }
}

TEST_P(BudgetAddresses, NoWriteIsLostInAHundredThousandEvictions) {
  count_through_pointers(12000, std::uint64_t{64} * 12000 * 4 / 4, 100000);
}

TEST_P(BudgetAddresses, NoWriteIsLostInLargeFrames) {
  count_through_pointers(kLargeFrameBytes / 4 - 9000, 64 * kLargeFrameBytes, 4000);
}

TEST_P(BudgetAddresses, AnEvictedTensorIsReadThroughItsPointer) {
  const at::Tensor before = torch::ones({100000});
  const auto* const old = before.const_data_ptr<float>();
  Budget budget(900000, at::TensorList(before));
  const at::Tensor within = torch::ones({100000}) * 2;
  const auto* const young = within.const_data_ptr<float>();
  budget.set_bytes(200000);
  EXPECT_LE(budget.use().live_bytes, budget.use().budget_bytes);
  EXPECT_GT(budget.use().evictions, 0);
  EXPECT_EQ(std::count(old, old + 100000, 1.0F), 100000);
  EXPECT_EQ(std::count(young, young + 100000, 2.0F), 100000);
  EXPECT_EQ(before.const_data_ptr<float>(), old);
  EXPECT_EQ(within.const_data_ptr<float>(), young);
  EXPECT_GT(budget.use().unannounced, 0) << budget.report();
}

// The ledger counts what is in memory, as the budget does.
TEST_P(BudgetAddresses, TheLedgerAgrees) {
  Ledger ledger;
  Budget budget(10000000);
  std::vector<at::Tensor> tensors;
  for (const std::int64_t size : {100, 500, 3000, 50000, 2000000}) tensors.push_back(torch::ones({size}));
  const auto alive = [&] { return static_cast<std::uint64_t>(ledger.live().total()); };
  const std::uint64_t all = alive();
  budget.set_bytes(budget.use().live_bytes / 8);
  EXPECT_LT(alive(), all / 4);
  EXPECT_LE(alive(), budget.use().live_bytes);
  budget.set_bytes(kMany);
  EXPECT_EQ(alive(), all);
  tensors.clear();
  EXPECT_EQ(alive(), all - (100 + 500 + 3000 + 50000 + 2000000) * sizeof(float));
}

// A forked child serves itself: what is away when it begins, and what its parent does with it later, is its
// own.
TEST_P(BudgetAddresses, AForkedChildReadsWhatIsAway) {
  if (!kForkedChildrenMayAllocate) GTEST_SKIP() << kForkedChildrenMayHang;
  for (const bool on_disk : {false, true}) {
    std::vector<std::shared_ptr<Tier>> tiers;
    if (on_disk)
      tiers.push_back(disk_tier(
          {.directory = std::filesystem::temp_directory_path(), .capacity_bytes = std::uint64_t{1} << 40}));
    Budget budget(4000000, at::TensorList(), {.tiers = tiers});
    std::vector<at::Tensor> tensors;
    for (int i = 0; i < 16; ++i) tensors.push_back(torch::full({50000}, static_cast<float>(i)));
    budget.set_bytes(budget.use().live_bytes / 3);
    int go[2];
    ASSERT_EQ(::pipe(go), 0);
    const pid_t child = ::fork();
    if (child == 0) {
      char begin = 0;
      bool right = ::read(go[0], &begin, 1) == 1;
      for (int i = 0; i < 16; ++i) {
        auto* const words = tensors[i].mutable_data_ptr<float>();
        right = right && words[0] == static_cast<float>(i) && words[49999] == static_cast<float>(i);
        words[1] = -1;
      }
      ::_exit(right ? 0 : 1);
    }
    for (int round = 0; round < 3; ++round) {
      for (const at::Tensor& tensor : tensors) tensor.add_(1);  // what the child reads leaves and comes
    }
    ASSERT_EQ(::write(go[1], "x", 1), 1);
    int status = -1;
    ASSERT_EQ(::waitpid(child, &status, 0), child);
    EXPECT_EQ(status, 0);
    for (int i = 0; i < 16; ++i) EXPECT_EQ(tensors[i].sum().item<double>(), 50000.0 * (i + 3));
    ::close(go[0]);
    ::close(go[1]);
  }
}

// A fork holds every lock of Reef's in turn, while others fault; and each child, whose memory is half away,
// is whole.
TEST_P(BudgetAddresses, ForksWhileOthersTouchWhatIsAway) {
  if (!kForkedChildrenMayAllocate) GTEST_SKIP() << kForkedChildrenMayHang;
  constexpr int kTensors = 24;
  constexpr int kForks = 20;
  Budget budget(kMany);
  std::vector<at::Tensor> tensors;
  std::vector<const float*> words;
  for (int i = 0; i < kTensors; ++i) tensors.push_back(torch::full({20000}, static_cast<float>(i)));
  for (const at::Tensor& tensor : tensors) words.push_back(tensor.const_data_ptr<float>());
  budget.set_bytes(budget.use().live_bytes / 3);
  const auto whole = [&](std::size_t i) { return std::count(words[i], words[i] + 20000, i) == 20000; };
  std::atomic<bool> over = false;
  std::atomic<int> wrong = 0;
  std::vector<std::thread> threads;
  for (unsigned seed = 0; seed < 2; ++seed) {
    threads.emplace_back([&, seed] {
      for (std::mt19937 random(seed); !over;) wrong += whole(random() % kTensors) ? 0 : 1;
    });
  }
  for (int fork = 0; fork < kForks; ++fork) {
    const pid_t child = ::fork();
    if (child == 0) {
      ::alarm(300);
      bool right = true;
      for (std::size_t i = 0; i < kTensors; ++i) right = right && whole(i);
      ::_exit(right ? 0 : 1);
    }
    int status = -1;
    EXPECT_EQ(::waitpid(child, &status, 0), child);
    EXPECT_EQ(status, 0);
  }
  over = true;
  for (std::thread& thread : threads) thread.join();
  EXPECT_EQ(wrong, 0);
  budget.set_bytes(kMany);
}

TEST_P(BudgetAddresses, AWorkingSetBeyondTheBudgetIsSlowOrRefused) {
  std::vector<at::Tensor> tensors;
  for (int i = 0; i < 16; ++i) tensors.push_back(torch::full({50000}, static_cast<float>(i)));
  const std::uint64_t half = 16 * 50000 * 4 / 2;
  for (const bool strict : {false, true}) {
    Budget budget(half, at::TensorList(tensors), {.tiers = {}, .strict = strict});
    if (strict || !waits_in_system_calls()) {
      EXPECT_THROW(at::_foreach_mul(tensors, 2), c10::OutOfMemoryError);
    } else {
      at::_foreach_mul_(tensors, 2);
      const BudgetUse use = budget.use();
      EXPECT_GT(use.unannounced, 0);
      EXPECT_EQ(use.oversized, 1);
      EXPECT_GT(use.unannounced_seconds, 0);
      EXPECT_LE(use.peak_bytes, half);
      EXPECT_NE(budget.report().find("beyond the budget"), std::string::npos) << budget.report();
    }
    budget.set_bytes(kMany);
  }
  const int factor = waits_in_system_calls() ? 2 : 1;
  for (int i = 0; i < 16; ++i) EXPECT_EQ(tensors[i].mean().item<float>(), static_cast<float>(i * factor));
}

// One that is older; a new one is refused, since it would be of no use.
TEST_P(BudgetAddresses, AnOlderTensorMayBeLargerThanTheBudget) {
  if (!waits_in_system_calls())
    GTEST_SKIP() << "an operator must fit where faults of system calls are not served";
  const at::Tensor large = torch::arange(1 << 20, torch::kFloat);  // 4 MiB
  Budget budget(1 << 20, at::TensorList(large));
  large.mul_(2);
  const auto* const data = large.const_data_ptr<float>();
  for (int i = 0; i < 1 << 20; ++i) ASSERT_EQ(data[i], 2.0F * static_cast<float>(i));
  EXPECT_LE(budget.use().peak_bytes, budget.use().budget_bytes);
  EXPECT_GT(budget.use().oversized, 0);
  EXPECT_THROW(torch::empty({1 << 20}), c10::OutOfMemoryError);
  budget.set_bytes(kMany);
}

// An instruction needs two pages, and there is room for one.
TEST_P(BudgetAddresses, PagesThatAreNeededAtOnceDoNotPushOutEachOther) {
  Budget budget(200000);  // so that a page is of 4096 bytes
  const at::Tensor tensor = torch::arange(8192, torch::kByte);
  at::Tensor other = torch::ones({10000});
  budget.set_bytes(budget.use().live_bytes - 4 * 2048);
  pin(other);
  budget.set_bytes(budget.use().live_bytes + 4096 + 100);
  const auto* const data = tensor.const_data_ptr<std::uint8_t>();
  const auto boundary = (reinterpret_cast<std::uintptr_t>(data) + 4096) / 4096 * 4096;
  ::alarm(300);
  for (int round = 0; round < 100; ++round) {
    std::uint64_t word = 0;
    std::memcpy(&word, reinterpret_cast<const void*>(boundary - 4), sizeof word);
    EXPECT_EQ(static_cast<std::uint8_t>(word), data[boundary - 4 - reinterpret_cast<std::uintptr_t>(data)]);
  }
  ::alarm(0);
  unpin(other);
}

TEST_P(BudgetAddresses, ASystemCallWaitsOrFails) {
  Budget budget(900000);
  const at::Tensor tensor = torch::ones({100000});
  const at::Tensor other = torch::ones({100000});
  const auto* const data = tensor.const_data_ptr<float>();
  budget.set_bytes(budget.use().live_bytes - 400000);
  int ends[2];
  ASSERT_EQ(::pipe(ends), 0);
  const ssize_t written = ::write(ends[1], data, 4096);
  if (waits_in_system_calls()) {
    EXPECT_EQ(written, 4096);
  } else {
    EXPECT_TRUE(written == -1 && errno == EFAULT) << written;
  }
  EXPECT_EQ(data[1000], 1);
  ::close(ends[0]);
  ::close(ends[1]);
}

// Announced, it is an error as where addresses go; and the tensor is whole once the tier works again.
TEST_P(BudgetAddresses, AnOperatorWhosePageCannotComeThrows) {
  struct Failing final : test::ForwardingTier {
    void before() override {
      if (fails) throw FileError("the disk is gone", "nowhere");
    }
    std::atomic<bool> fails = false;
  };
  const auto tier = std::make_shared<Failing>();
  const at::Tensor tensor = torch::ones({100000});
  Budget budget(500000, at::TensorList(tensor), {.tiers = {tier}});
  budget.set_bytes(budget.use().live_bytes - 350000);
  ASSERT_GT(budget.use().evictions, 0);
  tier->fails = true;
  EXPECT_THROW(budget.set_bytes(kMany), c10::Error);  // which would bring it back
  try {
    tensor.sum();
    FAIL() << "no error";
  } catch (const c10::Error& error) {
    EXPECT_NE(message_of(error).find("the disk is gone"), std::string::npos) << message_of(error);
  }
  tier->fails = false;
  EXPECT_EQ(tensor.sum().item<float>(), 100000);
  EXPECT_EQ(tensor.const_data_ptr<float>()[5], 1);
}

TEST_P(BudgetAddresses, WhoeverTouchesWaitsWhileTheTierIsFullIfToldTo) {
  struct Full final : test::ForwardingTier {
    std::optional<Slot> take(std::uint64_t bytes) override {
      if (full) ++refused;
      return full ? std::nullopt : ForwardingTier::take(bytes);
    }
    void write(Slot slot, const void* data) override {
      if (full) throw FileError("no space left", "nowhere", ENOSPC);
      ForwardingTier::write(slot, data);
    }
    std::atomic<bool> full = false;
    std::atomic<int> refused = 0;
  };
  const auto tier = std::make_shared<Full>();
  Budget budget(kMany, at::TensorList(), {.tiers = {tier}, .wait_while_full = true});
  std::vector<at::Tensor> tensors;
  for (int i = 0; i < 4; ++i) tensors.push_back(torch::full({100000}, static_cast<float>(i)));
  budget.set_bytes(budget.use().live_bytes - 2 * 400000);
  // Even where the thread that serves faults is still at a page that came beside the last test's budget.
  EXPECT_LE(budget.use().live_bytes, budget.use().budget_bytes);
  tier->full = true;
  std::atomic<int> read = 0;
  std::atomic<int> right = 0;
  std::thread reader([&] {
    for (int i = 0; i < 4; ++i) {
      const auto* const words = tensors[static_cast<std::size_t>(i)].const_data_ptr<float>();
      right += std::count(words, words + 100000, static_cast<float>(i)) == 100000 ? 1 : 0;
      ++read;
    }
  });
  while (tier->refused < 5 && read < 4) std::this_thread::sleep_for(std::chrono::milliseconds(1));
  EXPECT_LT(read, 4);
  tier->full = false;
  reader.join();
  EXPECT_EQ(right, 4);
  EXPECT_LE(budget.use().peak_bytes, static_cast<std::uint64_t>(4 * 400000));
}

INSTANTIATE_TEST_SUITE_P(Way, BudgetAddresses, testing::Values("stay", "stay-user"),
                         [](const auto& row) { return std::string(row.param) == "stay" ? "Full" : "User"; });

}  // namespace
}  // namespace reef
