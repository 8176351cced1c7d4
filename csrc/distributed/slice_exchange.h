#pragma once

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <optional>
#include <vector>

#include "reef/collectives.h"

namespace c10d {
class Work;
}  // namespace c10d

namespace reef {

/// Reduce-scatter and all-gather over flat memory of as many equal slices as the group has ranks, rank r's
/// being number r. On the CPU by messages between ranks, each straight from and into the tensors; on devices
/// by the backend's all-to-all and all-gather. Calls return when the result may be used. They may come from
/// any thread, one at a time; all ranks make the same ones in the same order. If a rank is gone they throw
/// RankFailed.
class SliceExchange {
 public:
  /// Two exchanges in one group that are used at the same time need different numbers, from 0 to kNumbers.
  static constexpr int kNumbers = 256;
  SliceExchange(ProcessGroupPtr group, int number);

  /// `own`, of a slice's elements, becomes the sum (or mean) of this rank's slice over all ranks: added up in
  /// the order of ranks, ((0 + 1) + 2) + ..., in the dtype itself, as an accumulation of gradients would; a
  /// mean is divided last. It may be that slice of `flat`. Sends and receives (N - 1) / N of `flat`. Needs,
  /// on the CPU, 2 (N - 1) MiB more at most; on devices, as much as `flat`.
  void reduce_scatter(const at::Tensor& flat, const at::Tensor& own, Reduction reduction);

  /// Every rank's slice in all of `flat`. Sends (N - 1) slices and receives as many. On the CPU, calls of
  /// different subjects (from 0) are told apart: if ranks make them in another order they wait for each other
  /// until the group's timeout, and never take one for the other.
  void all_gather(const at::Tensor& flat, std::optional<int> subject = std::nullopt);

  /// The same of small things that the ranks tell each other, which are not counted.
  void tell(const at::Tensor& flat);

  /// Every byte becomes the largest of those that the ranks have there. Not counted.
  void any(const at::Tensor& flags);

  /// This rank's slice of `flat`, a view.
  at::Tensor own_slice(const at::Tensor& flat) const { return slice(flat, rank_); }

  /// Bytes that this rank has sent so far.
  std::int64_t sent_bytes() const { return sent_bytes_; }

 private:
  at::Tensor slice(const at::Tensor& flat, int rank) const;
  using Works = std::vector<c10::intrusive_ptr<c10d::Work>>;
  void receive_and_add(const at::Tensor& flat, const at::Tensor& own, Reduction reduction, Works& works);
  template <class Issue>
  void run(const char* name, const Issue& issue) const;
  void gather(const char* name, const at::Tensor& flat, std::optional<int> subject);
  int next_tag();

  ProcessGroupPtr group_;
  int rank_;
  int ranks_;
  int first_tag_;
  int calls_ = 0;
  std::int64_t sent_bytes_ = 0;
};

}  // namespace reef
