#include "ledger/vector_math.h"

#include <ATen/ops/ones.h>
#include <ATen/ops/sqrt.h>
#include <c10/core/InferenceMode.h>

namespace reef {

void settle_vector_math() {
  static const bool settled = [] {
    const c10::InferenceMode plain;
    constexpr std::int64_t kTooFewForTwoThreads = 16;
    at::sqrt(at::ones({kTooFewForTwoThreads}));
    return true;
  }();
  (void)settled;
}

}  // namespace reef
