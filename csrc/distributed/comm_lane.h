#pragma once

#include <ATen/core/Tensor.h>
#include <c10/core/Device.h>
#include <c10/util/ArrayRef.h>

#include <chrono>
#include <cstdint>
#include <functional>
#include <limits>
#include <memory>

#include "reef/collectives.h"

namespace reef {

/// Communicates beside the program: runs what it is given in order, one after another, recorded by neither
/// autograd nor observers. When something has thrown, what comes after it is passed over: a rank no longer
/// knows what the others send. May be used by several threads.
class CommLane {
 public:
  CommLane() = default;
  /// Waits for what is running; the rest is dropped.
  virtual ~CommLane() = default;
  CommLane(const CommLane&) = delete;
  CommLane& operator=(const CommLane&) = delete;

  /// Gives its number, counted from 1. Throws nothing that `work` throws. On a device, the allocator gives
  /// the memory of `used` to nobody before the work is done, though the last tensor that has it may go at
  /// once.
  virtual std::uint64_t submit(std::function<void()> work, c10::ArrayRef<at::Tensor> used = {}) = 0;
  /// Until what work number `ticket` and all before it have made may be used: by this thread or, on a device,
  /// by what its stream is given from now on. Throws what one of them has thrown.
  /// A ticket that has not been given yet stands for the last one that has.
  virtual void wait(std::uint64_t ticket) = 0;
  /// The same for so long at most; whether it may be used now.
  virtual bool wait_for(std::uint64_t ticket, std::chrono::milliseconds most) = 0;
  /// As wait(), but returns when the host may read what they have written to its memory. Also throws the
  /// error of a device that has failed.
  virtual void wait_on_host(std::uint64_t ticket) = 0;
  static constexpr std::uint64_t kAll = std::numeric_limits<std::uint64_t>::max();
  void wait_all() { wait(kAll); }  ///< for all that have been given
  /// Until nothing that has been submitted is running, on a device neither.
  virtual void drain() noexcept = 0;
};

/// Whether the ranks of a group exchange tensors of this device by messages with tags, in any order. That is
/// gloo. Other backends have one order of collectives, which must be that in which the program comes to them.
bool by_messages(c10d::ProcessGroup& group, c10::Device device);

/// By messages: a thread, which starts with the first work. Else the thread that submits, so that the order
/// is the program's; on a device, a stream: work begins there behind what the submitting thread's stream has
/// been given.
std::unique_ptr<CommLane> make_comm_lane(c10d::ProcessGroup& group, c10::Device device);

}  // namespace reef
