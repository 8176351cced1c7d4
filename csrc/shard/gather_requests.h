#pragma once

#include <cstddef>
#include <cstdint>
#include <string>
#include <vector>

#include "distributed/store.h"
#include "reef/collectives.h"

namespace reef {

/// What ranks that wait for buckets of parameters tell each other by the group's store. A gather needs all
/// ranks, and each begins it when one of its own operators asks for it: a rank that uses other parameters, or
/// whose pass has failed, learns here which gathers the others wait for. A round trip to the store for each
/// call.
class GatherRequests {
 public:
  /// Gather number `count` of a bucket, counted from 1 by each rank.
  struct Request {
    std::size_t bucket;
    std::int64_t count;
  };

  /// `name` is that of what so many ranks of the group gather among them, the same on all of these, and of
  /// nothing else in the group.
  GatherRequests(const ProcessGroupPtr& group, const std::string& name, int ranks);
  ~GatherRequests();
  GatherRequests(const GatherRequests&) = delete;
  GatherRequests& operator=(const GatherRequests&) = delete;

  /// Whether the group has a store.
  explicit operator bool() const { return store_ != nullptr; }

  /// Requests are of this step from now on. Removes what this rank has made before the last one.
  void begin_step(std::int64_t step);
  void make(const Request& request);
  /// The same within a step: who has begun a part sees no request of another, and nobody sees those of a part
  /// that he has not begun.
  void begin_part();
  /// What all ranks have made in this part of the step since the last call.
  std::vector<Request> take();

  /// This rank's pass has failed: the others need not wait before they ask.
  void tell_failed();
  bool has_failed() const;

  /// Whether any rank has ever made a request.
  bool were_made() const;
  /// This rank makes no more requests; whether all ranks have said so.
  void make_no_more();
  bool all_make_no_more() const;

 private:
  std::string key(const std::string& what) const;
  void forget_before_last();

  StorePtr store_;
  int ranks_;
  std::string prefix_;
  bool has_made_ = false;
  std::int64_t step_ = 0;
  std::int64_t part_ = 0;                 ///< counted over all steps
  std::int64_t taken_ = 0;                ///< in this part
  std::vector<std::string> made_;         ///< keys, in this part
  std::vector<std::string> made_before_;  ///< in the last
};

}  // namespace reef
