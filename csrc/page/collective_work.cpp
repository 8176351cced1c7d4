#include "page/collective_work.h"

#include <torch/csrc/distributed/c10d/Work.hpp>

#include <thread>
#include <utility>
#include <vector>

#include "table_at_fork.h"

namespace reef {
namespace {

using WorkPtr = c10::intrusive_ptr<c10d::Work>;

// A collective that has failed is over, too.
bool is_over(c10d::Work& work) {
  try {
    return work.isCompleted();
  } catch (const std::exception&) {
    return true;
  }
}

// Holds works that do not report their end. They are polled when another collective begins and when memory is
// wanted.
using Silent = TableAtFork<std::vector<std::pair<WorkPtr, std::function<void()>>>>;
Silent& silent() {
  static auto* const all = new Silent;
  return *all;
}

// Returns how many of these works have ended since the last call, and how many still run.
std::pair<std::size_t, std::size_t> ask_the_silent() {
  std::vector<std::function<void()>> over;
  std::size_t left = 0;
  {
    const auto works = silent().lock();
    std::erase_if(*works, [&](auto& work) {
      if (!is_over(*work.first)) return false;
      over.push_back(std::move(work.second));
      return true;
    });
    left = works->size();
  }
  for (const auto& then : over) then();
  return {over.size(), left};
}

WorkPtr work_among(c10::ArrayRef<c10::IValue> outputs) {
  for (const c10::IValue& output : outputs) {
    if (!output.isCustomClass() || output.type()->str().find("c10d.Work") == std::string::npos) continue;
    return output.toCustomClass<c10d::Work>();
  }
  return nullptr;
}

// Returns null for a collective on a device: its future completes when the work is enqueued, not when it
// ends.
c10::intrusive_ptr<c10::ivalue::Future> future_of(c10d::Work& work) {
  try {
    const auto future = work.getFuture();
    return future != nullptr && future->devices().empty() ? future : nullptr;
  } catch (const std::exception&) {
    return nullptr;
  }
}

}  // namespace

void when_over(c10::ArrayRef<c10::IValue> outputs, std::function<void()> then) {
  ask_the_silent();
  const WorkPtr work = work_among(outputs);
  if (work == nullptr || is_over(*work)) return then();
  if (const auto future = future_of(*work)) {
    future->addCallback([then = std::move(then)](c10::ivalue::Future&) { then(); });
    return;
  }
  silent().lock()->emplace_back(work, std::move(then));
}

bool wait_for_collective(std::chrono::steady_clock::time_point deadline) {
  for (;;) {
    const auto [over, left] = ask_the_silent();
    if (over > 0) return true;
    if (left == 0 || std::chrono::steady_clock::now() >= deadline) return false;
    std::this_thread::sleep_for(std::chrono::microseconds(200));
  }
}

}  // namespace reef
