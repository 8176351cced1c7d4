#include "optim/step.h"
#include "reef/error.h"

namespace reef::optim {
namespace {

[[noreturn]] void refuse(c10::Device device) {
  throw ConfigError("reef::optim: parameters are on " + device.str() +
                    " and this Reef was built without CUDA; build it with -DREEF_WITH_CUDA=ON");
}

}  // namespace

void step_on_cuda(c10::Device device, kernels::OptimRule, const OptimHyper&, std::vector<OptimWork>&,
                  std::int64_t*) {
  refuse(device);
}

void encode_on_cuda(c10::Device device, kernels::OptimFormat, bool, const float*, const kernels::OptimState&,
                    std::int64_t) {
  refuse(device);
}

void decode_on_cuda(c10::Device device, kernels::OptimFormat, bool, const kernels::OptimState&, float*,
                    std::int64_t) {
  refuse(device);
}

}  // namespace reef::optim
