// What a budget costs: nanoseconds per operator with nothing to move, the time of a training step against the
// budget on two models and two tiers, and the disk tier's bandwidth against plain O_DIRECT copies of the same
// file system.
#include <fcntl.h>
#include <sys/mman.h>
#include <torch/torch.h>
#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <chrono>
#include <cstdio>
#include <cstdlib>
#include <filesystem>
#include <functional>
#include <map>
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
#include "reef/swap.h"
#include "reef/trace.h"

namespace {

using reef::bench::in_turn;
using reef::bench::print;
using reef::bench::print_ratios;
using reef::bench::print_with_ratios;
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

// Where users have it: on tensors that are pages, few and many, and in a step of many small operators.
// Nothing is evicted.
void operators_on_pages() {
  constexpr int kCount = 20'000;
  std::optional<reef::Ledger> ledger;
  std::optional<reef::Budget> budget;
  const at::Tensor weight = torch::randn({512});
  const at::Tensor other = torch::randn({512});
  at::Tensor result = torch::empty({512});
  const auto add = [&] {
    const torch::NoGradGuard no_grad;
    for (int i = 0; i < kCount; ++i) at::add_out(result, weight, other);
  };
  const auto among = [&](std::int64_t count) {
    return [&, count] {
      std::vector<at::Tensor> pages{weight, other, result};
      for (std::int64_t i = 3; i < count; ++i) pages.push_back(torch::empty({256}));
      budget.emplace(kUnlimited, at::TensorList(pages));
    };
  };
  const auto over = [&] { budget.reset(); };
  auto results = in_turn({{"plain", {}, add, {}},
                          {"ledger alone", [&] { ledger.emplace(); }, add, [&] { ledger.reset(); }},
                          {"budget, 1000 pages", among(1000), add, over},
                          {"budget, 64000 pages", among(64'000), add, over}},
                         11, kCount);
  print_with_ratios("budget/operator (aten::add.out, 512 elements)", results, "ns");

  constexpr int kSteps = 20;
  torch::nn::Sequential net;
  for (int i = 0; i < 10; ++i) net->push_back(torch::nn::Linear(256, 256));
  torch::optim::SGD optimizer(net->parameters(), 1e-3);
  const at::Tensor x = torch::randn({64, 256});
  const auto steps = [&] {
    for (int i = 0; i < kSteps; ++i) {
      optimizer.zero_grad();
      net->forward(x).sum().backward();
      optimizer.step();
    }
  };
  results = in_turn(
      {{"plain", {}, steps, {}},
       {"ledger alone", [&] { ledger.emplace(); }, steps, [&] { ledger.reset(); }},
       {"budget", [&] { budget.emplace(kUnlimited, std::vector<const torch::nn::Module*>{net.get()}); },
        steps, over}},
      21, kSteps * 1e3);
  print_with_ratios("budget/step of an MLP, 10 x 256, batch 64", results, "us");
}

// What a step of many operators costs to look ahead on, and how long another thread waits for the lock while
// pages of 8 MiB leave and come.
void outlook_and_lock() {
  constexpr int kOperators = 14'400;
  const torch::NoGradGuard no_grad;
  reef::Trace trace;
  for (std::uint32_t page = 0; page < 200; ++page) trace.pages.push_back({1 << 20, true});
  for (std::uint32_t i = 0; i < kOperators; ++i) {
    const auto made = static_cast<std::uint32_t>(trace.pages.size());
    trace.pages.push_back({1 << 14, false});
    trace.operators.push_back({"op", 1e-5, 0, {{i % 200, i % 7 == 0}, {made, true}}, {}});
    if (i >= 300) trace.operators.back().frees.push_back(made - 300);
  }
  for (std::uint32_t left = 0; left < 300; ++left)
    trace.operators.back().frees.push_back(static_cast<std::uint32_t>(trace.pages.size()) - 300 + left);
  const reef::SwapSpeeds speeds{4e9, 4e9};
  const std::uint64_t bytes = reef::natural_peak_bytes(trace) / 2;
  const auto plan = [&] {
    const reef::SwapPlan made = reef::plan_swaps(trace, bytes, reef::SwapPolicy::kFarthest, speeds);
    reef::simulate(trace, made, bytes, speeds);
  };
  print("budget/outlook", in_turn({{"one budget, 14400 operators", {}, plan, {}}}, 5, 1e9), "s");

  std::vector<at::Tensor> pages;
  for (int i = 0; i < 16; ++i) pages.push_back(torch::ones({2 << 20}));
  reef::Budget budget(kUnlimited, at::TensorList(pages));
  budget.set_bytes(budget.use().live_bytes - (std::uint64_t{64} << 20));
  std::atomic<bool> over = false;
  std::vector<double> waits;
  std::thread other([&] {
    while (!over) {
      const auto begin = std::chrono::steady_clock::now();
      budget.use();
      waits.push_back(
          std::chrono::duration<double, std::micro>(std::chrono::steady_clock::now() - begin).count());
      std::this_thread::sleep_for(std::chrono::microseconds(20));
    }
  });
  for (int round = 0; round < 10; ++round) {
    for (at::Tensor& page : pages) page.neg_();
  }
  over = true;
  other.join();
  for (const double part : {0.5, 0.99, 0.999}) {
    char name[96];
    std::snprintf(name, sizeof name,
                  "budget/another thread asks for use() while 8 MiB pages move/quantile %g", part);
    print(name, reef::bench::quantile(waits, part), "us",
          std::to_string(waits.size()) + " questions, " + std::to_string(budget.use().evictions) +
              " evictions");
  }
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

// A kind of budget that is measured: its tier, and how its pages leave and come.
struct BudgetWay {
  std::string name;
  std::function<std::shared_ptr<reef::Tier>()> tier;
  bool prefetch = true;
  reef::Addresses addresses = reef::Addresses::kAutomatic;
};

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
    reef::Ledger natural;
    natural.watch(*job.module);
    steps(1);
    natural.reset_peak();
    steps(1);
    peak_bytes = static_cast<std::uint64_t>(natural.peak().bytes.total());
  }
  std::optional<reef::Budget> budget;
  const auto begin = [&](std::uint64_t bytes, const BudgetWay& way) {
    std::vector<at::Tensor> pages = job.module->parameters();
    for (const auto& [parameter, state] : optimizer.state()) {
      const auto& moments = static_cast<const torch::optim::AdamWParamState&>(*state);
      pages.insert(pages.end(), {moments.exp_avg(), moments.exp_avg_sq()});
    }
    budget.emplace(bytes, at::TensorList(pages),
                   reef::BudgetOptions{.device = c10::kCPU,
                                       .tiers = {way.tier()},
                                       .prefetch = way.prefetch,
                                       .addresses = way.addresses});
  };
  const BudgetWay to_host{"host tier", host};
  const BudgetWay addresses_go{"host tier where addresses go", host, true, reef::Addresses::kGo};
  // Finds the smallest budget, from so many bytes on, in which two steps run, by trying larger and larger
  // ones.
  const auto feasible = [&](std::uint64_t bytes, const BudgetWay& way) {
    for (;;) {
      try {
        begin(bytes, way);
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
  std::map<std::string, double> waited;  // seconds, in all timed steps of a variant
  std::optional<reef::Ledger> ledger;
  std::vector<Variant> variants{{"plain", {}, [&] { steps(kSteps); }, {}}};
  variants.push_back(
      {"ledger alone", [&] { ledger.emplace(); }, [&] { steps(kSteps); }, [&] { ledger.reset(); }});
  const auto add = [&](const BudgetWay& way, std::uint64_t bytes) {
    const std::string name =
        way.name + ", " + std::to_string((100 * bytes + peak_bytes / 2) / peak_bytes) + " percent";
    // Only planned steps are timed. The budget records the first step, and follows a plan from the second on.
    const auto begin_and_learn = [=, &budget] {
      begin(bytes, way);
      steps(3);
      budget->reset_use();
    };
    const auto end = [=, &waited, &budget] {
      waited[name] += budget->use().waited_seconds;
      budget.reset();
    };
    variants.push_back({name, begin_and_learn, [=] { steps(kSteps); }, end});
    return variants.size() - 1;
  };
  const bool can_stay = reef::addresses_here().starts_with("stay");
  std::vector<std::pair<std::size_t, std::size_t>>
      hidden;  // places of a variant with prefetch, and of the same without
  std::vector<std::pair<std::size_t, std::size_t>> both;  // places where addresses go, and where they stay
  for (const int percent : {100, 75, 50, 33, 25, 12}) {
    const std::uint64_t asked_bytes = peak_bytes * static_cast<std::uint64_t>(percent) / 100;
    const std::uint64_t bytes = feasible(asked_bytes, addresses_go);
    const std::size_t host_place = add(to_host, bytes);
    if (can_stay) {
      both.emplace_back(add(addresses_go, bytes), host_place);
      const std::uint64_t less = feasible(asked_bytes, to_host);
      if (less < bytes) add(to_host, less);
    }
    if (percent != 50) continue;
    hidden.emplace_back(host_place, add({"host tier without prefetch", host, false}, bytes));
    const std::size_t disk_place = add({"disk tier", disk}, bytes);
    hidden.emplace_back(disk_place, add({"disk tier without prefetch", disk, false}, bytes));
  }
  const std::string name =
      "budget/step of " + job.name + " (natural peak " + std::to_string(peak_bytes >> 20) + " MiB)";
  const auto results = in_turn(variants, 7, kSteps * 1e6);
  print_with_ratios(name, results, "ms");
  for (const auto& [go, stay] : both) print_ratios(name, {results[go], results[stay]});
  for (const auto& [with, without] : hidden) {
    print(name + "/" + variants[with].name + ", hidden by prefetch",
          100 * (1 - waited[variants[with].name] / waited[variants[without].name]), "%",
          "of the seconds that operators wait without it");
  }
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
  reef::bench::keep_pages();
  torch::manual_seed(0);
  torch::set_num_threads(1);
  // Some of: operators pages lock disk gpt net. None: all.
  const auto wanted = [&](const char* part) {
    return count < 2 || std::any_of(arguments + 1, arguments + count,
                                    [&](const char* given) { return std::string_view(given) == part; });
  };
  if (wanted("operators")) operators();
  if (wanted("pages")) operators_on_pages();
  if (wanted("lock")) outlook_and_lock();
  if (wanted("disk")) {
    disk_bandwidth(std::uint64_t{256} << 10, 256);
    disk_bandwidth(std::uint64_t{32} << 20, 8);
  }
  if (wanted("gpt")) training(byte_gpt());
  if (wanted("net")) training(residual_net());
}
