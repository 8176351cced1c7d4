#include "ledger/cuda.h"

namespace reef {

void install_cuda_tracker() {}

}  // namespace reef
