#pragma once

#include <condition_variable>
#include <cstdint>
#include <functional>
#include <memory>
#include <mutex>
#include <string>
#include <thread>
#include <vector>

#include "deadline.h"
#include "reef/collectives.h"

namespace reef {

class MemberGroup;

/// Looks on a thread of its own at ranks of a group whose going need not be a failure of it: by their signs
/// of life, and whether their processes have ended. Groups that init_process_group did not make have no signs
/// of life: nobody looks then.
class Watch {
 public:
  enum class Found : std::uint8_t {
    kEnded,   ///< its process, on this machine
    kSilent,  ///< or the store, if the rank is -1
  };
  /// `tell` is called once for each rank, with a sentence that names it, on the watch's thread.
  using Tell = std::function<void(Found found, int rank, const std::string& text)>;
  Watch(const ProcessGroupPtr& group, std::vector<int> ranks, Tell tell);
  ~Watch();
  Watch(const Watch&) = delete;
  Watch& operator=(const Watch&) = delete;

 private:
  struct Seen;
  void run();
  void look_at_beats(std::vector<Seen>& seen, int& unanswered);

  const ProcessGroupPtr group_;
  const MemberGroup* ours_;
  const std::vector<int> ranks_;
  const Tell tell_;
  std::mutex mutex_;
  std::condition_variable changed_;
  bool closing_ = false;
  std::thread thread_;
};

/// Of a rank with which a connection has broken: a sentence that names it, and says that it has ended where
/// that can be told within two seconds.
std::string text_of_gone(const ProcessGroupPtr& group, int rank);

/// Says in the store, for all ranks, that this one is silent.
void state_silence(const ProcessGroupPtr& group, int rank);

}  // namespace reef
