// What counting costs: nanoseconds per allocation, per operator, and of a whole training step.
//
// The counting allocator stays once it is in place, so the plain variant takes its blocks from the allocator
// that is underneath, saved before the first Ledger.
#include <ATen/EmptyTensor.h>
#include <c10/core/CPUAllocator.h>
#include <torch/torch.h>

#include <optional>
#include <thread>

#include "harness.h"
#include "reef/ledger.h"

namespace {

using reef::bench::in_turn;
using reef::bench::print;

constexpr int kRounds = 21;

void allocate_and_free(c10::Allocator* allocator, int count) {
  for (int i = 0; i < count; ++i) allocator->allocate(256);
}

void allocations(c10::Allocator* plain) {
  constexpr int kCount = 100'000;
  std::optional<reef::Ledger> ledger(std::in_place);
  c10::Allocator* counting = c10::GetCPUAllocator();
  const auto start = [&] { ledger->start_timeline(std::size_t{2} * kCount); };
  const auto stop = [&] { ledger->stop_timeline(); };
  print("ledger/allocate and free 256 B",
        in_turn({{"plain", {}, [&] { allocate_and_free(plain, kCount); }, {}},
                 {"counted", {}, [&] { allocate_and_free(counting, kCount); }, {}},
                 {"counted with timeline", start, [&] { allocate_and_free(counting, kCount); }, stop}},
                kRounds, kCount),
        "ns");
  const auto two_threads = [](c10::Allocator* allocator) {
    std::thread other([=] { allocate_and_free(allocator, kCount); });
    allocate_and_free(allocator, kCount);
    other.join();
  };
  print("ledger/allocate and free 256 B, 2 threads at once",
        in_turn({{"plain", {}, [&] { two_threads(plain); }, {}},
                 {"counted", {}, [&] { two_threads(counting); }, {}}},
                kRounds, kCount),
        "ns");
}

// In-place addition on one element: one operator a call and no allocation.
void operators() {
  constexpr int kCount = 50'000;
  at::Tensor t = at::zeros({1});
  const torch::NoGradGuard no_grad;
  std::optional<reef::Ledger> ledger;
  const auto run = [&] {
    for (int i = 0; i < kCount; ++i) t.add_(1);
  };
  print(
      "ledger/operator (aten::add_, one element)",
      in_turn({{"plain", {}, run, {}}, {"observed", [&] { ledger.emplace(); }, run, [&] { ledger.reset(); }}},
              kRounds, kCount),
      "ns");
}

void training_step() {
  torch::manual_seed(0);
  torch::nn::Sequential net;
  for (int i = 0; i < 10; ++i) {
    net->push_back(torch::nn::Linear(256, 256));
    net->push_back(torch::nn::GELU());
  }
  torch::optim::AdamW optimizer(net->parameters(), torch::optim::AdamWOptions(1e-3));
  const at::Tensor x = torch::randn({64, 256});
  std::optional<reef::Ledger> ledger;
  const auto watch = [&] {
    ledger.emplace();
    ledger->watch(*net);
    ledger->watch(optimizer);
  };
  const auto run = [&] {
    for (int i = 0; i < 10; ++i) {
      optimizer.zero_grad();
      net->forward(x).pow(2).mean().backward();
      optimizer.step();
    }
  };
  print("ledger/training step (MLP of 10 x 256, batch 64, AdamW)",
        in_turn({{"plain", {}, run, {}},
                 {"watched", watch, run, [&] { ledger.reset(); }},
                 {"watched with timeline",
                  [&] {
                    watch();
                    ledger->start_timeline();
                  },
                  run, [&] { ledger.reset(); }}},
                kRounds, 10 * 1000.0),
        "us");
}

}  // namespace

int main() {
  torch::set_num_threads(1);
  c10::Allocator* plain = c10::GetCPUAllocator();
  allocations(plain);
  operators();
  training_step();
}
