#include "kernels/packed_levels/blocks.h"

namespace reef::kernels {

const PackedBlocks* packed_blocks_with_avx2() { return nullptr; }

}  // namespace reef::kernels
