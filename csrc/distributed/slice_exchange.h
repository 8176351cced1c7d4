#pragma once

#include <ATen/core/Tensor.h>

#include <atomic>
#include <cstdint>
#include <functional>
#include <string>
#include <vector>

#include "reef/collectives.h"

namespace c10d {
class Work;
}  // namespace c10d

namespace reef {

/// Ranks at equal distances, and the place of this one among them.
struct RanksAmong {
  int first = 0, count = 1, distance = 1, place = 0;
  int at(int number) const { return first + number * distance; }
  /// The one so many places behind this one, in a circle.
  int number_behind(int places) const { return (place + places) % count; }
};

/// Flat memory of `degree` equal slices, rank r's being number r % degree, and messages about it: ranks that
/// follow each other have a copy among them, and all copies are the same. All-gathers are by messages between
/// ranks (see by_messages()), each straight from and into the tensors; else by the backend's all-to-all and
/// all-gather. Calls return when the result may be used, on devices by the current stream. They may come from
/// any thread, one at a time; all ranks make the same ones in the same order. If a rank is gone they throw
/// RankFailed.
class SliceExchange {
 public:
  /// Two exchanges in one group that are used at the same time need different numbers (GroupTags).
  /// `degree` divides the number of ranks.
  SliceExchange(ProcessGroupPtr group, int number, int degree);

  const ProcessGroupPtr& group() const { return group_; }
  /// All ranks; those of this rank's copy; and those with its slice, one of each copy.
  const RanksAmong& all() const { return all_; }
  const RanksAmong& copy() const { return copy_; }
  RanksAmong copies() const {
    return {copy_.place, all_.count / copy_.count, copy_.count, all_.place / copy_.count};
  }

  /// Every slice in all of `flat`. Sends D - 1 slices and receives as many, within a copy.
  void all_gather(const at::Tensor& flat);

  /// The same by messages: sends this rank's slice and returns; what is returned waits for the others', on
  /// any thread. Calls of different subjects (from 0) are told apart, so ranks may begin them in another
  /// order.
  std::function<void()> begin_all_gather(const at::Tensor& flat, int subject);

  /// Gathers `flat`, of which each of these ranks has the slice at its place. Every rank of the group calls
  /// it, with the ranks that it is among, even where there is nothing to send.
  void all_gather(const char* name, const at::Tensor& flat, const RanksAmong& among);

  /// Slice number n of `from` goes to the rank at place n of these, and of `to` comes from there; this rank's
  /// is copied. Called as all_gather() is.
  void all_to_all(const char* name, const at::Tensor& from, const at::Tensor& to, const RanksAmong& among);

  /// A tensor for one rank, or from it.
  struct Transfer {
    int rank;
    at::Tensor tensor;  ///< of one dimension
  };
  /// Sends these, and receives those, one at most for and from each rank. Who sends and who receives know the
  /// number of elements alike; all tensors of all ranks have one dtype and device. Every rank of the group
  /// calls it, even without any.
  void transfer(const char* name, const std::vector<Transfer>& sent, const std::vector<Transfer>& received,
                const at::TensorOptions& options);

  /// An all-gather of small things that all ranks tell each other, which are not counted.
  void tell(const at::Tensor& flat);

  /// Every element becomes the largest of those that the ranks have there. Not counted.
  void largest(const at::Tensor& values);

  /// Slice number `number` of so many of `flat`, in its memory; this rank's.
  static at::Tensor slice(const at::Tensor& flat, int number, int count);
  at::Tensor own_slice(const at::Tensor& flat) const { return slice(flat, copy_.place, copy_.count); }

  /// Whether ranks exchange tensors of this device by messages, so that calls of this and of others of its
  /// group may run at the same time, and in any order.
  bool in_any_order(c10::Device device) const;

  /// Throws RankFailed, since what `rank` has sent in exchange `name` cannot be what it had to send: `what`.
  [[noreturn]] void refuse(const char* name, int rank, const std::string& what) const;

  /// What is thrown from now on says in which step it was.
  void begin_step(std::int64_t step) { step_ = step; }

  /// Bytes that this rank has sent so far.
  std::int64_t sent_bytes() const { return sent_bytes_; }

  /// What exchanges are made of. An exchange of several messages takes a tag for them, issues them inside
  /// run(), and says what it has sent.
  struct Issued {
    c10::intrusive_ptr<c10d::Work> work;
    int rank = -1;  ///< to or from which a message goes; -1: a collective of the backend
  };
  using Works = std::vector<Issued>;
  /// Issues, waits for all works that have been issued, and says of what is thrown that it was `name`.
  void run(const std::string& name, const at::Tensor& flat, const std::function<void(Works&)>& issue) const;
  int next_tag();
  Issued send(const at::Tensor& from, int rank, int tag) const;
  Issued receive(const at::Tensor& to, int rank, int tag) const;
  void wait(const Works& works) const;  ///< for messages
  /// For the backend's all-to-all: so many elements for and from each of these ranks, none for others.
  std::vector<std::int64_t> elements_for(const RanksAmong& among, std::int64_t each) const;
  void count_sent(std::int64_t bytes) { sent_bytes_ += bytes; }
  /// On devices memory may have come from another stream, which must not use it anew before this one is
  /// there. run() has said so of its tensor.
  static void used_by_this_stream(const at::Tensor& tensor);

 private:
  void gather(const char* name, const at::Tensor& flat, const RanksAmong& among);
  void issue_gather(const at::Tensor& flat, const RanksAmong& among, int tag, Works& works) const;
  void name_failures(const std::string& name, const std::function<void()>& what) const;
  std::string in_step(const std::string& name) const;

  ProcessGroupPtr group_;
  RanksAmong all_;
  RanksAmong copy_;
  int first_tag_;
  int calls_ = 0;
  std::atomic<std::int64_t> step_{0};  ///< 0: not told
  std::atomic<std::int64_t> sent_bytes_{0};
};

}  // namespace reef
