#pragma once

#include <ATen/core/Tensor.h>

#include <array>
#include <cstdint>
#include <exception>
#include <memory>
#include <optional>
#include <string>
#include <unordered_map>
#include <vector>

#include "distributed/comm_lane.h"
#include "page/pinned.h"
#include "reef/ddp_hook.h"
#include "shard/agreement.h"
#include "shard/gradient_exchange.h"
#include "shard/nonfinite_gradients.h"
#include "shard/shard_parts.h"

namespace reef {

/// What DdpHook is: the exchanges, and what has come of a pass.
struct DdpHook::Parts final : ExchangedParameters {
  Parts(const Shard::Named& parameters, const ProcessGroupPtr& group, const DdpHookOptions& given);
  ~Parts() override;

  GradientExchange& exchange_of(std::size_t bucket) override { return *line_of(bucket).exchange; }
  const FlatPlace& flat_place_of(std::size_t item) const override {
    return places[items[item].bucket][items[item].place];
  }
  at::ScalarType dtype_of_sums(std::size_t item) const override {
    return divided.parameters[item].tensor.scalar_type();
  }

  void take(const at::Tensor& buffer, c10::ArrayRef<at::Tensor> given, bool is_last);
  void begin_pass();
  void put(const at::Tensor& buffer, c10::ArrayRef<at::Tensor> given);
  void run(std::size_t bucket);
  void finish();
  void look_for_nonfinite();
  void end_pass(const std::optional<at::Tensor>& used);
  void end_step(bool used);
  void rest();
  [[noreturn]] void refuse(const std::string& what) const;

  /// A parameter, and its gradient in this pass.
  struct Item {
    std::size_t bucket = 0;
    std::size_t place = 0;  ///< of its bucket's
    bool has_come = false;
    bool is_seen = false;  ///< the parameter's gradient lies in torch's bucket, and so the result
    at::Tensor values;     ///< there, in one dimension, while it is exchanged
  };
  enum class During : std::uint8_t {
    kNoPass,
    kPass,    ///< gradients come
    kWhole,   ///< all have come, and are the mean; the pass is to be ended
    kFailed,  ///< by `error`, for good
  };
  struct Line {
    std::unique_ptr<GradientExchange> exchange;
    std::unique_ptr<CommLane> lane;
  };
  Line& line_of(std::size_t bucket) {
    return lines[lines[0].exchange->in_any_order(c10::kCPU) ? bucket % lines.size() : 0];
  }

  ShardOptions options;
  GroupTags exchanges;
  std::string name;  ///< in errors
  ClaimedParameters claimed;
  std::optional<ExchangePrices> prices;
  DividedParameters divided;
  std::vector<std::vector<FlatPlace>> places;  ///< of each bucket
  std::unordered_map<const c10::TensorImpl*, std::size_t> item_of;

  During during = During::kNoPass;
  std::exception_ptr error;
  std::int64_t step = 0;
  std::vector<Item> items;
  std::vector<std::unique_ptr<Pinned>> buffers;  ///< torch's, while they are exchanged
  std::vector<std::size_t> to_come;              ///< of each bucket, so many
  std::size_t next_bucket = 0;                   ///< the first that has not been sent
  std::size_t come = 0;                          ///< gradients
  std::optional<NonFiniteSearch> search;         ///< with a compression
  std::vector<NonFiniteElements> nonfinite;
  bool is_void = false;  ///< the pass, since something was not finite

  std::array<Line, 2> lines;  ///< the last: their work uses the others
};

}  // namespace reef
