#pragma once

#include <torch/csrc/distributed/c10d/ProcessGroup.hpp>
#include <vector>

#include "compat.h"

namespace reef::compat {

/// What c10d named otherwise before 2.13.

/// Of so many elements from each rank, and so many to each; empty: of equal parts.
inline c10::intrusive_ptr<c10d::Work> all_to_all(c10d::ProcessGroup& group, at::Tensor& to, at::Tensor& from,
                                                 std::vector<std::int64_t> received,
                                                 std::vector<std::int64_t> sent) {
#if REEF_TORCH >= 213
  return group.all_to_all_single(to, from, received, sent);
#else
  return group.alltoall_base(to, from, received, sent);
#endif
}
inline c10::intrusive_ptr<c10d::Work> all_to_all(c10d::ProcessGroup& group, at::Tensor& to, at::Tensor& from,
                                                 const std::vector<std::int64_t>& elements = {}) {
  return all_to_all(group, to, from, elements, elements);
}

inline c10::intrusive_ptr<c10d::Work> reduce_scatter(c10d::ProcessGroup& group, at::Tensor& to,
                                                     at::Tensor& from) {
#if REEF_TORCH >= 213
  return group.reduce_scatter_single(to, from);
#else
  return group._reduce_scatter_base(to, from);
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
