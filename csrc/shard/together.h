#pragma once

#include <ATen/core/ivalue.h>

#include <cstdint>
#include <exception>
#include <functional>
#include <string>
#include <vector>

#include "reef/collectives.h"

namespace reef {

/// What all ranks of a group do together, where any of them may fail. What one throws is kept until the next
/// exchange, and is thrown on all then: nobody waits for a rank that has given up. All ranks make the same
/// calls, but for here(). They throw RankFailed.
class Together {
 public:
  /// Values go by way of `device`, the group's.
  Together(ProcessGroupPtr group, c10::Device device) : group_(std::move(group)), device_(device) {}

  /// Does it on this rank, unless something has failed here before.
  void here(const std::function<void()>& work) noexcept;
  /// Does it on this rank, even if something has failed here before, because other ranks wait for this one in
  /// it.
  void here_in_any_case(const std::function<void()>& work) noexcept;
  /// Throws if any rank has failed: there what was thrown, on the others ConfigError, which says which rank
  /// it is and why.
  void agree() { tell(0); }
  /// Every rank's number, none of them negative, on every rank. Throws as agree() does.
  std::vector<std::int64_t> tell(std::int64_t own);
  /// Every rank's value, on every rank; on a rank where that fails, nothing. Throws as agree() does. Memory:
  /// the ranks' number times the largest, twice.
  std::vector<c10::IValue> gather(const std::function<c10::IValue()>& own);
  /// Rank 0's value; on a rank where that fails, none. Throws as agree() does.
  c10::IValue broadcast(const std::function<c10::IValue()>& of_first);
  /// Throws ConfigError on all ranks if they do not say the same: "`what` is SGD on rank 0 and Adam on rank
  /// 1", and the first of them that differs.
  void agree_on(const std::string& what, const std::string& own);

 private:
  ProcessGroupPtr group_;
  c10::Device device_;
  std::exception_ptr failed_;
  std::string said_;  ///< by what has failed
};

/// Throws ConfigError on all ranks if any says that it has `failed` (empty: it has not), but on those that
/// have; or if they do not give the same optimizer's `rule`.
void agree_with_ranks(const ProcessGroupPtr& group, c10::Device device, const std::string& failed,
                      const std::string& rule);

}  // namespace reef
