#pragma once

#include <torch/csrc/distributed/c10d/ProcessGroup.hpp>
#include <vector>

#include "compat.h"

namespace reef::compat {

/// What c10d named otherwise before 2.13.

inline c10::intrusive_ptr<c10d::Work> all_to_all(c10d::ProcessGroup& group, at::Tensor& to,
                                                 at::Tensor& from) {
  std::vector<std::int64_t> equal;
#if REEF_TORCH >= 213
  return group.all_to_all_single(to, from, equal, equal);
#else
  return group.alltoall_base(to, from, equal, equal);
#endif
}

inline c10::intrusive_ptr<c10d::Work> all_gather(c10d::ProcessGroup& group, at::Tensor& to,
                                                 at::Tensor& from) {
#if REEF_TORCH >= 213
  return group.all_gather_single(to, from);
#else
  return group._allgather_base(to, from);
#endif
}

}  // namespace reef::compat
