#include "kernels/optim_step.h"

namespace reef::kernels {

std::int64_t optim_codes_bytes(OptimFormat format, std::int64_t elements) {
  switch (format) {
    case OptimFormat::kFloat32:
      return 4 * elements;
    case OptimFormat::kBFloat16:
      return 2 * elements;
    case OptimFormat::kInt4: {
      const std::int64_t tail = elements % kTileElements;
      return elements / kTileElements * (kTileElements / 2) +
             (tail < kTileElements / 2 ? tail : kTileElements / 2);
    }
    case OptimFormat::kInt8:
    case OptimFormat::kCompanded8:
      break;
  }
  return elements;
}

std::int64_t optim_scales_bytes(OptimFormat format, std::int64_t elements) {
  const auto blocks = [&](std::int64_t of) { return (elements + of - 1) / of; };
  switch (format) {
    case OptimFormat::kInt8:
      return 4 * blocks(kTileElements);
    case OptimFormat::kInt4:
      return 4 * blocks(kTileElements / 2);
    case OptimFormat::kCompanded8:
      return 2 * blocks(32);
    case OptimFormat::kFloat32:
    case OptimFormat::kBFloat16:
      break;
  }
  return 0;
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
