#pragma once

#include <ATen/core/Tensor.h>
#include <torch/csrc/autograd/variable.h>

#include <array>
#include <cstdint>
#include <exception>
#include <functional>
#include <memory>
#include <mutex>
#include <optional>
#include <string>
#include <vector>

#include "autograd/outermost_graph.h"
#include "distributed/comm_lane.h"
#include "given_momentum.h"
#include "reef/shard.h"
#include "reef/shard_layout.h"
#include "shard/dtypes.h"
#include "shard/flat_bucket.h"
#include "shard/gradient_exchange.h"
#include "shard/nonfinite_gradients.h"

namespace reef {

/// A parameter whose gradients are reduced.
struct ReducedParameter {
  std::string name;
  at::Tensor tensor;
};

/// Adds up gradients over the ranks during backward. A gradient goes into its place in a bucket as soon as
/// autograd has it, and what backward of later passes adds goes there too; a bucket that is whole is sent, in
/// the order of buckets, beside what is left of backward. At the end of backward all have arrived: as
/// gradients of the parameters (kReplicate) or of the parts. A pass that fails on one rank is abandoned on
/// all.
///
/// Where there are parts the parameters have stand-ins for gradients: whoever reads or writes one (an
/// optimizer or a norm of the module's own parameters) is told, and clearing it clears the gradients of its
/// parts.
class Reducer final : public ExchangedParameters {
 public:
  /// Exchanges of this number and the next are its own.
  Reducer(std::vector<ReducedParameter> parameters, ShardLayout layout, ProcessGroupPtr group,
          int first_exchange, const ShardOptions& options);
  ~Reducer() override;

  /// Where gradients go, of sharded stages and where there are masters.
  void set_parts(const std::vector<KeptPart>& parts) {
    parts_ = std::vector<Part>(parts.begin(), parts.end());
  }
  /// Called at the end of each pass that is reduced, before its last gradients are sent: where it throws, all
  /// ranks abandon the pass.
  void when_reducing(std::function<void()> reducing) { reducing_ = std::move(reducing); }
  /// Called at the end of each pass whose gradients have been given, on the thread that ran it: those of all
  /// ranks, or this rank's own.
  void when_reduced(std::function<void(bool over_ranks)> reduced) { reduced_ = std::move(reduced); }
  /// Called before gradients of parts are given.
  void when_giving(std::function<void()> giving) { giving_ = std::move(giving); }
  /// Who gives momentum to an optimizer of its own: each pass begins without gradients then.
  void give_momentum_by(std::shared_ptr<GivenMomentum> momentum) { momentum_ = std::move(momentum); }
  /// Of parameters that ranks gather in backward: see Gatherer. Without it a pass that fails on one rank
  /// leaves the others waiting where parameters are divided.
  struct Gathers {
    std::function<void()> answer, tell_failed, abandon_pass;
  };
  void answer_gathers(Gathers gathers) { gathers_ = std::move(gathers); }
  /// Gradients of parts get memory of their own, and are not looked at until new ones are given.
  void lend_gradients();
  void set_syncing(bool syncing);
  /// Passes give this rank's own sums, and send nothing. Only where nothing is divided.
  void set_local(bool local);
  /// A pass of this rank's that adds nothing, for the passes of those that still have batches. False: no rank
  /// has one, and nothing has changed. Throws what the end of a pass throws.
  bool pass_without_batch();
  /// Stops listening to backward passes, and removes its hooks from the parameters. From now on gradients are
  /// reduced by reduce_own() only.
  void reduce_when_asked();
  /// Reduces the gradients that parameters have now, as at the end of a pass. All ranks call it alike.
  void reduce_own();
  /// Takes part in what is reduce_own() on other ranks, which abandon it then, because a pass has failed
  /// here.
  void abandon_own(const std::string& why) noexcept;
  /// Ends a step in place of reduce_own() after a pass has failed on any rank. All ranks call it alike.
  void leave_own_out();
  /// Tells the other ranks that this one has failed, so they do not wait for its gathers.
  void tell_failed();
  /// Clears the gradients of parts whose parameters' the program has cleared, which the next pass would do.
  void clear_as_the_module();
  /// Counted from 1; it ends when gradients have been reduced.
  std::int64_t step() const { return step_; }
  /// Returns what was not finite in the last pass whose gradients have been given: see
  /// Shard::nonfinite_gradients().
  const std::vector<NonFiniteElements>& nonfinite() const { return nonfinite_; }
  /// False: the parameter's gradients are no longer heard of, since its memory was replaced.
  bool hears_of(std::size_t item) const;
  GradientExchange& exchange_of(std::size_t bucket) override { return *line_of(bucket).exchange; }
  /// As it was when it was sharded.
  const FlatPlace& flat_place_of(std::size_t item) const override {
    return buckets_[items_[item].bucket].places()[items_[item].place];
  }
  at::ScalarType dtype_of_sums(std::size_t item) const override {
    return buckets_[items_[item].bucket].dtype();
  }
  std::int64_t sent_bytes() const {
    return lines_[0].exchange->ranks().sent_bytes() + lines_[1].exchange->ranks().sent_bytes();
  }

