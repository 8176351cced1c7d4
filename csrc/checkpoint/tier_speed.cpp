#include "reef/tier_speed.h"

#include <ATen/Parallel.h>

#include <algorithm>
#include <chrono>
#include <ctime>
#include <exception>
#include <optional>
#include <string>
#include <thread>

#include "checkpoint/tier_copy.h"
#include "current_device.h"
#include "reef/error.h"

namespace reef {
namespace {

double core_seconds() {
  timespec now{};
  ::clock_gettime(CLOCK_THREAD_CPUTIME_ID, &now);
  return static_cast<double>(now.tv_sec) + 1e-9 * static_cast<double>(now.tv_nsec);
}

bool has_spare_cores() {
  return std::thread::hardware_concurrency() > static_cast<unsigned>(at::get_num_threads());
}

}  // namespace

TierSpeed tier_speed(const std::shared_ptr<Tier>& tier, c10::Device device, std::uint64_t bytes) {
  if (bytes == 0) throw ConfigError("tier_speed: 0 bytes tell nothing; give 16 MiB, say");
  TierLane lane(tier, with_index(device));
  const std::optional<Tier::Slot> slot = lane.tier->take(bytes);
  if (!slot) {
    throw ConfigError("the tier (" + lane.tier->name() + ") has no room for " + std::to_string(bytes) +
                      " bytes, with which its speed is measured; give it a larger capacity");
  }
  struct GiveBack {
    TierLane& lane;
    Tier::Slot slot;
    ~GiveBack() { lane.memory->give_back(lane.tier, slot); }
  } const give_back{lane, *slot};
  const c10::DataPtr block = lane.memory->allocate(bytes);
  const bool works = device.is_cpu() && !has_spare_cores();
  double slowest = 0, most_work = 0;
  const auto measure = [&](PageCopy::Direction direction) {
    const double core_before = core_seconds();
    const auto begin = std::chrono::steady_clock::now();
    const auto copied =
        lane.memory->prepare({direction, lane.tier, *slot, block.get(), bytes, TierLane::kHashed});
    copied->run();
    while (!copied->done()) std::this_thread::yield();  // on a device
    if (copied->error) std::rethrow_exception(copied->error);
    const std::chrono::duration<double> taken = std::chrono::steady_clock::now() - begin;
    slowest = std::max(slowest, copied->seconds > 0 ? copied->seconds : taken.count());
    most_work = std::max(most_work, works ? core_seconds() - core_before : 0);
  };
  measure(PageCopy::Direction::kOut);
  slowest = most_work = 0;  // that has touched memory that was not used before
  measure(PageCopy::Direction::kOut);
  measure(PageCopy::Direction::kIn);
  slowest = std::max(slowest, 1e-9);
  return {static_cast<double>(bytes) / slowest, std::min(most_work / slowest, 1.0)};
}

}  // namespace reef
