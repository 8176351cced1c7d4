#pragma once

#include <cstdint>
#include <initializer_list>
#include <string>
#include <utility>
#include <vector>

#include "reef/export.h"

namespace reef {

/// What gradients are made smaller by, to travel. Each but kNone gives up the bits of one process; ranks stay
/// alike, bit for bit. docs/compress.md has their bytes, classes and uses.
enum class Compression : std::uint8_t {
  kNone,
  /// What shard() finds to be the fastest of the others here: it measures and prices them (price_exchange.h).
  kAuto,
  /// They travel as bfloat16. What rounding takes from a gradient is held back on its rank and added to the
  /// next one (error feedback), so that nothing is lost.
  kBFloat16,
  /// As float16, which is finer, and has no numbers from 65520 on: those arrive as infinities.
  kFloat16,
  /// Levels of 2 to 8 bits, chosen by chance so that the mean is right (QSGD, 1610.02132): unbiased, so
  /// nothing is held back.
  kQsgd,
  /// Signs, with the mean magnitude of each 512 elements; the rest is held back (signSGD with error feedback,
  /// 1901.09847).
  kSign,
  /// Factors of a low rank in place of matrices (PowerSGD, 1905.13727); the rest is held back, vectors go as
  /// they are.
  kPowerSgd,
  /// The left and the right factor in turn, one in a step: half the bytes (GradZip, Cho et al. 2019).
  kPowerSgdAlternating,
  /// Of each bucket a rank sends its largest elements to all others, and holds back the rest (Aji and
  /// Heafield 2017; Stich 2018).
  kTopK,
  /// The largest sums of all ranks' largest elements, merged between pairs of ranks (gTop-k, 1901.04359, with
  /// a butterfly in place of its tree): what a merge drops is held back on exactly one rank.
  kGTopK,
  /// gTop-k as it was published: merged up a tree and broadcast. It LOSES what a merge drops of an element
  /// that other ranks keep; it is here to be compared with.
  kGTopKTree,
  /// The largest sums of all ranks' largest elements, as kGTopK, but exactly those: each rank adds up a
  /// region of the elements (Ok-Topk, 2201.07598).
  kOkTopK,
  /// kTopK with a momentum of its own, which each rank adds up before it chooses (Deep Gradient Compression,
  /// 1712.01887): the optimizer is to have none.
  kDgc,
  /// The mean for `warmup_steps`, and from then on each rank's momentum as signs, with the mean magnitude of
  /// each 512 elements: `.grad` becomes the momentum, which optim::OneBitAdam steps by (1-bit Adam,
  /// 2102.02888).
  kOneBitAdam,
};

/// A number that may change with the steps, or none.
class REEF_API StepSchedule {
 public:
  /// From this step on (the first is 0), this value.
  using Entry = std::pair<std::int64_t, double>;
  StepSchedule() = default;
  StepSchedule(double value)
      : StepSchedule({{0, value}}) {}  // NOLINT(google-explicit-constructor): {.density = 0.01}
  StepSchedule(std::initializer_list<Entry> entries) : StepSchedule(std::vector<Entry>(entries)) {}
  /// Throws ConfigError unless the first is of step 0, and steps increase.
  explicit StepSchedule(std::vector<Entry> entries);

  bool has_value() const { return !entries_.empty(); }
  /// In a step: of the last entry that has begun; `otherwise`, if it has no value.
  double at(std::int64_t step, double otherwise) const;
  const std::vector<Entry>& entries() const { return entries_; }

 private:
  std::vector<Entry> entries_;
};

/// What a method may be told. What it does not take is refused; what is left out is the method's default.
struct CompressionOptions {
  /// kTopK, kGTopK, kGTopKTree, kOkTopK, kDgc: of a bucket's elements, which share a rank sends, rounded up
  /// to whole elements. More than 0, at most 1; by default 0.001. Small ones need a warm-up: `{{0, 0.25},
  /// {100, 0.0625}, {200, 0.001}}`.
  StepSchedule density = {};
  /// kQsgd: of an element; from 2 to 8, by default 8.
  StepSchedule bits = {};
  /// kPowerSgd, kPowerSgdAlternating: of the factors, which for a matrix is at most its rows and its columns;
  /// from 1 to 65536, by default 4.
  StepSchedule rank = {};
  /// kQsgd, kPowerSgd, kPowerSgdAlternating: what chooses the random numbers, the same on all ranks; one
  /// whole number from 0 to 2^53, by default 0.
  StepSchedule seed = {};
  /// kDgc: what is left of a rank's momentum in each step. From 0 to less than 1, by default 0.9.
  StepSchedule momentum = {};
  /// kDgc: what a rank gives to a bucket's sum or mean is scaled to a norm of max_norm / sqrt(P) at most,
  /// where P ranks (or copies) do. Above 0; by default nothing is scaled.
  StepSchedule max_norm = {};
  /// kOneBitAdam, which needs it: steps that ranks use before they exchange momentum; one whole number from 1
  /// on. 15 to 20 percent of all steps in the paper.
  StepSchedule warmup_steps = {};
  /// kOneBitAdam: of the momentum, and the optimizer's; one number from 0 to below 1, by default 0.9.
  StepSchedule beta1 = {};
};

/// Whether it makes gradients on devices smaller, and not only those on the CPU.
REEF_API bool compresses_on_devices(Compression compression);
/// Whether it adds up a momentum, which an optimizer above it would add up once more.
REEF_API bool has_momentum(Compression compression);

/// "gtopk"; and the one of this name. Throws ConfigError that lists the names.
REEF_API const char* name_of(Compression compression);
REEF_API Compression compression_named(const std::string& name);

/// Throws ConfigError for an option that the method does not take, or a value that it cannot have.
REEF_API void check_compression(Compression compression, const CompressionOptions& options);
/// Of these, those that the method takes.
REEF_API CompressionOptions options_taken(Compression compression, const CompressionOptions& options);
/// "gtopk with density 0.25, from step 100 on 0.001": alike for what is alike.
REEF_API std::string compression_text(Compression compression, const CompressionOptions& options);
/// By name, for other languages. Throws ConfigError for a name that no option has.
REEF_API void set_compression_option(CompressionOptions& options, const std::string& name,
                                     StepSchedule value);

}  // namespace reef
