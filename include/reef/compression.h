#pragma once

#include <cstdint>
#include <initializer_list>
#include <string>
#include <utility>
#include <vector>

#include "reef/export.h"

namespace reef {

/// How gradients travel between ranks. All methods but kNone give results that differ from those of one
/// process, but the ranks stay equal to each other, bit for bit. docs/compress.md has the bytes, the class
/// and the use of each.
enum class Compression : std::uint8_t {
  /// Sends gradients as they are.
  kNone,
  /// Takes the fastest of the other methods: shard() measures the link and prices them (price_exchange.h).
  kAuto,
  /// Rounds to bfloat16. A rank keeps what rounding takes away and adds it to its next gradient (error
  /// feedback), so nothing is lost.
  kBFloat16,
  /// Rounds to float16, which is finer. Values from 65520 on arrive as infinities.
  kFloat16,
  /// Rounds to levels of 2 to 8 bits at random, such that the mean is right (QSGD, 1610.02132). It is
  /// unbiased, so nothing is held back.
  kQsgd,
  /// Sends signs and the mean magnitude of every 512 elements, and holds back the rest (signSGD with error
  /// feedback, 1901.09847).
  kSign,
  /// Sends two factors of low rank in place of each matrix and holds back the rest (PowerSGD, 1905.13727).
  /// Vectors are sent as they are.
  kPowerSgd,
  /// Sends only one of the two factors in each step, left and right alternating, for half the bytes (GradZip,
  /// Cho et al. 2019).
  kPowerSgdAlternating,
  /// Sends the largest elements of each bucket to all other ranks and holds back the rest (Aji and Heafield
  /// 2017; Stich 2018).
  kTopK,
  /// Keeps the largest sums of all ranks' largest elements, which pairs of ranks merge (gTop-k, 1901.04359,
  /// with a butterfly in place of its tree). Exactly one rank holds back what a merge drops.
  kGTopK,
  /// Merges up a tree and broadcasts, as gTop-k was published. It LOSES what a merge drops of an element that
  /// other ranks keep, and is here for comparison.
  kGTopKTree,
  /// Keeps exactly the largest sums of all ranks' largest elements: each rank adds up one region of the
  /// elements (Ok-Topk, 2201.07598).
  kOkTopK,
  /// Sends the largest elements of a momentum that each rank accumulates before it selects (Deep Gradient
  /// Compression, 1712.01887). Use an optimizer without momentum.
  kDgc,
  /// Sends the mean for `warmup_steps`, then signs of each rank's momentum with the mean magnitude of every
  /// 512 elements. `.grad` is then a momentum, for optim::OneBitAdam alone (1-bit Adam, 2102.02888).
  kOneBitAdam,
};

/// The value of an option, which may change with the steps; or no value.
class REEF_API StepSchedule {
 public:
  /// The step from which on the value holds (the first step is 0), and the value.
  using Entry = std::pair<std::int64_t, double>;
  StepSchedule() = default;
  StepSchedule(double value)
      : StepSchedule({{0, value}}) {}  // NOLINT(google-explicit-constructor): {.density = 0.01}
  StepSchedule(std::initializer_list<Entry> entries) : StepSchedule(std::vector<Entry>(entries)) {}
  /// Throws ConfigError unless the first entry is of step 0 and the steps increase.
  explicit StepSchedule(std::vector<Entry> entries);

  bool has_value() const { return !entries_.empty(); }
  /// Gives the value in a step, which is that of the last entry that has begun, or `otherwise` if there is no
  /// value.
  double at(std::int64_t step, double otherwise) const;
  const std::vector<Entry>& entries() const { return entries_; }

 private:
  std::vector<Entry> entries_;
};

/// Options of the methods. A method refuses those that it does not take and has defaults for the others.
struct CompressionOptions {
  /// kTopK, kGTopK, kGTopKTree, kOkTopK, kDgc: the share of a bucket's elements that a rank sends, rounded up
  /// to whole elements. More than 0 and at most 1; 0.001 by default. A small share needs a warm-up, as
  /// `{{0, 0.25}, {100, 0.0625}, {200, 0.001}}`.
  StepSchedule density = {};
  /// kQsgd: the bits of an element, from 2 to 8; 8 by default.
  StepSchedule bits = {};
  /// kQsgd: true, if levels are to travel in an entropy code (Huffman's), and not all in as many bits. The
  /// result is the same, bit for bit; how many bytes are sent depends on the gradients. false by default.
  StepSchedule entropy_coded = {};
  /// kPowerSgd, kPowerSgdAlternating: the rank of the factors, from 1 to 65536; 4 by default. For a matrix it
  /// is at most the number of its rows and of its columns.
  StepSchedule rank = {};
  /// kQsgd, kPowerSgd, kPowerSgdAlternating: the seed of the random numbers, the same on all ranks; one whole
  /// number from 0 to 2^53, 0 by default.
  StepSchedule seed = {};
  /// kDgc: the factor by which a rank's momentum decays in each step. From 0 to less than 1; 0.9 by default.
  StepSchedule momentum = {};
  /// kDgc: the largest norm of a bucket's gradient, times 1 / sqrt(P) for each of P ranks (or copies): a
  /// larger contribution to the sum or mean is scaled down to it. Above 0; by default nothing is scaled.
  StepSchedule max_norm = {};
  /// kOneBitAdam, which requires it: the number of steps before ranks exchange momentum; one whole number
  /// from 1 on. The paper takes 15 to 20 percent of all steps.
  StepSchedule warmup_steps = {};
  /// kOneBitAdam: beta1 of the momentum, which must be the optimizer's; one number from 0 to below 1, 0.9 by
  /// default.
  StepSchedule beta1 = {};
};

/// Tells whether the method compresses gradients on devices, some methods on CUDA alone, not only on the CPU.
REEF_API bool compresses_on_devices(Compression compression);
/// Tells whether the method accumulates a momentum, which an optimizer with momentum would do once more.
REEF_API bool has_momentum(Compression compression);

/// Gives the name of a method, as "gtopk".
REEF_API const char* name_of(Compression compression);
/// Gives the method of this name. Throws ConfigError, which lists the names, if there is none.
REEF_API Compression compression_named(const std::string& name);

/// Throws ConfigError for an option that the method does not take, or a value that it cannot have.
REEF_API void check_compression(Compression compression, const CompressionOptions& options);
/// Gives those of the options that the method takes.
REEF_API CompressionOptions options_taken(Compression compression, const CompressionOptions& options);
/// Formats a method and its options, as "gtopk with density 0.25, from step 100 on 0.001". Equal options have
/// equal texts, and only those.
REEF_API std::string compression_text(Compression compression, const CompressionOptions& options);
/// Sets the option of this name, for bindings. Throws ConfigError if there is none.
REEF_API void set_compression_option(CompressionOptions& options, const std::string& name,
                                     StepSchedule value);

}  // namespace reef
