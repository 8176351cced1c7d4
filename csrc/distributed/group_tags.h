#pragma once

#include <c10/core/Device.h>

#include <memory>
#include <utility>

#include "distributed/group_use.h"
#include "reef/collectives.h"

namespace reef {

/// Numbers of exchanges that follow each other and that nobody else has in this group, while this lives.
class GroupTags {
 public:
  GroupTags() = default;
  /// All ranks alike: the first that are free on every rank, by way of `device`, the group's. Throws
  /// ConfigError on every rank if there are not so many.
  static GroupTags take(const ProcessGroupPtr& group, int count, c10::Device device);
  ~GroupTags();
  GroupTags(GroupTags&& other) noexcept { swap(other); }
  GroupTags& operator=(GroupTags&& other) noexcept {
    GroupTags taken(std::move(other));
    swap(taken);
    return *this;
  }
  GroupTags(const GroupTags&) = delete;
  GroupTags& operator=(const GroupTags&) = delete;

  int first() const { return first_; }

 private:
  void swap(GroupTags& other) noexcept {
    use_.swap(other.use_);
    std::swap(first_, other.first_);
    std::swap(count_, other.count_);
  }

  std::shared_ptr<GroupUse> use_;
  int first_ = 0;
  int count_ = 0;
};

}  // namespace reef
