#pragma once

#include <cstdint>
#include <memory>
#include <string>
#include <vector>

#include "reef/async_updates.h"
#include "reef/collectives.h"
#include "reef/parameter_server.h"
#include "reef/shard_layout.h"

namespace reef {

struct GroupUse;

/// What servers and workers know of each other when they begin.
struct AsyncPlan {
  AsyncOptions options;
  int workers = 0;
  ShardLayout layout;  ///< of one bucket, a slice for each server; its items are the workers' parameters
  /// With each rank of the other kind, in order: the server is rank 0 of each, the worker rank 1.
  std::vector<std::shared_ptr<GroupUse>> pairs;

  std::int64_t slice_elements() const { return layout.buckets.front().slice_elements; }
  int rank_of_worker(int worker) const { return options.servers + worker; }
};

/// All ranks of `group` alike. `parameters`: of a worker; nullptr: this is a server. Throws ConfigError on
/// all ranks if any is wrong, or two disagree.
AsyncPlan bring_up_async(const ProcessGroupPtr& group, const AsyncOptions& options,
                         const AsyncWorker::Named* parameters);

/// What the messages of a pair are for.
struct AsyncWire {
  enum class Ask : std::int64_t { kPull, kPush, kLeave, kJoin, kClock, kFinish };
  enum class Answer : std::int64_t { kDone, kRemoved };
  static constexpr std::int64_t kAsk = 1;     ///< a tag: Long [2], Ask and a clock; after kPush a slice
  static constexpr std::int64_t kAnswer = 2;  ///< Long [2], Answer and a clock; after kPull a slice, with
                                              ///< kElastic after kPush, if the answer is kDone
  static constexpr std::int64_t kSlice = 3;   ///< Float [slice_elements]
  static constexpr std::int64_t kFirst = 4;   ///< the first worker's parameters, before all else
};

}  // namespace reef
