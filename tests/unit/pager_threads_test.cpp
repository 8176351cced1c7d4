// The pager under many threads, without an operator of LibTorch's: storages made, used, written, handed to
// other threads and dropped, while the budget changes, ends and begins. Whatever a thread finds in a storage
// is what was written there, or there is an error that says why. Compiled with the pager's sources, under
// ThreadSanitizer.
#include <ATen/record_function.h>
#include <c10/core/CPUAllocator.h>
#include <c10/core/StorageImpl.h>
#include <gtest/gtest.h>

#include <atomic>
#include <chrono>
#include <cstring>
#include <filesystem>
#include <mutex>
#include <random>
#include <shared_mutex>
#include <thread>
#include <vector>

#include "page/pager.h"
#include "reef/error.h"
#include "reef/ledger.h"
#include "reef/tier.h"
#include "support/without_ledger.h"

namespace reef {

void* OperatorCall::operator new(std::size_t bytes) { return ::operator new(bytes); }
void OperatorCall::operator delete(void* block) noexcept { ::operator delete(block); }

namespace {

constexpr int kRounds = 60000;  // of all threads
constexpr std::uint64_t kLeastEvictions = 100;
constexpr std::uint64_t kMany = std::uint64_t{1} << 40;
using StoragePtr = c10::intrusive_ptr<c10::StorageImpl>;

StoragePtr make_storage(std::size_t bytes) {
  return c10::make_intrusive<c10::StorageImpl>(c10::StorageImpl::use_byte_size_t(), bytes,
                                               c10::GetCPUAllocator(), /*resizable=*/true);
}

std::uint64_t* words(c10::StorageImpl& storage) {
  return static_cast<std::uint64_t*>(storage.mutable_data());
}

// What stands in every word of a storage.
void fill(c10::StorageImpl& storage, std::uint64_t value) {
  std::fill_n(words(storage), storage.nbytes() / 8, value);
}
bool holds(c10::StorageImpl& storage, std::uint64_t value) {
  const std::uint64_t* const all = words(storage);
  return std::all_of(all, all + storage.nbytes() / 8, [&](std::uint64_t word) { return word == value; });
}

const Operator& an_operator() {
  static const auto* const op = new Operator{.name = "test::op", .name_in_backward = "test::op (backward)"};
  return *op;
}

// As an operator of LibTorch's is heard: enter, work, leave.
template <class Work>
void run_operator(Pager& pager, std::initializer_list<Pager::Use> uses, const Work& work) {
  static const at::RecordFunction record(at::RecordScope::FUNCTION);
  OperatorCall call(an_operator(), record);
  call.records_gradient = true;
  pager.enter(call, Pager::Register::kAll, uses);
  std::vector<Pager::Use> results;
  std::exception_ptr error;
  try {
    if (StoragePtr made = work()) results.push_back({made.get(), false, false});
  } catch (...) {
    error = std::current_exception();
  }
  pager.leave(call, Pager::Register::kAll, results);
  if (error) std::rethrow_exception(error);
}

struct Tensor {
  StoragePtr storage;
  std::uint64_t value = 0;
};

// What all threads read, and one at a time writes.
struct Shared {
  std::shared_mutex mutex;
  Tensor tensor;
};

struct World {
  explicit World(Pager& of) : pager(of) {}
  Pager& pager;
  std::vector<Shared> shared = std::vector<Shared>(8);
  std::mutex mutex;
  std::vector<Tensor> handed_over;
  /// Shared by whoever runs an operator: a budget begins when none is running. It ends at any time.
  std::shared_mutex begins;
  std::atomic<std::uint64_t> next_value{1};
  std::atomic<std::uint64_t> wrong{0};
  std::atomic<std::uint64_t> refused{0};
  std::atomic<bool> over{false};
};

class Worker {
 public:
  Worker(World& world, unsigned seed) : world_(world), random_(seed) {}

  void rounds(int count) {
    for (int round = 0; round < count && !world_.over; ++round) {
      try {
        one();
      } catch (const c10::OutOfMemoryError&) {
        ++world_.refused;
      } catch (const c10::Error& error) {  // an operator that allocates nothing says the same
        EXPECT_NE(message_of(error).find("out of memory"), std::string::npos) << message_of(error);
        ++world_.refused;
      }
    }
  }

 private:
  unsigned below(unsigned n) { return static_cast<unsigned>(random_() % n); }

