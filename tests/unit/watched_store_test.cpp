// Reading keys that another rank may delete at any moment.
#include "distributed/watched_store.h"

#include <gtest/gtest.h>
#include <unistd.h>

#include <chrono>
#include <filesystem>
#include <string>
#include <torch/csrc/distributed/c10d/FileStore.hpp>
#include <torch/csrc/distributed/c10d/HashStore.hpp>
#include <torch/csrc/distributed/c10d/TCPStore.hpp>
#include <vector>

#include "reef/error.h"

namespace reef {
namespace {

using std::chrono::steady_clock;
using Value = std::vector<std::uint8_t>;

Value bytes(const std::string& text) { return {text.begin(), text.end()}; }

StorePtr a_store(const std::string& kind) {
  if (kind == "hash") return c10::make_intrusive<c10d::HashStore>();
  if (kind == "file") {
    const auto path = std::filesystem::temp_directory_path() / ("reef_store_" + std::to_string(::getpid()));
    std::filesystem::remove(path);
    return c10::make_intrusive<c10d::FileStore>(path.string(), 1);
  }
  c10d::TCPStoreOptions options;
  options.isServer = true;
  options.port = 0;
  options.waitWorkers = false;
  options.useLibUV = kind == "tcp";
  return c10::make_intrusive<c10d::TCPStore>("127.0.0.1", options);
}

struct Stores : testing::TestWithParam<const char*> {};

TEST_P(Stores, SayAtOnceWhatIsThereAndWhatIsNot) {
  const StorePtr store = a_store(GetParam());
  for (const std::string& text : {std::string("x"), std::string(100'000, 'y'), std::string("a\0b", 3)}) {
    EXPECT_EQ(value_of(*store, "key"), std::nullopt);
    EXPECT_FALSE(store->check({"key"})) << "looking sets nothing";
    store->set("key", bytes(text));
    EXPECT_EQ(value_of(*store, "key"), bytes(text));
    EXPECT_EQ(store->get("key"), bytes(text)) << "looking changes nothing";
    store->deleteKey("key");
  }
}

INSTANTIATE_TEST_SUITE_P(Kinds, Stores, testing::Values("hash", "file", "tcp", "tcp_without_uv"));

// A store that deletes a key as soon as somebody has seen that it is there.
struct Vanishing final : c10d::PrefixStore {
  using c10d::PrefixStore::PrefixStore;
  int vanishing = 0;  // how many times
  bool check(const std::vector<std::string>& names) override {
    const bool there = c10d::PrefixStore::check(names);
    if (there && vanishing-- > 0) deleteKey(names.back());
    return there;
  }
};

c10::intrusive_ptr<Vanishing> vanishing(int times) {
  auto store = c10::make_intrusive<Vanishing>("vanishing", c10::make_intrusive<c10d::HashStore>());
  store->setTimeout(std::chrono::hours(1));  // what get() would wait
  store->vanishing = times;
  return store;
}

TEST(WatchedStore, WaitsOnForAKeyThatIsGoneAgainUntilItsDeadline) {
  const auto store = vanishing(/*times=*/1);
  WatchedStore watched(
      store, [] {}, steady_clock::now() + std::chrono::milliseconds(100));
  watched.set("key", bytes("value"));
  EXPECT_THROW(watched.get("key"), c10::DistStoreError);
}

TEST(WatchedStore, FindsAKeyThatComesAgain) {
  const auto store = vanishing(/*times=*/1);
  const auto set = [&] { store->set("watched/key", bytes("again")); };
  WatchedStore watched(store, set, steady_clock::now() + std::chrono::minutes(5));
  watched.set("other", bytes("other"));
  watched.set("key", bytes("first"));
  EXPECT_EQ(watched.multiGet({"other", "key"}), (std::vector<Value>{bytes("other"), bytes("again")}));
}

}  // namespace
}  // namespace reef
