#include "shard/gather_listener.h"

#include <chrono>
#include <thread>
#include <torch/csrc/distributed/c10d/ProcessGroup.hpp>
#include <utility>

#include "distributed/heartbeat.h"
#include "distributed/members.h"

namespace reef {
namespace {

constexpr std::chrono::milliseconds kLookAgain{5};  // where something was asked for, more will be
constexpr int kQuietLooks = 100;

}  // namespace

GatherListener::GatherListener(c10d::ProcessGroup& group, c10::Device device, std::function<bool()> answer)
    : answer_(std::move(answer)), lane_(make_comm_lane(group, device)) {
  if (Heartbeat* const heart = heart_of(group)) {
    while_waiting_ = heart->while_waiting([this] { listen(); });
  }
}

GatherListener::~GatherListener() {
  closing_ = true;
  while_waiting_.reset();
  lane_->drain();
}

void GatherListener::listen() {
  if (listens_.exchange(true)) return;
  lane_->submit([this] {
    for (int quiet = answer_() ? 0 : kQuietLooks; quiet < kQuietLooks && !closing_; ++quiet) {
      std::this_thread::sleep_for(kLookAgain);
      if (answer_()) quiet = 0;
    }
    listens_ = false;
  });
}

}  // namespace reef