  void one() {
    const unsigned what = below(8);
    if (what == 0) return drop();
    if (what == 1) return hand_over();
    const std::shared_lock lock(world_.begins);
    switch (what) {
      case 2:
      case 3:
        return make();
      case 4:
        return write_own();
      case 5:
        return read_shared();
      case 6:
        return write_shared();
      default:
        return read_own();
    }
  }

  void make() {
    Tensor made;
    const std::size_t bytes = 1024u << below(5);
    Tensor* const from = own_.empty() ? nullptr : &own_[below(static_cast<unsigned>(own_.size()))];
    const auto work = [&] {
      made.storage = make_storage(bytes);
      made.value = world_.next_value++;
      fill(*made.storage, made.value);
      return made.storage;
    };
    if (from == nullptr) {
      run_operator(world_.pager, {}, work);
    } else {
      run_operator(world_.pager, {{from->storage.get(), false, false}}, [&] {
        check(*from);
        return work();
      });
    }
    own_.push_back(std::move(made));
    if (own_.size() > 24) own_.erase(own_.begin());
  }

  void check(const Tensor& tensor) {
    if (!holds(*tensor.storage, tensor.value)) ++world_.wrong;
  }

  void read_own() {
    if (own_.size() < 2) return;
    const Tensor& a = own_[below(static_cast<unsigned>(own_.size()))];
    const Tensor& b = own_[below(static_cast<unsigned>(own_.size()))];
    run_operator(world_.pager, {{a.storage.get(), false, false}, {b.storage.get(), false, false}}, [&] {
      check(a);
      check(b);
      return StoragePtr();
    });
  }

  void write_own() {
    if (own_.empty()) return;
    write(own_[below(static_cast<unsigned>(own_.size()))]);
  }

  void write(Tensor& tensor) {
    run_operator(world_.pager, {{tensor.storage.get(), true, false}}, [&] {
      check(tensor);
      const std::uint64_t value = world_.next_value++;
      fill(*tensor.storage, value);
      tensor.value = value;
      return StoragePtr();
    });
  }

  void read_shared() {
    Shared& shared = world_.shared[below(8)];
    const std::shared_lock lock(shared.mutex);
    run_operator(world_.pager, {{shared.tensor.storage.get(), false, false}}, [&] {
      check(shared.tensor);
      return StoragePtr();
    });
  }

  void write_shared() {
    Shared& shared = world_.shared[below(8)];
    const std::unique_lock lock(shared.mutex);
    write(shared.tensor);
  }

  void drop() {
    if (!own_.empty()) own_.erase(own_.begin() + below(static_cast<unsigned>(own_.size())));
    const std::lock_guard lock(world_.mutex);
    if (world_.handed_over.size() > 16) world_.handed_over.clear();
  }

  void hand_over() {
    const std::lock_guard lock(world_.mutex);
    if (!own_.empty() && below(2) == 0) {
      world_.handed_over.push_back(std::move(own_.back()));
      own_.pop_back();
    } else if (!world_.handed_over.empty()) {
      own_.push_back(std::move(world_.handed_over.back()));
      world_.handed_over.pop_back();
    }
  }

