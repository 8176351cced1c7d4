#include "kernels/packed_levels/one_block.h"

namespace reef::kernels {

const PackedBlocks* packed_blocks_with_avx2() { return __builtin_cpu_supports("avx2") ? &kBlocks : nullptr; }

}  // namespace reef::kernels
