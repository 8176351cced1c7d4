// What a budget costs: nanoseconds per operator with nothing to move, the time of a training step against the
// budget on two models and two tiers, and the disk tier's bandwidth against plain O_DIRECT copies of the same
// file system.
#include <fcntl.h>
#include <sys/mman.h>
#include <torch/torch.h>
#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <cstdio>
#include <cstdlib>
#include <filesystem>
#include <functional>
#include <optional>
#include <string>
#include <string_view>
#include <thread>
#include <vector>

#include "bytelm/model.h"
#include "harness.h"
#include "reef/budget.h"
#include "reef/bytes.h"
#include "reef/error.h"

namespace {

using reef::bench::in_turn;
using reef::bench::print;
using reef::bench::Variant;

constexpr std::uint64_t kUnlimited = std::uint64_t{1} << 50;

// In place on one element: one operator a call and no allocation.
void operators() {
  constexpr int kCount = 50'000;
  at::Tensor t = at::zeros({1});
  const torch::NoGradGuard no_grad;
  std::optional<reef::Ledger> ledger;
  std::optional<reef::Budget> budget;
  const auto run = [&] {
    for (int i = 0; i < kCount; ++i) t.neg_();
  };
  print("budget/operator (aten::neg_, one element)",
        in_turn({{"plain", {}, run, {}},
                 {"ledger alone", [&] { ledger.emplace(); }, run, [&] { ledger.reset(); }},
                 {"budget without limit", [&] { budget.emplace(kUnlimited); }, run, [&] { budget.reset(); }}},
                21, kCount),
        "ns");
}

struct Training {
  std::string name;
  std::shared_ptr<torch::nn::Module> module;
  std::function<at::Tensor()> loss;
};

Training byte_gpt() {
  const bytelm::Options options;
  bytelm::ByteGPT model(options);
  const at::Tensor windows = torch::randint(256, {options.batch, options.context + 1}, torch::kLong);
  return {"byte GPT", model.ptr(), [=]() mutable { return bytelm::next_byte_loss(model, windows); }};
}

struct ResidualImpl : torch::nn::Module {
  explicit ResidualImpl(std::int64_t width)
      : conv(
            register_module("conv", torch::nn::Conv2d(torch::nn::Conv2dOptions(width, width, 3).padding(1)))),
        norm(register_module("norm", torch::nn::BatchNorm2d(width))) {}
  at::Tensor forward(const at::Tensor& x) { return x + torch::relu(norm->forward(conv->forward(x))); }
  torch::nn::Conv2d conv;
  torch::nn::BatchNorm2d norm;
};
TORCH_MODULE(Residual);

Training residual_net() {
  torch::nn::Sequential net(torch::nn::Conv2d(torch::nn::Conv2dOptions(3, 32, 3).padding(1)));
  for (int i = 0; i < 12; ++i) net->push_back(Residual(32));
  net->push_back(torch::nn::AdaptiveAvgPool2d(torch::nn::AdaptiveAvgPool2dOptions(1)));
  net->push_back(torch::nn::Flatten());
  net->push_back(torch::nn::Linear(32, 10));
  const at::Tensor images = torch::randn({16, 3, 32, 32});
  const at::Tensor labels = torch::randint(10, {16}, torch::kLong);
  return {"residual net", net.ptr(),
          [=]() mutable { return torch::nn::functional::cross_entropy(net->forward(images), labels); }};
}

std::shared_ptr<reef::Tier> host() { return reef::host_tier(kUnlimited); }
std::shared_ptr<reef::Tier> disk_by(reef::DiskIo io) {
  return reef::disk_tier({.directory = std::filesystem::current_path().string(),
                          .capacity_bytes = std::uint64_t{1} << 34,
                          .io = io});
}
std::shared_ptr<reef::Tier> disk() { return disk_by(reef::DiskIo::kAutomatic); }

// A step under ever smaller budgets, in turn with the plain one.
void training(const Training& job) {
  torch::optim::AdamW optimizer(job.module->parameters(), torch::optim::AdamWOptions(1e-3));
  const auto steps = [&](int count) {
    for (int i = 0; i < count; ++i) {
      optimizer.zero_grad();
      job.loss().backward();
      optimizer.step();
    }
  };
  std::uint64_t peak_bytes = 0;
  {
    reef::Ledger ledger;
    ledger.watch(*job.module);
    steps(1);
    ledger.reset_peak();
    steps(1);
    peak_bytes = static_cast<std::uint64_t>(ledger.peak().bytes.total());
  }
  std::optional<reef::Budget> budget;
  const auto begin = [&](std::uint64_t bytes, std::shared_ptr<reef::Tier> tier, bool prefetch = true) {
    budget.emplace(
        bytes, std::vector<const torch::nn::Module*>{job.module.get()},
        reef::BudgetOptions{.device = c10::kCPU, .tiers = {std::move(tier)}, .prefetch = prefetch});
  };
  // What is timed is a step that is known: the first is recorded, the second is the first to be planned.
  const auto begin_and_learn = [&](std::uint64_t bytes, const std::shared_ptr<reef::Tier>& tier,
                                   bool prefetch) {
    begin(bytes, tier, prefetch);
    steps(3);
  };
  // The least that runs, found by running.
  const auto feasible = [&](std::uint64_t bytes) {
    for (;;) {
      try {
        begin(bytes, host());
        steps(2);
        budget.reset();
        return bytes;
      } catch (const c10::Error&) {
        bytes = std::max(bytes + bytes / 64, budget ? budget->use().minimum_bytes : 0);
        budget.reset();
      }
    }
  };
  constexpr int kSteps = 3;
  std::vector<Variant> variants{{"plain", {}, [&] { steps(kSteps); }, {}}};
  for (const int percent : {100, 75, 50, 33, 25}) {
    const std::uint64_t bytes = feasible(peak_bytes * static_cast<std::uint64_t>(percent) / 100);
    const std::string part = std::to_string((100 * bytes + peak_bytes / 2) / peak_bytes) + " percent";
    const auto add = [&](const std::string& name, const auto& tier, bool prefetch) {
      variants.push_back({name + ", " + part, [=] { begin_and_learn(bytes, tier(), prefetch); },
                          [=] { steps(kSteps); }, [&] { budget.reset(); }});
    };
    add("host tier", host, true);
    if (percent != 50) continue;
    add("host tier without prefetch", host, false);
    add("disk tier", disk, true);
    add("disk tier without prefetch", disk, false);
  }
  print("budget/step of " + job.name + " (natural peak " + std::to_string(peak_bytes >> 20) + " MiB)",
        in_turn(variants, 7, kSteps * 1e6), "ms");
}

// Calls it for 0 to count - 1 on two threads, as a budget's lane moves pages.
void two_at_once(std::size_t count, const std::function<void(std::size_t)>& call) {
  std::atomic<std::size_t> next = 0;
  const auto serve = [&] {
    for (std::size_t i = next++; i < count; i = next++) call(i);
  };
  std::thread other(serve);
  serve();
  other.join();
}

// Pages through the tier, by threads and by io_uring, and as plain aligned transfers of 4 MiB or of a page if
// that is less, from memory on small pages and on huge ones as the tier's blocks are; one after the other,
// and two at once.
void disk_bandwidth(std::uint64_t page_bytes, int pages) {
  const std::uint64_t block_bytes = std::min(page_bytes, std::uint64_t{4} << 20);
  const std::uint64_t total_bytes = page_bytes * static_cast<std::uint64_t>(pages);
  using Memory = std::unique_ptr<char, decltype(&std::free)>;
  const auto memory_on = [&](int advice) {
    constexpr std::size_t kHugePageBytes = std::size_t{2} << 20;
    const std::size_t bytes = std::max<std::size_t>(page_bytes, kHugePageBytes);
    Memory memory(static_cast<char*>(std::aligned_alloc(kHugePageBytes, bytes)), &std::free);
    ::madvise(memory.get(), bytes, advice);
    std::fill(memory.get(), memory.get() + bytes, 'x');
    return memory;
  };
  const Memory small = memory_on(MADV_NOHUGEPAGE);
  const Memory huge = memory_on(MADV_HUGEPAGE);
  const int file = ::open(".", O_TMPFILE | O_RDWR | O_DIRECT, 0600);
  if (file < 0) return;
  struct Way {
    std::string name;
    std::shared_ptr<reef::Tier> tier;
    std::vector<reef::Tier::Slot> slots;
  };
  std::vector<Way> ways{{"disk tier, threads", disk_by(reef::DiskIo::kThreads), {}}};
  try {
    ways.push_back({"disk tier, io_uring", disk_by(reef::DiskIo::kUring), {}});
  } catch (const reef::ConfigError& error) {
    std::fprintf(stderr, "%s\n", reef::message_of(error).c_str());
  }
  for (Way& way : ways) {
    for (int i = 0; i < pages; ++i) way.slots.push_back(*way.tier->take(page_bytes));
  }
  const auto in_every_way = [&](const char* name, const auto& plain_call, const auto& tier_call) {
    const auto plain_block = [&](const Memory& memory) {
      return [&, data = memory.get()](std::size_t i) {
        if (plain_call(file, data, block_bytes, static_cast<off_t>(i * block_bytes)) !=
            static_cast<ssize_t>(block_bytes))
          std::abort();
      };
    };
    std::vector<Variant> variants;
    const auto add = [&](const std::string& way, std::size_t count,
                         const std::function<void(std::size_t)>& call) {
      variants.push_back({way,
                          {},
                          [=] {
                            for (std::size_t i = 0; i < count; ++i) call(i);
                          },
                          {}});
      variants.push_back({way + ", two at once", {}, [=] { two_at_once(count, call); }, {}});
    };
    add("plain O_DIRECT", total_bytes / block_bytes, plain_block(small));
    add("plain O_DIRECT from huge pages", total_bytes / block_bytes, plain_block(huge));
    for (const Way& way : ways) {
      add(way.name, way.slots.size(), [&](std::size_t i) { tier_call(*way.tier, way.slots[i]); });
    }
    print(std::string("budget/disk ") + name + ", " +
              reef::format_bytes(static_cast<std::int64_t>(total_bytes)) + " in pages of " +
              reef::format_bytes(static_cast<std::int64_t>(page_bytes)),
          in_turn(variants, 9, 1e6), "ms");
  };
  in_every_way("write", ::pwrite, [&](reef::Tier& tier, auto slot) { tier.write(slot, small.get()); });
  in_every_way("read", ::pread, [&](reef::Tier& tier, auto slot) { tier.read(slot, small.get()); });
  ::close(file);
}

}  // namespace

int main(int count, char** arguments) {
  torch::manual_seed(0);
  torch::set_num_threads(1);
  // Some of: operators disk gpt net. None: all.
  const auto wanted = [&](const char* part) {
    return count < 2 || std::any_of(arguments + 1, arguments + count,
                                    [&](const char* given) { return std::string_view(given) == part; });
  };
  if (wanted("operators")) operators();
  if (wanted("disk")) {
    disk_bandwidth(std::uint64_t{256} << 10, 256);
    disk_bandwidth(std::uint64_t{32} << 20, 8);
  }
  if (wanted("gpt")) training(byte_gpt());
  if (wanted("net")) training(residual_net());
}