  World& world_;
  std::mt19937 random_;
  std::vector<Tensor> own_;
};

struct Row {
  const char* name;
  int threads;
  bool disk;
  bool prefetch;
  bool ends;  ///< budgets end and begin meanwhile
  Addresses addresses = Addresses::kGo;
};

struct PagerThreads : testing::TestWithParam<Row> {};

std::vector<std::shared_ptr<Tier>> tiers_of(const Row& row) {
  if (!row.disk) return {host_tier(kMany)};
  // The first is often full.
  return {host_tier(64 << 10),
          disk_tier({.directory = std::filesystem::temp_directory_path().string(), .capacity_bytes = kMany})};
}

TEST_P(PagerThreads, NothingIsLostAndNobodyHangs) {
  const Row& row = GetParam();
  Pager& pager = Pager::cpu();
  const std::uint64_t before = pager.memory().alive_bytes();
  World world(pager);
  const auto start = [&] {
    return pager.start({.budget_bytes = kMany,
                        .tiers = tiers_of(row),
                        .prefetch = row.prefetch,
                        .addresses = row.addresses});
  };
  std::uint64_t number = 0;
  try {
    number = start();
  } catch (const ConfigError& error) {
    GTEST_SKIP() << message_of(error);
  }
  for (Shared& shared : world.shared) {
    shared.tensor = {make_storage(4096), world.next_value++};
    fill(*shared.tensor.storage, shared.tensor.value);
  }
  std::vector<std::thread> threads;
  std::atomic<int> running{row.threads};
  std::atomic<bool> enough_left{false};  // on a busy machine the budget changes less often
  for (int i = 0; i < row.threads; ++i) {
    threads.emplace_back([&, i] {
      Worker worker(world, static_cast<unsigned>(i + 1));
      for (int again = 0; again == 0 || (again < 100 && !enough_left); ++again)
        worker.rounds(kRounds / row.threads);
      --running;
    });
  }
  std::mt19937 random(7);
  std::uint64_t evictions = 0;
  while (running > 0) {
    std::this_thread::sleep_for(std::chrono::microseconds(200));
    const std::uint64_t alive = pager.memory().alive_bytes() - before;
    try {
      pager.set_budget_bytes(random() % 4 == 0 ? kMany : before + alive / (1 + random() % 4) + (64 << 10));
    } catch (const BudgetError&) {
    }
    enough_left = evictions + pager.counts().evictions > kLeastEvictions;
    if (!row.ends || random() % 16 != 0) continue;
    const std::unique_lock lock(world.begins);
    evictions += pager.counts().evictions;
    random() % 2 == 0 ? pager.stop(number) : pager.abandon(number);
    number = start();
  }
  for (std::thread& thread : threads) thread.join();
  evictions += pager.counts().evictions;
  pager.set_budget_bytes(kMany);
  for (Shared& shared : world.shared) {
    run_operator(pager, {{shared.tensor.storage.get(), false, false}}, [&] {
      if (!holds(*shared.tensor.storage, shared.tensor.value)) ++world.wrong;
      return StoragePtr();
    });
  }
  pager.stop(number);
  EXPECT_EQ(world.wrong, 0);
  EXPECT_GT(evictions, kLeastEvictions);
  world.shared.clear();
  world.handed_over.clear();
  EXPECT_EQ(pager.memory().alive_bytes(), before) << "every block was given back";
  EXPECT_FALSE(pager.listens()) << "a page is left";
}

constexpr Row kRows[] = {
    {"host", 4, false, true, false},
    {"disk", 4, true, true, false},
    {"host_on_demand", 4, false, false, false},
    {"host_budgets_end", 4, false, true, true},
    {"disk_budgets_end", 4, true, true, true},
    {"host_64_threads", 64, false, true, false},
    {"disk_64_threads_budgets_end", 64, true, true, true},
    {"host_addresses_stay", 4, false, true, false, Addresses::kStay},
    {"disk_addresses_stay", 4, true, true, false, Addresses::kStay},
    {"host_addresses_stay_budgets_end", 4, false, true, true, Addresses::kStay},
    {"disk_64_threads_addresses_stay", 64, true, true, true, Addresses::kStay},
};
INSTANTIATE_TEST_SUITE_P(Rows, PagerThreads, testing::ValuesIn(kRows),
                         [](const auto& tested) { return std::string(tested.param.name); });

// Threads that are refused the same storage at once, each for a reason of its own, read the reason without a
// lock.
class PagerRefusals : public testing::TestWithParam<Addresses> {};

TEST_P(PagerRefusals, AreReadByAllWhoAreRefused) {
  constexpr std::size_t kBytes = 64 << 10;
  constexpr int kTimes = 4000;
  Pager& pager = Pager::cpu();
  const std::uint64_t before = pager.memory().alive_bytes();
  std::uint64_t number = 0;
  try {
    number = pager.start(
        {.budget_bytes = kMany, .tiers = {host_tier(kMany)}, .addresses = GetParam(), .strict = true});
  } catch (const ConfigError& error) {
    GTEST_SKIP() << message_of(error);
  }
  std::vector<StoragePtr> storages;
  for (int i = 0; i < 3; ++i) {
    run_operator(pager, {},
                 [&] { return storages.emplace_back(make_storage(i == 0 ? kBytes : 4 * kBytes)); });
    fill(*storages.back(), 7);
  }
  pager.set_budget_bytes(before + 4 * kBytes);  // the first fits, and another, but not both
  std::vector<std::thread> threads;
  std::atomic<int> refused{0};
  for (int i = 0; i < 3; ++i) {
    threads.emplace_back([&, i] {
      for (int time = 0; time < kTimes; ++time) {
        try {
          run_operator(pager, {{storages[i].get(), false, false}, {storages[0].get(), false, false}}, [&] {
            EXPECT_TRUE(holds(*storages[0], 7));
            EXPECT_TRUE(holds(*storages[i], 7));
            return StoragePtr();
          });
        } catch (const c10::Error& error) {
          EXPECT_NE(message_of(error).find("out of memory"), std::string::npos) << message_of(error);
          ++refused;
        }
      }
    });
  }
  for (std::thread& thread : threads) thread.join();
  EXPECT_GT(refused, 0);
  pager.set_budget_bytes(kMany);
  for (const StoragePtr& storage : storages)
    run_operator(pager, {{storage.get(), false, false}}, [&] {
      EXPECT_TRUE(holds(*storage, 7));
      return StoragePtr();
    });
  pager.stop(number);
}

INSTANTIATE_TEST_SUITE_P(Ways, PagerRefusals, testing::Values(Addresses::kGo, Addresses::kStay),
                         [](const auto& tested) { return tested.param == Addresses::kGo ? "go" : "stay"; });

// A step over many pages again and again: each page is away most of the time.
TEST(PagerStress, AHundredThousandPages) {
  Pager& pager = Pager::cpu();
  const std::uint64_t before = pager.memory().alive_bytes();
  const std::uint64_t number =
      pager.start({.budget_bytes = kMany, .tiers = {host_tier(kMany)}, .addresses = Addresses::kGo});
  std::vector<Tensor> tensors(100'000);
  for (Tensor& tensor : tensors) {
    tensor.storage = make_storage(1024);
    tensor.value = reinterpret_cast<std::uintptr_t>(&tensor);
    run_operator(pager, {{tensor.storage.get(), true, false}}, [&] {
      fill(*tensor.storage, tensor.value);
      return StoragePtr();
    });
  }
  pager.set_budget_bytes(before + tensors.size() * 1024 / 2);
  std::uint64_t wrong = 0;
  for (int step = 0; step < 3; ++step) {
    for (Tensor& tensor : tensors) {
      run_operator(pager, {{tensor.storage.get(), step == 1, false}}, [&] {
        if (!holds(*tensor.storage, tensor.value)) ++wrong;
        if (step == 1) fill(*tensor.storage, ++tensor.value);
        return StoragePtr();
      });
    }
  }
  EXPECT_EQ(wrong, 0);
  EXPECT_GT(pager.counts().evictions, 200'000);
  EXPECT_LE(pager.peak_bytes(), before + tensors.size() * 1024 * 2);
  pager.stop(number);
  tensors.clear();
  EXPECT_EQ(pager.memory().alive_bytes(), before);
}

// Blocks that are older than the budget go back to another allocator, at any moment of the budget's end.
class PagerEnd : public testing::TestWithParam<Addresses> {};

TEST_P(PagerEnd, OlderMemoryIsFreedWhileABudgetEnds) {
  constexpr std::size_t kBytes = 200'000;
  Pager& pager = Pager::cpu();
  const std::uint64_t before = pager.memory().alive_bytes();
  for (int round = 0; round < 150; ++round) {
    std::vector<std::vector<Tensor>> of_threads(4);
    for (int i = 0; i < 40; ++i) {
      of_threads[i % 4].push_back({make_storage(kBytes), static_cast<std::uint64_t>(i)});
      fill(*of_threads[i % 4].back().storage, static_cast<std::uint64_t>(i));
    }
    std::uint64_t number = 0;
    try {
      number = pager.start({.budget_bytes = kMany, .tiers = {host_tier(kMany)}, .addresses = GetParam()});
    } catch (const ConfigError& error) {
      GTEST_SKIP() << message_of(error);
    }
    for (const auto& tensors : of_threads) {
      for (const Tensor& tensor : tensors)
        run_operator(pager, {{tensor.storage.get(), false, false}}, [] { return StoragePtr(); });
    }
    pager.set_budget_bytes(before + 5 * kBytes);
    std::vector<std::thread> threads;
    for (auto& tensors : of_threads)
      threads.emplace_back([&tensors] { tensors.erase(tensors.begin() + 1, tensors.end()); });
    pager.stop(number);
    for (std::thread& thread : threads) thread.join();
    for (const auto& tensors : of_threads) EXPECT_TRUE(holds(*tensors[0].storage, tensors[0].value));
  }
  EXPECT_EQ(pager.memory().alive_bytes(), before);
}

INSTANTIATE_TEST_SUITE_P(Ways, PagerEnd, testing::Values(Addresses::kGo, Addresses::kStay),
                         [](const auto& tested) { return tested.param == Addresses::kGo ? "go" : "stay"; });

}  // namespace
}  // namespace reef
