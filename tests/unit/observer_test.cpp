// An observer of operators that fails: LibTorch swallows what it throws, so nothing may be left behind.
#include <ATen/record_function.h>
#include <gtest/gtest.h>
#include <torch/torch.h>

#include <cstdlib>
#include <new>

#include "reef/budget.h"

namespace {

// The number of the allocation on this thread that fails, counted from now on. 0: none fails.
thread_local int failing = 0;
thread_local bool has_failed = false;

void* allocate(std::size_t bytes) {
  if (failing > 0 && --failing == 0) {
    has_failed = true;
    throw std::bad_alloc();
  }
  if (void* const block = std::malloc(bytes)) return block;
  throw std::bad_alloc();
}

}  // namespace

void* operator new(std::size_t bytes) { return allocate(bytes); }
void* operator new[](std::size_t bytes) { return allocate(bytes); }
void operator delete(void* block) noexcept { std::free(block); }
void operator delete[](void* block) noexcept { std::free(block); }
void operator delete(void* block, std::size_t) noexcept { std::free(block); }
void operator delete[](void* block, std::size_t) noexcept { std::free(block); }

namespace reef {
namespace {

using at::Tensor;

constexpr std::int64_t kElements = 1 << 16;
constexpr std::uint64_t kBytes = kElements * sizeof(float);
thread_local int next_failure = 0;  // of the allocations between the two callbacks, of one operator

std::unique_ptr<at::ObserverContext> arm(const at::RecordFunction&) {
  failing = std::exchange(next_failure, 0);
  return nullptr;
}
std::unique_ptr<at::ObserverContext> disarm(const at::RecordFunction&) {
  failing = 0;
  return nullptr;
}

// Lets an allocation fail in those callbacks of LibTorch's that are added between construction and last():
// they are called in the order in which they were added.
class FailingObservation {
 public:
  FailingObservation()
      : first_(at::addGlobalCallback(at::RecordFunctionCallback(arm).scopes({at::RecordScope::FUNCTION}))) {}
  ~FailingObservation() {
    at::removeCallback(first_);
    if (last_ != 0) at::removeCallback(last_);
  }
  void last() {
    last_ = at::addGlobalCallback(at::RecordFunctionCallback(disarm).scopes({at::RecordScope::FUNCTION}));
  }

 private:
  at::CallbackHandle first_, last_ = 0;
};

// Lets each allocation of the observers fail in turn, in an operator whose tensors are pages, have been away,
// or are new. The operator gives the right result or an error, and afterwards all pages can leave, so none is
// pinned.
TEST(ObserverThatFails, LeavesNothingBehind) {
  int failures = 0;
  for (int round = 0; round < 3; ++round) {
    for (int nth = 1; nth < 80; ++nth) {
      std::vector<Tensor> kept;
      for (int i = 0; i < 12; ++i) kept.push_back(torch::full({kElements}, i + 1.0));
      FailingObservation failing_observation;
      BudgetOptions options;
      options.addresses = Addresses::kGo;
      Budget budget(std::uint64_t{1} << 40, kept, options);
      failing_observation.last();
      const std::uint64_t beside = budget.use().live_bytes - kept.size() * kBytes;
      const auto leave = [&](std::uint64_t bytes) { budget.set_bytes(beside + bytes); };
      if (round == 0) {
        for (Tensor& tensor : kept) tensor = tensor.clone();
      } else {
        for (Tensor& tensor : kept) tensor.add_(0);
      }
      if (round == 2) {
        leave(kBytes / 2);
        leave(40 * kBytes);
      }
      has_failed = false;
      next_failure = nth;
      try {
        const Tensor all = torch::cat(kept);
        next_failure = failing = 0;
        for (std::int64_t i = 0; i < 12; ++i)
          EXPECT_EQ(all[i * kElements + 7].item<float>(), static_cast<float>(i + 1))
              << "allocation " << nth << ", round " << round;
      } catch (const std::exception&) {
      }
      next_failure = failing = 0;
      failures += has_failed ? 1 : 0;
      for (int times = 0; times < 3; ++times) {
        try {
          kept[1].mul(2);
          break;
        } catch (const std::exception&) {  // the next allocation tells
        }
      }
      leave(kBytes / 2);
      leave(40 * kBytes);
      for (std::size_t i = 0; i < kept.size(); ++i)
        EXPECT_EQ(kept[i][3].item<float>(), static_cast<float>(i + 1));
      budget.end();
    }
  }
  EXPECT_GT(failures, 5);
}

}  // namespace
}  // namespace reef
