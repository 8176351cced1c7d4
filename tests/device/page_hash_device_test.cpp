// Holds the kernels that hash a page, and write its slot again, to what they promise.
#include <gtest/gtest.h>

#include <cstring>
#include <random>
#include <set>

#include "device/device_bytes.h"
#include "device/played_grid.h"
#include "kernels/cuda/page_hash.h"

namespace reef {
namespace {

using Bytes = std::vector<std::uint8_t>;
using Word = unsigned long long;
using kernels::cuda::PageHashScratch;
constexpr std::uint64_t kBlockBytes = std::uint64_t{128} * 128 * 16;  // What one block hashes.

const std::vector<std::uint64_t> kSizes = {1,
                                           7,
                                           8,
                                           9,
                                           15,
                                           16,
                                           17,
                                           4095,
                                           4096,
                                           4097,
                                           65536,
                                           kBlockBytes - 1,
                                           kBlockBytes,
                                           kBlockBytes + 1,
                                           3 * kBlockBytes + 5};

Bytes random_bytes(std::uint64_t bytes, std::mt19937_64& random) {
  Bytes values(bytes);
  for (std::uint8_t& value : values) value = static_cast<std::uint8_t>(random());
  return values;
}

// The formula of page_hash.cu, one word after the other.
Word reference(const Bytes& bytes) {
  Word hash = 0;
  const std::uint64_t words = (bytes.size() + 15) / 16 * 2;
  for (std::uint64_t i = 0; i < words; ++i) {
    Word word = 0;
    if (8 * i < bytes.size())
      std::memcpy(&word, &bytes[8 * i], std::min<std::uint64_t>(8, bytes.size() - 8 * i));
    Word bits = word ^ (i + 1) * 0x9E3779B97F4A7C15;
    bits ^= bits >> 32;
    bits *= 0x9FB21C651E98DF25;
    bits ^= bits >> 29;
    bits *= 0x9FB21C651E98DF25;
    hash += bits ^ bits >> 28;
  }
  return hash;
}

struct Device {
  explicit Device(const Bytes& page) : data(page) {}
  DeviceBytes data;
  DeviceBytes scratch{std::vector<std::uint8_t>(sizeof(PageHashScratch), 0)};
  DeviceBytes noted{std::vector<Word>{5}};
  DeviceBytes written{std::vector<Word>{100}};

  bool is_whole_around() const {
    return data.is_whole_around() && scratch.is_whole_around() && noted.is_whole_around() &&
           written.is_whole_around();
  }
};

TEST(PageHashDevice, IsTheReferences) {
  std::mt19937_64 random(1);
  for (const std::uint64_t bytes : kSizes) {
    const Bytes page = random_bytes(bytes, random);
    Device device(page);
    kernels::cuda::hash_page(device.data.data(), bytes, device.scratch.as<PageHashScratch>(), nullptr);
    ASSERT_EQ(device.scratch.as<PageHashScratch>()->hash, reference(page)) << bytes << " bytes";
    kernels::cuda::note_page_hash(device.data.data(), bytes, device.noted.as<Word>(),
                                  device.scratch.as<PageHashScratch>(), nullptr);
    ASSERT_EQ(device.noted.copy<Word>()[0], reference(page)) << bytes << " bytes";
    ASSERT_EQ(device.data.copy<std::uint8_t>(), page);
    ASSERT_TRUE(device.is_whole_around());
  }
}

TEST(PageHashDevice, WritesAndCountsExactlyWhatHasChanged) {
  std::mt19937_64 random(2);
  for (const std::uint64_t bytes : kSizes) {
    const Bytes page = random_bytes(bytes, random);
    for (const std::uint64_t changed :
         {std::uint64_t{0}, bytes / 2, bytes - 1, bytes}) {  // the last: nothing
      Device device(page);
      const Bytes before(bytes, 0xEE);
      DeviceBytes slot(before);
      kernels::cuda::note_page_hash(device.data.data(), bytes, device.noted.as<Word>(),
                                    device.scratch.as<PageHashScratch>(), nullptr);
      Bytes now = page;
      if (changed < bytes) now[changed] ^= 1;
      std::memcpy(device.data.data(), now.data(), bytes);
      for (const int times : {1, 2}) {
        kernels::cuda::write_page_if_changed(device.data.data(), bytes, slot.data(), device.noted.as<Word>(),
                                             device.scratch.as<PageHashScratch>(), device.written.as<Word>(),
                                             nullptr);
        ASSERT_EQ(slot.copy<std::uint8_t>(), changed < bytes ? now : before)
            << bytes << " bytes, time " << times;
        ASSERT_EQ(device.written.copy<Word>()[0], changed < bytes ? 101U : 100U)
            << "the second time it is known";
        ASSERT_EQ(device.noted.copy<Word>()[0], reference(now));
      }
      ASSERT_TRUE(device.is_whole_around() && slot.is_whole_around());
    }
  }
}

// Words that change places, bits that flip, words of other places: among few bytes all hashes differ.
TEST(PageHashDevice, TellsSmallDifferences) {
  std::set<Word> hashes;
  std::size_t pages = 0;
  const auto add = [&](const Bytes& page) {
    ++pages;
    hashes.insert(reference(page));
  };
  Bytes page(64, 0);
  add(page);
  for (std::size_t bit = 0; bit < 8 * page.size(); ++bit) {
    for (std::size_t other = bit + 1; other < 8 * page.size(); ++other) {
      Bytes changed = page;
      changed[bit / 8] ^= static_cast<std::uint8_t>(1 << bit % 8);
      changed[other / 8] ^= static_cast<std::uint8_t>(1 << other % 8);
      add(changed);
    }
  }
  EXPECT_EQ(hashes.size(), pages);
}

}  // namespace
}  // namespace reef
