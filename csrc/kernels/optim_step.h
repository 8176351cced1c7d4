#pragma once

#include <cstddef>
#include <cstdint>
#include <optional>
#include <string>
#include <string_view>
#include <vector>

#include "kernels/lane.h"

/// The fused step of an optimizer over raw memory: read a gradient, decode the states in registers, update,
/// encode, write. No Torch. A ladder as count_nonfinite's: the reference is plainly right, and every rung
/// gives the same bits: lanes are as wide as the processor has them, roundings are fixed by rules.h.
namespace reef::kernels {

enum class OptimRule : std::uint8_t {
  kAdam,                     ///< states: first moment, second moment
  kAdamMaximum,              ///< and the second moment's maximum
  kSgd,                      ///< none
  kMomentum,                 ///< momentum
  kLion,                     ///< momentum
  kRmsprop,                  ///< mean square
  kRmspropMomentum,          ///< and the momentum
  kRmspropCentered,          ///< mean square, mean
  kRmspropCenteredMomentum,  ///< and the momentum
  kAdagrad,                  ///< sum of squares
  kLamb,                     ///< first moment, second moment
  kLars,                     ///< momentum
};
inline constexpr int kOptimRules = 12;
inline constexpr int kMostStates = 3;

/// How a state is kept.
enum class OptimFormat : std::uint8_t {
  kFloat32,          ///< 4 bytes
  kBFloat16,         ///< 2 bytes, rounded stochastically
  kInt8,             ///< 1 byte on a dynamic map, and a float32 for each 256
  kInt4,             ///< half a byte, and a float32 for each 128
  kCompanded8,       ///< 1 byte companded, and a bfloat16 for each 32
  kInt8Compensated,  ///< as the formats of their names, and 4 bits of what rounding to the code lost
  kInt4Compensated,
  kCompanded8Compensated,
  kInt4Rank1,  ///< as kInt4, but unsigned states of matrices have a float32 for each row and each column
};
inline constexpr int kOptimFormats = 9;
/// The format without what is kept of its rounding.
constexpr OptimFormat uncompensated(OptimFormat format) {
  switch (format) {
    case OptimFormat::kInt8Compensated:
      return OptimFormat::kInt8;
    case OptimFormat::kInt4Compensated:
      return OptimFormat::kInt4;
    case OptimFormat::kCompanded8Compensated:
      return OptimFormat::kCompanded8;
    default:
      return format;
  }
}

/// What a rule computes with, in the precision it does: prepared for each tensor in double.
struct OptimConstants {
  float coupled_decay = 0;    ///< times the parameter is added to the gradient
  float decoupled_decay = 0;  ///< times the parameter is added to the update
  float kept = 1;             ///< of the parameter, before the update
  float decay1 = 0;           ///< of the first state
  float gain1 = 0;            ///< of the gradient in it
  float decay2 = 0;           ///< of the second state
  float gain2 = 0;
  float correction1 = 1;  ///< divides the first state
  float correction = 1;   ///< divides the second state's root
  float eps = 0;
  float gradient = 1;  ///< times the gradient is what the step sees: -1 maximizes
  float rate = 0;      ///< minus the learning rate, with what else multiplies it
  float trust = 1;     ///< LAMB, LARS: from the norms
  bool first = false;
  bool nesterov = false;
};

/// Elements are worked on by tiles of so many, counted from the tensor's first: block boundaries depend on
/// nothing else.
inline constexpr std::int64_t kTileElements = 256;
REEF_LANE constexpr std::int64_t tiles_of(std::int64_t elements) {
  return (elements + kTileElements - 1) / kTileElements;
}

/// A tensor as rows of elements that lie together, one row for each place in its outermost dimension.
struct OptimMatrix {
  std::int64_t rows = 0;
  std::int64_t columns = 0;
};
/// Whether a state of kInt4Rank1 has scales of rows and columns: where they need at most a bit an element.
constexpr bool has_rank1_scales(const OptimMatrix& matrix) {
  return matrix.rows + matrix.columns <= matrix.rows * matrix.columns / 32;
}

/// Codes and, for the formats that have them, scales. Sizes: optim_codes_bytes(), optim_scales_bytes(). A
/// tile's codes lie together; after them, compensated, what their rounding lost: two elements a byte, number
/// i of the tile and number i + 128.
struct OptimState {
  std::byte* codes = nullptr;
  std::byte* scales = nullptr;
  /// Unsigned, in kInt4Rank1: scales of rows, then of columns; and those of the new values, which survey()
  /// finds.
  OptimMatrix matrix = {};
  float* new_scales = nullptr;
  std::int64_t first = 0;  ///< which element of the whole tile 0 begins with
};

enum class OptimDtype : std::uint8_t { kFloat32, kBFloat16, kFloat16 };

/// How a 16-bit parameter keeps what its rounding loses.
enum class OptimMaster : std::uint8_t {
  kNone,        ///< not at all: rounded to the nearest
  kFloat32,     ///< a float32 copy, of which the parameter is the rounding
  kSplit,       ///< a byte: the loss in 1/127 of half a unit in the last place (2602.23349, section 3.1)
  kStochastic,  ///< rounded up or down by chance, so that the mean is right
};

struct OptimTensor {
  std::byte* parameter = nullptr;
  const std::byte* gradient = nullptr;
  std::int64_t elements = 0;
  OptimDtype parameter_dtype = OptimDtype::kFloat32;
  OptimDtype gradient_dtype = OptimDtype::kFloat32;
  OptimState states[kMostStates];
  OptimMaster master_kind = OptimMaster::kNone;
  std::byte* master = nullptr;  ///< kFloat32: 4 bytes an element, kSplit: 1
  std::uint32_t key = 0;        ///< of what is rounded by chance: another in every step
  OptimConstants constants;
};

/// Bytes of a state of `elements`. Those of kInt4Rank1 are of a matrix.
std::int64_t optim_codes_bytes(OptimFormat format, std::int64_t elements);
std::int64_t optim_scales_bytes(OptimFormat format, std::int64_t elements, const OptimMatrix& matrix = {});

/// Bytes of an element; of a master, 0 if there is no tensor for it.
std::int64_t optim_dtype_bytes(OptimDtype dtype);
std::int64_t optim_master_bytes(OptimMaster master);

/// Tiles [first, last) of a tensor. A tile whose gradient is not finite throughout is left as it is. Gives
/// the number of such elements.
using OptimKernel = std::int64_t (*)(const OptimTensor& tensor, std::int64_t first, std::int64_t last);

/// Sums of squares over tiles [first, last), of which a trust ratio is made: of the parameters, and of what
/// the rule measures them against (LAMB: the update, LARS: the gradient).
struct OptimSquares {
  double parameter = 0;
  double measured = 0;
};
using OptimMeasure = OptimSquares (*)(const OptimTensor& tensor, std::int64_t first, std::int64_t last);

/// Instruction sets that this build has and this processor runs, best first.
enum class OptimLevel : std::uint8_t { kAvx512, kAvx2, kPortable };
inline constexpr int kOptimLevels = 3;
bool has_level(OptimLevel level);

/// By what users call them: "avx512", "avx2", "portable".
std::string_view level_name(OptimLevel level);
/// Those that there are, best first. There is always the last one.
std::vector<OptimLevel> levels();
/// Nothing if no level is called so, or if there is none of that name here.
std::optional<OptimLevel> level_by_name(std::string_view name);

/// Values to a state and back, tiles [first, last) of so many elements: what has been saved by others, and is
/// to be read by them. Values must not be NaN.
using OptimEncode = void (*)(const float* values, const OptimState& state, std::int64_t elements,
                             std::int64_t first, std::int64_t last);
using OptimDecode = void (*)(const OptimState& state, float* values, std::int64_t elements,
                             std::int64_t first, std::int64_t last);

/// kInt4Rank1 needs all of a tensor's new values before it can encode one: `survey` raises the new scales,
/// zero before, to what these tiles need. If none of the tensor's tiles was found not to be finite, `step`
/// may follow; then the new scales are the scales. Rules without an unsigned state, and signed states, have
/// no kernels of it: theirs are kInt4's.
struct OptimKernels {
  OptimKernel step[kOptimRules][kOptimFormats];
  OptimMeasure measure[kOptimRules][kOptimFormats];  ///< nullptr: the rule needs no trust ratio
  OptimEncode encode[kOptimFormats][2];              ///< [1]: signed
  OptimDecode decode[kOptimFormats][2];
  OptimKernel survey[kOptimRules];
  OptimEncode survey_values;  ///< before `encode`
};
/// nullptr if the level is not to be had.
const OptimKernels* optim_kernels(OptimLevel level);

}  // namespace reef::kernels
