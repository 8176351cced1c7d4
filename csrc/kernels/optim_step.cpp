#include "kernels/optim_step.h"

#include <algorithm>

namespace reef::kernels {

namespace {

// Two elements a byte: number i of a tile and number i + 128.
std::int64_t paired_bytes(std::int64_t elements) {
  const std::int64_t tail = elements % kTileElements;
  return elements / kTileElements * (kTileElements / 2) + std::min(tail, kTileElements / 2);
}

}  // namespace

std::string_view level_name(OptimLevel level) {
  switch (level) {
    case OptimLevel::kAvx512:
      return "avx512";
    case OptimLevel::kAvx2:
      return "avx2";
    case OptimLevel::kPortable:
      break;
  }
  return "portable";
}

std::vector<OptimLevel> levels() {
  std::vector<OptimLevel> found;
  for (const OptimLevel level : {OptimLevel::kAvx512, OptimLevel::kAvx2, OptimLevel::kPortable}) {
    if (has_level(level)) found.push_back(level);
  }
  return found;
}

std::optional<OptimLevel> level_by_name(std::string_view name) {
  for (const OptimLevel level : levels()) {
    if (level_name(level) == name) return level;
  }
  return std::nullopt;
}

std::int64_t optim_codes_bytes(OptimFormat format, std::int64_t elements) {
  const OptimFormat plain = uncompensated(format);
  if (plain != format) return optim_codes_bytes(plain, elements) + paired_bytes(elements);
  switch (format) {
    case OptimFormat::kFloat32:
      return 4 * elements;
    case OptimFormat::kBFloat16:
      return 2 * elements;
    case OptimFormat::kInt4:
    case OptimFormat::kInt4Rank1:
      return paired_bytes(elements);
    default:
      return elements;
  }
}

std::int64_t optim_scales_bytes(OptimFormat format, std::int64_t elements, const OptimMatrix& matrix) {
  const auto blocks = [&](std::int64_t of) { return (elements + of - 1) / of; };
  switch (uncompensated(format)) {
    case OptimFormat::kInt8:
      return 4 * blocks(kTileElements);
    case OptimFormat::kInt4:
      return 4 * blocks(kTileElements / 2);
    case OptimFormat::kCompanded8:
      return 2 * blocks(32);
    case OptimFormat::kInt4Rank1:
      return 4 * (matrix.rows + matrix.columns);
    default:
      return 0;
  }
}

std::int64_t optim_dtype_bytes(OptimDtype dtype) { return dtype == OptimDtype::kFloat32 ? 4 : 2; }

std::int64_t optim_master_bytes(OptimMaster master) {
  switch (master) {
    case OptimMaster::kFloat32:
      return 4;
    case OptimMaster::kSplit:
      return 1;
    case OptimMaster::kNone:
    case OptimMaster::kStochastic:
      break;
  }
  return 0;
}

}  // namespace reef::kernels
