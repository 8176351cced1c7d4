// Huge pages for memory that is about to be written: the kernel's own account of them.
#include "page/huge_pages.h"

#include <gtest/gtest.h>
#include <torch/torch.h>

#include <cstdint>
#include <fstream>
#include <string>

#include "ledger/allocation_gate.h"
#include "ledger/counting_allocator.h"
#include "support/without_ledger.h"

namespace reef {
namespace {

/// Whether the kernel says of the mapping at this address that huge pages were asked for ("hg" among its
/// flags).
bool asked_for_at(const void* address) {
  const auto wanted = reinterpret_cast<std::uintptr_t>(address);
  std::ifstream mappings("/proc/self/smaps");
  bool is_it = false;
  for (std::string line; std::getline(mappings, line);) {
    unsigned long first = 0, last = 0;
    if (std::sscanf(line.c_str(), "%lx-%lx ", &first, &last) == 2) is_it = first <= wanted && wanted < last;
    if (is_it && line.rfind("VmFlags:", 0) == 0) return line.find(" hg") != std::string::npos;
  }
  return false;
}

const char* middle_of(const at::Tensor& tensor) {
  return static_cast<const char*>(tensor.const_data_ptr()) + tensor.nbytes() / 2;
}

TEST(HugePages, AreAskedForUnderLargeTensorsOfThePlainAllocator) {
  if (!std::ifstream("/sys/kernel/mm/transparent_hugepage/enabled"))
    GTEST_SKIP() << "this kernel has no huge pages";
  const at::Tensor plain = torch::empty({64 << 20}, at::kByte);
  EXPECT_FALSE(asked_for_at(middle_of(plain)));
  const at::Tensor large = on_huge_pages(torch::empty({64 << 20}, at::kByte));
  EXPECT_TRUE(asked_for_at(middle_of(large)));
  EXPECT_TRUE(torch::equal(large.fill_(3).sum(), torch::tensor(std::int64_t{3} * (64 << 20))));
}

TEST(HugePages, OtherMemoryIsLeftAlone) {
  const at::Tensor small = torch::empty({3 << 20}, at::kByte);
  EXPECT_EQ(on_huge_pages(small).const_data_ptr(), small.const_data_ptr());
  EXPECT_FALSE(asked_for_at(middle_of(small)));
  const at::Tensor owner = torch::empty({64 << 20}, at::kByte);
  const at::Tensor others = torch::from_blob(
      owner.mutable_data_ptr(), {64 << 20}, [](void*) {}, at::kByte);
  on_huge_pages(others);
  EXPECT_FALSE(asked_for_at(middle_of(others)));
  on_huge_pages(torch::empty({0}));
}

// A gate whose memory is LibTorch's own all the same, so that what it has given can be looked at.
struct Gate final : AllocationGate {
  bool gives = true;
  bool before_allocate(std::size_t) override { return false; }
  void after_allocate(std::size_t) noexcept override {}
  void* allocate(std::size_t) override { return nullptr; }
  bool gives_memory() const noexcept override { return gives; }
  bool freed(const void*) noexcept override { return false; }
  bool counts_itself(const void*) const noexcept override { return false; }
  bool take_back(void*) noexcept override { return false; }
};

// After the others: the counting allocator stays. Whatever counts memory installs it, a ledger or a shard.
TEST(HugePagesZ, AreAskedForUnderCountedMemoryWhileNoGateGivesAny) {
  if (!std::ifstream("/sys/kernel/mm/transparent_hugepage/enabled"))
    GTEST_SKIP() << "this kernel has no huge pages";
  install_counting_allocator();
  static auto* const gate = new Gate;
  for (const bool has_gate : {false, true}) {
    for (const bool gives : {false, true}) {
      allocation_gate = has_gate ? gate : nullptr;
      gate->gives = gives;
      const at::Tensor large = on_huge_pages(torch::empty({64 << 20}, at::kByte));
      EXPECT_EQ(asked_for_at(middle_of(large)), !has_gate || !gives) << has_gate << gives;
    }
  }
  allocation_gate = nullptr;
}

}  // namespace
}  // namespace reef
