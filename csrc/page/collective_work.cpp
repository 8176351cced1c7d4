#include "page/collective_work.h"

#include <torch/csrc/distributed/c10d/Work.hpp>

#include <utility>
#include <vector>

#include "table_at_fork.h"

namespace reef {
namespace {

using WorkPtr = c10::intrusive_ptr<c10d::Work>;

// Works that have no future, and so cannot tell: they are asked whenever another ends.
using Silent = TableAtFork<std::vector<std::pair<WorkPtr, std::function<void()>>>>;
Silent& silent() {
  static auto* const all = new Silent;
  return *all;
}

void ask_the_silent() {
  std::vector<std::function<void()>> over;
  {
    const auto works = silent().lock();
    std::erase_if(*works, [&](auto& work) {
      if (!work.first->isCompleted()) return false;
      over.push_back(std::move(work.second));
      return true;
    });
  }
  for (const auto& then : over) then();
}

WorkPtr work_among(c10::ArrayRef<c10::IValue> outputs) {
  for (const c10::IValue& output : outputs) {
    if (!output.isCustomClass() || output.type()->str().find("c10d.Work") == std::string::npos) continue;
    return output.toCustomClass<c10d::Work>();
  }
  return nullptr;
}

c10::intrusive_ptr<c10::ivalue::Future> future_of(c10d::Work& work) {
  try {
    return work.getFuture();
  } catch (const std::exception&) {
    return nullptr;
  }
}

}  // namespace

void when_over(c10::ArrayRef<c10::IValue> outputs, std::function<void()> then) {
  ask_the_silent();
  const WorkPtr work = work_among(outputs);
  if (work == nullptr || work->isCompleted()) return then();
  if (const auto future = future_of(*work)) {
    future->addCallback([then = std::move(then)](c10::ivalue::Future&) { then(); });
    return;
  }
  silent().lock()->emplace_back(work, std::move(then));
}

}  // namespace reef
