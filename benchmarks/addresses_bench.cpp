// Measures what it costs to evict a page whose address stays and to bring it back, announced by an operator
// and by a mere touch, beside a copy of the same bytes, and how many mappings the process has then.
#include <torch/torch.h>

#include <chrono>
#include <cstdint>
#include <cstring>
#include <fstream>
#include <functional>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "harness.h"
#include "reef/budget.h"
#include "reef/tier.h"

namespace {

using reef::bench::print;
using reef::bench::print_ratios;
using reef::bench::Result;

constexpr std::int64_t kMiB = 1 << 20;
constexpr int kPages = 64;
constexpr int kRounds = 640;

double microseconds(const std::function<void()>& run) {
  const auto begin = std::chrono::steady_clock::now();
  run();
  return std::chrono::duration<double, std::micro>(std::chrono::steady_clock::now() - begin).count();
}

// Host memory to which pages are copied, as to any tier that cannot keep their frames.
struct CopyingTier final : reef::Tier {
  std::string name() const override { return "copying"; }
  std::optional<Slot> take(std::uint64_t bytes) override { return host->take(bytes); }
  void give_back(Slot slot) noexcept override { host->give_back(slot); }
  void write(Slot slot, const void* data) override { host->write(slot, data); }
  void read(Slot slot, void* data) override { host->read(slot, data); }
  reef::TierUse use() const override { return host->use(); }
  std::shared_ptr<reef::Tier> host = reef::host_tier(std::uint64_t{1} << 40);
};

// Pages that fill their budget: a new one lets the one leave that has been unused for longest, and when it is
// freed again there is room for that one to come back.
struct Ring {
  // Where addresses go only what a budget is given, or a recorded operator uses, is of pages.
  Ring(std::shared_ptr<reef::Tier> tier, reef::Addresses addresses, std::int64_t page_bytes)
      : page_words(page_bytes / 4) {
    const auto make = [&] {
      for (int i = 0; i < kPages; ++i) pages.push_back(at::ones({page_words}));
    };
    const bool go = addresses == reef::Addresses::kGo;
    if (go) make();
    budget.emplace(
        static_cast<std::uint64_t>(kPages * page_bytes) + 4096, at::TensorList(pages),
        reef::BudgetOptions{
            .device = c10::kCPU, .tiers = {std::move(tier)}, .prefetch = false, .addresses = addresses});
    if (!go) make();
    for (at::Tensor& page : pages) {
      parts.push_back(page.narrow(0, 0, 1));
      words.push_back(page.mutable_data_ptr<float>());
    }
  }
  double evict_next() {
    at::Tensor other;
    return microseconds([&] { other = at::empty({page_words}); });
  }
  std::int64_t page_words;
  std::optional<reef::Budget> budget;
  std::vector<at::Tensor> pages;
  std::vector<at::Tensor> parts;
  std::vector<float*> words;
};

// One after another, each variant in turn with a copy. Pages of 2 MiB are large frames.
void one_page(std::int64_t page_bytes) {
  struct Row {
    const char* name;
    bool copies;
    reef::Addresses addresses;
    bool announced;
    bool writes;
  };
  constexpr auto kStay = reef::Addresses::kStay;
  const Row rows[] = {{"frames kept, announced", false, kStay, true, true},
                      {"frames kept, touched", false, kStay, false, true},
                      {"copied, announced", true, kStay, true, true},
                      {"copied, touched", true, kStay, false, true},
                      {"copied, read only", true, kStay, true, false},
                      {"address gone, announced", true, reef::Addresses::kGo, true, true}};
  const std::int64_t words = page_bytes / 4;
  const std::string page = "addresses/a page of " + std::to_string(page_bytes / kMiB) + " MiB ";
  std::vector<float> from(static_cast<std::size_t>(kPages * words), 1), to(from.size(), 2);
  for (const Row& row : rows) {
    const at::NoGradGuard no_grad;
    std::shared_ptr<reef::Tier> tier = reef::host_tier(std::uint64_t{1} << 40);
    if (row.copies) tier = std::make_shared<CopyingTier>();
    Ring ring(tier, row.addresses, page_bytes);
    Result copy{"memcpy", {}}, bring{row.name, {}}, evict{row.name, {}};
    volatile float sum = 0;
    for (int round = 0; round < kRounds; ++round) {
      const auto i = static_cast<std::size_t>(round % kPages);
      copy.nanoseconds.push_back(
          microseconds([&] { std::memcpy(to.data() + i * words, from.data() + i * words, page_bytes); }));
      evict.nanoseconds.push_back(ring.evict_next());
      bring.nanoseconds.push_back(microseconds([&] {
        if (!row.announced) {
          ++ring.words[i][0];
        } else if (row.writes) {
          ring.parts[i].neg_();
        } else {
          sum = sum + ring.parts[i].item<float>();
        }
      }));
    }
    for (Result* result : {&copy, &bring, &evict})
      result->nanoseconds.erase(result->nanoseconds.begin(), result->nanoseconds.begin() + 2 * kPages);
    const reef::BudgetUse use = ring.budget->use();
    const std::string moved = std::to_string(use.evictions) + " left, " +
                              std::to_string(use.clean_evictions) + " of them clean, " +
                              std::to_string(use.unannounced) + " touched";
    print(page + "comes/memcpy", copy.median(), "us", moved);
    print(page + "comes/" + row.name, bring.median(), "us", moved);
    print_ratios(page + "comes", {copy, bring});
    print(page + "leaves for a new one/" + row.name, evict.median(), "us", moved);
  }
}

std::size_t mappings() {
  std::ifstream file("/proc/self/maps");
  std::size_t lines = 0;
  for (std::string line; std::getline(file, line);) ++lines;
  return lines;
}

void many_pages() {
  constexpr int kMany = 10000;
  reef::Budget budget(std::uint64_t{kMany} << 15, at::TensorList(),
                      {.tiers = {}, .addresses = reef::Addresses::kStay});
  std::vector<at::Tensor> pages;
  pages.reserve(kMany);
  pages.push_back(at::ones({16384}));
  const std::size_t before = mappings();
  while (pages.size() < kMany) pages.push_back(at::ones({16384}));
  print("addresses/mappings/10000 pages of 64 KiB, half of them away",
        static_cast<double>(mappings()) - static_cast<double>(before), "mappings",
        std::to_string(budget.use().evictions) + " left");
}

}  // namespace

int main() {
  reef::bench::keep_pages();
  torch::set_num_threads(1);
  if (reef::addresses_here() != "stay") {
    std::fprintf(stderr, "addresses %s\n", reef::addresses_here().c_str());
    return 0;
  }
  one_page(kMiB);
  one_page(2 * kMiB);
  many_pages();
}
