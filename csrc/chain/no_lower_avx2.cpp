#include "chain/lower.h"

namespace reef {

Lower lower_with_avx2() { return nullptr; }

}  // namespace reef
