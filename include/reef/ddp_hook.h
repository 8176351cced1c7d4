#pragma once

#include <ATen/core/Tensor.h>
#include <c10/util/ArrayRef.h>

#include <cstdint>
#include <memory>
#include <optional>
#include <vector>

#include "reef/shard.h"

namespace reef {

struct DdpHookOptions {
  /// Gradients travel in flat memory of so many bytes (one parameter more, if that is larger), whatever
  /// buckets they come in.
  std::int64_t bucket_bytes = std::int64_t{25} << 20;
  /// See ShardOptions. kAuto is measured and chosen when the hook is made.
  Compression compression = Compression::kNone;
  CompressionOptions compression_options = {};
  std::vector<ExchangeClass> allow = {};
};

/// What a communication hook of torch's DistributedDataParallel does: gradients come in torch's buckets and
/// become the mean over the ranks, by the exchange that shard() has at Stage::kReplicate, with the same
/// result, bit for bit. That wrapper is Python's alone (reef.ddp_hook); a C++ program takes shard().
///
/// Gradients are known by their parameter, and travel in buckets of the hook's own, laid out once as shard()
/// lays them out. So nothing that is held back is lost or mixed up when torch rebuilds its buckets, and no
/// step, the first neither, goes without compression.
///
/// When an exchange has thrown, every further one throws the same, and other ranks, which cannot go on
/// without this one, are told (RanksOutOfStep, in groups whose ranks give signs of life). Calls come from one
/// thread at a time.
class REEF_API DdpHook {
 public:
  /// `parameters`: leaves on the CPU, all those whose gradients come in a pass, in the module's order. The
  /// group must outlive this. All ranks alike. Throws ConfigError on every rank if ranks were given different
  /// parameters or options (with the first difference), for options that a method does not take, and for
  /// parameters that are on a device, sparse, of Half with a compression, or another's; and RankFailed.
  DdpHook(const Shard::Named& parameters, const ProcessGroupPtr& group, const DdpHookOptions& options = {});
  /// Waits for an exchange that is running.
  ~DdpHook();
  DdpHook(const DdpHook&) = delete;
  DdpHook& operator=(const DdpHook&) = delete;

  /// `buffer`, in one dimension: the gradients of `parameters`, each in the order of its memory, one after
  /// another. Returns at once, and nobody else touches `buffer` until the pass is whole, which it is with the
  /// gradient of the last parameter: that call returns when the mean over the ranks is in all buffers of the
  /// pass. `is_last` says that no other gradient comes. All ranks give the same parameters in the same order.
  /// Throws ConfigError for parameters that this was not given, that come twice or are missing, and for
  /// another dtype; RankFailed and RanksOutOfStep.
  void exchange(const at::Tensor& buffer, c10::ArrayRef<at::Tensor> parameters, bool is_last);
  /// Ends a pass that is whole; else nothing happens. `used`: how many ranks have used each parameter in it,
  /// in the module's order, the same on all; nothing: all have been used. Of one that none has, whose result
  /// nobody sees, what is held back is what it was before. Throws ConfigError for another number of
  /// parameters.
  void end_pass(const std::optional<at::Tensor>& used = std::nullopt);

  /// Whose gradients were not finite in the last pass that is whole: see Shard::nonfinite_gradients(). What
  /// is held back is what it was before once that pass has ended. Throws ConfigError without a compression.
  const std::vector<NonFiniteElements>& nonfinite_gradients() const;

  /// What is held back, between passes: of this rank, in its memory; of all ranks, on every rank or rank 0
  /// alone; and in place of it, of any number of states, which say it of all ranks of a run, however many
  /// those were. A rank that gives none gets what rank 0 gives. Where exchanges have failed, it is that of
  /// the step before. The last two are called by all ranks alike. They throw ConfigError, on all ranks, for a
  /// state of another method, of other parameters or not of all ranks, and then nothing has changed; in the
  /// middle of a pass; and RankFailed.
  OptimizerState::Communication state() const;
  OptimizerState::Communication full_state(bool rank0_only = false) const;
  void load_state(const std::vector<OptimizerState::Communication>& given);

  /// How gradients travel: what was given, or what kAuto has chosen, and by which prices.
  Compression compression() const;
  const std::optional<ExchangePrices>& compression_prices() const;
  /// Bytes that this rank has sent for gradients.
  std::int64_t sent_bytes() const;

 private:
  struct Parts;
  std::unique_ptr<Parts> parts_;
};

}  // namespace reef
