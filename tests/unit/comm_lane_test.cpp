// What communicates beside the program: on a thread, and on a device's stream. There is no device here:
// streams and events are played by what each of them knows to be done.
#include "distributed/comm_lane.h"

#include <gtest/gtest.h>

#include <c10/core/Event.h>
#include <c10/core/StreamGuard.h>
#include <c10/core/impl/DeviceGuardImplInterface.h>

#include <ATen/ops/ones.h>

#include <algorithm>
#include <array>
#include <atomic>
#include <map>
#include <random>
#include <set>
#include <stdexcept>
#include <string>
#include <utility>
#include <vector>

#include "reef/process_group.h"

namespace reef {
namespace {

const c10::Device kDevice{c10::DeviceType::PrivateUse1, 0};
constexpr c10::StreamId kPrograms = 1;
constexpr c10::StreamId kLanes = 2;

using Done = std::set<int>;

/// What has been given to a stream before it goes on.
struct Played {
  std::map<c10::StreamId, Done> streams;
  c10::StreamId current = kPrograms;
  int events = 0;
  std::set<std::pair<const void*, c10::StreamId>>
      used;              ///< memory that a stream uses, as the allocator is told
  Done host;             ///< what the host has waited for
  int host_waits = 0;    ///< so often
  bool is_late = false;  ///< no event has been reached until the host waits for it
  bool is_lost = false;  ///< the device has failed
};
Played& played() {
  static Played only;
  return only;
}
Done& current() { return played().streams[played().current]; }

struct Guard final : c10::impl::DeviceGuardImplInterface {
  c10::DeviceType type() const override { return kDevice.type(); }
  c10::Device exchangeDevice(c10::Device) const override { return kDevice; }
  c10::Device getDevice() const override { return kDevice; }
  void setDevice(c10::Device) const override {}
  void uncheckedSetDevice(c10::Device) const noexcept override {}
  c10::DeviceIndex deviceCount() const noexcept override { return 1; }
  c10::Stream getStream(c10::Device) const noexcept override { return stream(played().current); }
  c10::Stream getStreamFromGlobalPool(c10::Device, bool) const override { return stream(kLanes); }
  c10::Stream exchangeStream(c10::Stream next) const noexcept override {
    return stream(std::exchange(played().current, next.id()));
  }
  void record(void** event, const c10::Stream& on, const c10::DeviceIndex,
              const c10::EventFlag) const override {
    if (*event == nullptr) {
      *event = new Done;
      ++played().events;
    }
    *static_cast<Done*>(*event) = played().streams[on.id()];
  }
  void block(void* event, const c10::Stream& of) const override {
    played().streams[of.id()].merge(Done(*static_cast<Done*>(event)));
  }
  void destroyEvent(void* event, const c10::DeviceIndex) const noexcept override {
    delete static_cast<Done*>(event);
    --played().events;
  }
  bool queryEvent(void* event) const override {
    const Done& done = *static_cast<Done*>(event);
    return !played().is_late ||
           std::includes(played().host.begin(), played().host.end(), done.begin(), done.end());
  }
  void synchronizeEvent(void* event) const override {
    if (played().is_lost) throw std::runtime_error("the device is lost");
    ++played().host_waits;
    played().host.merge(Done(*static_cast<Done*>(event)));
  }
  void recordDataPtrOnStream(const c10::DataPtr& memory, const c10::Stream& stream) const override {
    played().used.emplace(memory.get(), stream.id());
  }
  static c10::Stream stream(c10::StreamId id) { return c10::Stream(c10::Stream::UNSAFE, kDevice, id); }
};
const Guard guard;
const c10::impl::DeviceGuardImplRegistrar registered(kDevice.type(), &guard);

c10d::ProcessGroup& group() {
  static const ProcessGroupPtr alone = [] {
    ProcessGroupOptions options;
    options.rank = 0;
    options.world_size = 1;
    return init_process_group(options);
  }();
  return *alone;
}

// Each work finds done what the program's stream was given before it was submitted, and after wait() the
// program finds done all up to that work, and nothing that was submitted later.
TEST(CommLane, AStreamFollowsTheProgramAndIsFollowed) {
  std::mt19937 random(1);
  for (int row = 0; row < 200; ++row) {
    played() = {};
    const auto lane = make_comm_lane(group(), kDevice);
    std::vector<int> works;  // by ticket
    int last_waited = 0;
    for (int step = 1; step <= 30; ++step) {
      switch (random() % 3) {
        case 0:
          current().insert(step);
          break;
        case 1: {
          const Done before = current();
          const std::uint64_t ticket = lane->submit([&] {
            EXPECT_EQ(played().current, kLanes);
            EXPECT_TRUE(std::includes(current().begin(), current().end(), before.begin(), before.end()));
            current().insert(step);
          });
          works.push_back(step);
          EXPECT_EQ(ticket, works.size());
          EXPECT_EQ(current(), before) << "nobody has waited";
          break;
        }
        default:
          if (works.empty()) break;
          const std::size_t ticket = 1 + random() % works.size();
          lane->wait(ticket);
          last_waited = std::max(last_waited, works[ticket - 1]);
          for (const int work : works) EXPECT_EQ(current().contains(work), work <= last_waited) << row;
      }
    }
    lane->wait_all();
    for (const int work : works) EXPECT_TRUE(current().contains(work));
    EXPECT_LE(played().events, 1) << "those that nobody can wait for any more are gone";
  }
  EXPECT_EQ(played().events, 0);
}

// What the host waits for is all up to a work, once, and the stream does not follow. drain() does not wait
// for what is known to be done.
TEST(CommLane, TheHostWaitsForAStream) {
  std::mt19937 random(2);
  for (int row = 0; row < 200; ++row) {
    played() = {};
    played().is_late = true;
    const auto lane = make_comm_lane(group(), kDevice);
    std::uint64_t submitted = 0;
    for (int step = 1; step <= 30; ++step) {
      const int waits = played().host_waits;
      switch (random() % 4) {
        case 0:
        case 1:
          submitted = lane->submit([&] { current().insert(step); });
          EXPECT_EQ(played().host_waits, waits);
          break;
        case 2: {
          const std::uint64_t ticket = submitted == 0 ? CommLane::kAll : 1 + random() % submitted;
          const Done before = current();
          lane->wait_on_host(ticket);
          EXPECT_EQ(current(), before);
          EXPECT_EQ(played().host_waits, waits + (submitted > 0 ? 1 : 0));
          EXPECT_GE(played().host.size(), submitted == 0 ? 0 : ticket);
          break;
        }
        default: {
          const bool knows_all = played().host.size() == submitted;
          lane->drain();
          EXPECT_EQ(played().host.size(), submitted);
          EXPECT_EQ(played().host_waits, waits + (knows_all ? 0 : 1));
        }
      }
    }
  }
}

// Who reads what a device has not written must hear of it; who only waits until it is quiet need not.
TEST(CommLane, TheHostIsToldThatADeviceHasFailed) {
  played() = {};
  const auto lane = make_comm_lane(group(), kDevice);
  lane->submit([] {});
  played().is_late = played().is_lost = true;
  EXPECT_THROW(lane->wait_on_host(CommLane::kAll), std::runtime_error);
  lane->drain();
  played() = {};
}

// Or it would be given to somebody else when the program's last tensor of it goes, while the lane is at it.
TEST(CommLane, TheAllocatorIsToldOfMemoryThatAWorkUses) {
  played() = {};
  const auto lane = make_comm_lane(group(), kDevice);
  const std::array<at::Tensor, 2> used{at::ones({3}), at::ones({5})};
  lane->submit([] { EXPECT_EQ(played().used.size(), 2) << "before it begins"; }, used);
  for (const at::Tensor& tensor : used)
    EXPECT_TRUE(played().used.contains({tensor.const_data_ptr(), kLanes})) << tensor.sizes();
  lane->submit([] {});
  EXPECT_EQ(played().used.size(), 2);
}

// On a thread and on a stream alike.
TEST(CommLane, WhatFollowsAnErrorIsPassedOver) {
  for (const c10::Device device : {c10::Device(c10::kCPU), kDevice}) {
    const auto lane = make_comm_lane(group(), device);
    std::atomic<int> done{0};
    const auto first = lane->submit([&] { done += 1; });
    const auto second = lane->submit([] { throw std::runtime_error("the cable is cut"); });
    const auto third = lane->submit([&] { done += 10; });
    lane->wait(first);
    for (const auto ticket : {second, third, lane->submit([&] { done += 100; })}) {
      try {
        lane->wait(ticket);
        ADD_FAILURE() << device << ", " << ticket;
      } catch (const std::runtime_error& error) {
        EXPECT_EQ(error.what(), std::string("the cable is cut"));
      }
      EXPECT_THROW(lane->wait_on_host(ticket), std::runtime_error);
    }
    EXPECT_THROW(lane->wait_all(), std::runtime_error);
    lane->wait(first);
    lane->wait_on_host(first);
    lane->drain();
    EXPECT_EQ(done, 1) << device;
  }
}

TEST(CommLane, AThreadRunsInOrderAndIsWaitedFor) {
  std::vector<int> order;  // written by the lane's thread alone until it is drained
  {
    const auto lane = make_comm_lane(group(), c10::kCPU);
    for (int i = 0; i < 100; ++i) lane->submit([&order, i] { order.push_back(i); });
    lane->drain();
    ASSERT_EQ(order.size(), 100U);
    EXPECT_TRUE(std::is_sorted(order.begin(), order.end()));
  }
}

}  // namespace
}  // namespace reef
