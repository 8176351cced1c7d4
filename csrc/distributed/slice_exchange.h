#pragma once

#include <ATen/core/Tensor.h>

#include <atomic>
#include <cstdint>
#include <optional>
#include <string>
#include <vector>

#include "reef/collectives.h"

namespace c10d {
class Work;
}  // namespace c10d

namespace reef {

/// Reduce-scatter and all-gather over flat memory of `degree` equal slices, rank r's being number r % degree:
/// ranks that follow each other have a copy among them, and all copies are the same. By messages between
/// ranks (see by_messages()), each straight from and into the tensors; else by the backend's all-to-all and
/// all-gather. Calls return when the result may be used, on devices by the current stream. They may come from
/// any thread, one at a time; all ranks make the same ones in the same order. If a rank is gone they throw
/// RankFailed.
class SliceExchange {
 public:
  /// Two exchanges in one group that are used at the same time need different numbers (GroupTags).
  /// `degree` divides the number of ranks; with SumOrder::kNative it is that number.
  SliceExchange(ProcessGroupPtr group, int number, int degree, SumOrder sums = SumOrder::kRanks);

  /// `own`, of a slice's elements, becomes the sum (or mean) of this rank's slice over all ranks: added up in
  /// the order of ranks, ((0 + 1) + 2) + ..., in the dtype itself, as an accumulation of gradients would; a
  /// mean is divided last. It may be that slice of `flat`, whose other slices are undefined afterwards. Sends
  /// and receives (D - 1) / D of `flat` in a copy among D ranks; from the first copy to the last and back,
  /// what has been added up of a slice. Needs 2 MiB more at most, until begin_step(). Not by messages: sends
  /// a slice to each other rank, and needs the slices of all ranks twice, of one copy once. kNative: the
  /// backend's own.
  void reduce_scatter(const at::Tensor& flat, const at::Tensor& own, Reduction reduction);

  /// All of `flat` becomes that sum (or mean). Sends what the two calls send that it could be made of.
  void all_reduce(const at::Tensor& flat, Reduction reduction);

  /// Every slice in all of `flat`. Sends D - 1 slices and receives as many, within a copy. By messages, calls
  /// of different subjects (from 0) are told apart: if ranks make them in another order they wait for each
  /// other until the group's timeout, and never take one for the other.
  void all_gather(const at::Tensor& flat, std::optional<int> subject = std::nullopt);

  /// The same of small things that the ranks tell each other, which are not counted.
  void tell(const at::Tensor& flat);

  /// Every element becomes the largest of those that the ranks have there. Not counted.
  void largest(const at::Tensor& values);

  /// This rank's slice of `flat`, in its memory.
  at::Tensor own_slice(const at::Tensor& flat) const { return slice(flat, own_.rank - own_.first, own_); }

  /// Calls of this and of others of its group may run at the same time, and in any order.
  bool in_any_order(c10::Device device) const;

  /// What is thrown from now on says in which step it was. Gives memory back that reduce_scatter() has kept.
  void begin_step(std::int64_t step) {
    step_ = step;
    received_.reset();
  }

  /// Bytes that this rank has sent so far; of the backend's own sums, what a ring would send.
  std::int64_t sent_bytes() const { return sent_bytes_; }

 private:
  /// Ranks that follow each other, and this one.
  struct Ranks {
    int first, count, rank;
  };
  static at::Tensor slice(const at::Tensor& flat, int number, const Ranks& ranks);
  using Works = std::vector<c10::intrusive_ptr<c10d::Work>>;
  template <class Done>
  void receive_and_add(const at::Tensor& flat, const at::Tensor& own, Reduction reduction, const Done& done,
                       Works& works);
  void add_and_spread(const at::Tensor& flat, const at::Tensor& own, Reduction reduction, Works& works);
  void add_all(const at::Tensor& flat, const at::Tensor& own, Reduction reduction);
  void reduce_natively(const at::Tensor& flat, const at::Tensor& own, Reduction reduction);
  template <class Issue>
  void run(const std::string& name, const at::Tensor& flat, const Issue& issue) const;
  void wait(const Works& works) const;
  void gather(const char* name, const at::Tensor& flat, const Ranks& ranks, std::optional<int> subject);
  int most_received() const;
  int next_tag();
  at::Tensor receive_buffer(std::int64_t elements, const at::TensorOptions& options);

  ProcessGroupPtr group_;
  Ranks all_;
  Ranks own_;  ///< of this copy
  SumOrder sums_;
  int first_tag_;
  int calls_ = 0;
  at::Tensor received_;                ///< by reduce_scatter() last
  std::atomic<std::int64_t> step_{0};  ///< 0: not told
  std::atomic<std::int64_t> sent_bytes_{0};
};

}  // namespace reef
