#pragma once

#include <torch/version.h>

/// What differs between the versions of LibTorch that Reef supports, and nothing else.

#define REEF_TORCH (TORCH_VERSION_MAJOR * 100 + TORCH_VERSION_MINOR)

/// `override` of a virtual function that c10d::Backend did not have in 2.11.
#if REEF_TORCH >= 215
#define REEF_OVERRIDE_SINCE_2_15 override
#else
#define REEF_OVERRIDE_SINCE_2_15
#endif
