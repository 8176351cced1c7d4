#pragma once

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <functional>
#include <memory>
#include <string>
#include <vector>

#include "distributed/comm_lane.h"
#include "page/pinned.h"
#include "reef/shard_layout.h"
#include "shard/flat.h"
#include "shard/gradient_exchange.h"
#include "shard/state_over_ranks.h"

namespace reef {

/// Of a tensor's values.
std::uint64_t digest_of(const at::Tensor& tensor);

/// What an outer step does with the mean over the ranks: see LocalUpdates.
struct OuterRule {
  bool is_mean = false;  ///< parameters travel, and become their mean
  double lr = 1;
  double momentum = 0;
  bool nesterov = false;
};

/// Some of this rank's parameters, which the ranks of a group exchange together, once a round, and step
/// together. All calls on the program's thread; what runs beside it is the exchange, from begin() to apply().
class OuterPart {
 public:
  struct Parameter {
    std::string name;
    at::Tensor own;
  };
  /// `number`: of an exchange of this part's own (GroupTags). Of `exchange`, what make_gradient_exchange()
  /// and plan_shards() are to know; values travel by way of `device`.
  OuterPart(std::vector<Parameter> parameters, const ProcessGroupPtr& group, int number,
            const ShardOptions& exchange, const OuterRule& rule, c10::Device device);

  /// Rank 0's parameters are all ranks', and a round begins. All ranks alike.
  void start();
  /// Submits what travels, in a round whose error texts say `step`.
  void begin(CommLane& lane, std::int64_t step);
  bool under_way() const { return !travelling_.empty(); }
  /// Until what travels has come. Throws what the lane has thrown.
  void wait(CommLane& lane) const { lane.wait(ticket_); }
  /// After wait(): takes the outer step. The rank keeps `mixing` times its own parameters.
  void apply(double mixing);
  /// After wait(): forgets what has come.
  void drop() { travelling_.clear(); }

  std::int64_t sent_bytes() const { return exchange_->ranks().sent_bytes(); }

  /// What is to be kept, by the names of parameters, and of buckets and the exchange under names that begin
  /// with `prefix`. Nothing may be running on the lane.
  NamedState state(const std::string& prefix) const;
  /// Of what state() gave: checks and copies it. What is returned takes it over, and throws nothing. Throws
  /// ConfigError for what is missing or has another dtype or shape.
  std::function<void()> prepared(const NamedState& state, const std::string& prefix);
  /// Of what state() gave, that all ranks have alike at one step of one run; 0 if there is nothing.
  static std::uint64_t digest(const NamedState& state);

 private:
  void each(std::size_t bucket, const at::Tensor& flat,
            const std::function<void(std::size_t item, const at::Tensor& place)>& visit) const;
  at::Tensor flat_memory(std::size_t bucket) const;

  std::vector<Parameter> parameters_;
  OuterRule rule_;
  c10::Device device_;
  ProcessGroupPtr group_;
  ShardLayout layout_;
  std::vector<std::vector<FlatPlace>> places_;  ///< of each bucket
  std::unique_ptr<GradientExchange> exchange_;
  std::vector<at::Tensor> start_;                    ///< of each parameter; none for the mean
  std::vector<at::Tensor> momentum_;                 ///< of each; undefined at first
  std::vector<std::shared_ptr<Pinned>> travelling_;  ///< of each bucket, or none
  std::uint64_t ticket_ = 0;
};

}  // namespace reef