 private:
  class Hook;
  class KeepHook;
  /// Its kind of pointer depends on LibTorch's version.
  using Accumulator = decltype(torch::autograd::impl::grad_accumulator(std::declval<at::Tensor>()));
  /// What the program has made of a parameter's gradient since the last pass, as this pass has found it.
  enum class Before : std::uint8_t {
    kNotSeen,
    kSeen,     ///< it is `kept`
    kCleared,  ///< and it was cleared, where parts have the gradient
  };
  /// What is in a parameter's place.
  enum class Sum : std::uint8_t {
    kNone,
    kAdded,     ///< this rank's, of this pass or of passes in no_sync before it
    kComplete,  ///< and this pass will add nothing to it
  };
  struct Item {
    ReducedParameter parameter;
    std::size_t bucket = 0;
    std::size_t place = 0;  ///< of its bucket's, which say how it lay in memory when it was sharded
    Accumulator accumulator;
    std::uintptr_t hook = 0;
    at::Tensor kept;      ///< the parameter's gradient before this pass
    at::Tensor stand_in;  ///< of its gradient, which parts have instead; defined once they have had one
    Before before = Before::kNotSeen;
    Sum sum = Sum::kNone;
  };

  struct Part : KeptPart {
    explicit Part(KeptPart part) : KeptPart(std::move(part)) {}
    at::Tensor stand_in;    ///< of its gradient, while that has only been added up
    bool has_sums = false;  ///< since the last pass: it had a gradient or a stand-in, and was added to
  };

  /// The parameters have no gradients of their own.
  bool has_parts() const { return reef::has_parts(options_); }
  bool sharded() const { return options_.stage != Stage::kReplicate; }
  bool divides_gradients() const { return options_.stage >= Stage::kGradients; }
  void keep(std::size_t item);
  void see(Item& item);
  at::Tensor stand_in_of(Item& item) const;
  void give_stand_in(Item& item, bool added) const;
  void clear_parts();
  void watch_parts();
  void see_sums();
  void see_parts();
  void forget_sums();
  void ready(std::size_t item);
  void graph_begins();
  void begin_pass();
  void begin_gradients();
  void take_flats_back();
  void free_flats();
  void lend_flats();
  void take(Item& item);
  const at::Tensor& like(const FlatBucket& bucket) const;
  at::Tensor place_of(const Item& item);
  void leave_out(Item& item);
  void send_whole_buckets();
  void send(std::size_t bucket);
  void finish();
  void finish_locally();
  void abandon(const std::string& thrown) noexcept;
  at::Tensor largest(const at::Tensor& own, const at::Tensor& last = {});
  void await(CommLane& lane, std::uint64_t ticket);
  void give_up() noexcept;
  /// What the ranks tell each other at the end of a pass.
  struct Heard {
    std::vector<bool> used;  ///< for each item, whether a rank has a gradient of it
    bool abandoned;          ///< by some rank
    bool has_batch;          ///< some rank
    bool nonfinite;          ///< something that some rank has sent or received
  };
  Heard hear_of(bool abandons, bool has_batch);
  bool reduce(bool has_batch);
  std::vector<NonFiniteElements> who_is_not_finite();
  void forget_gathers();
  void note_pass();
  int who_abandons(bool abandons);
  void send_the_rest();
  std::size_t gradients_in(std::size_t bucket) const;
  void keep_sums();
  [[noreturn]] void leave_pass(int by_rank, const std::exception_ptr& wrong);
  void end_step(bool used = true);
  void give_gradients(const std::vector<bool>& used, bool is_void);
  void check_momentum() const;
  void end_pass() noexcept;

  std::shared_ptr<Reducer*> self_ = std::make_shared<Reducer*>(this);  ///< for hooks, which may outlive it
  OutermostGraphWatch watch_;
  ProcessGroupPtr group_;
  std::string shard_name_;
  ShardLayout layout_;
  ShardOptions options_;
  std::vector<Item> items_;
  std::vector<FlatBucket> buckets_;
  std::vector<std::size_t> incomplete_;  ///< of each bucket, so many items
  std::vector<Part> parts_;
  std::function<void()> reducing_ = [] {};
  std::function<void(bool)> reduced_ = [](bool) {};
  std::function<void()> giving_ = [] {};
  std::shared_ptr<GivenMomentum> momentum_;
  Gathers gathers_;
  std::mutex mutex_;
  std::int64_t step_ = 0;
  bool syncing_ = true;
  bool local_ = false;
  bool when_asked_ = false;  ///< see reduce_when_asked()
  enum class During : std::uint8_t {
    kNoPass,
    kPass,
    kGradients,  ///< and it has looked at what has become of gradients since the last
  };
  During during_ = During::kNoPass;
  bool lost_sums_ = false;   ///< of passes in no_sync; this rank abandons the next pass that is reduced
  std::string why_;          ///< this rank has abandoned a pass last
  std::uint8_t clears_ = 0;  ///< a sum over the parts whose gradients were cleared after passes in no_sync
  bool lent_ = false;        ///< gradients of parts
  std::optional<NonFiniteSearch> search_;  ///< with a compression
  std::vector<NonFiniteElements> nonfinite_;
  std::size_t next_bucket_ = 0;  ///< the first that has not been sent
  struct Line {
    std::unique_ptr<GradientExchange> exchange;
    std::unique_ptr<CommLane> lane;
  };
  Line make_line(int exchange, c10::Device device) const;
  /// Of which buckets take turns, where they may: while the one waits for the other ranks, the other one's
  /// sums are made.
  Line& line_of(std::size_t bucket);
  std::array<Line, 2> lines_;  ///< the last: their work uses the others
};

}  // namespace reef
