#include "reef/category.h"

namespace reef {

const char* name(Category category) {
  switch (category) {
    case Category::kParameter:
      return "parameter";
    case Category::kGradient:
      return "gradient";
    case Category::kOptimizerState:
      return "optimizer state";
    case Category::kActivation:
      return "activation";
    case Category::kCommunication:
      return "communication buffer";
    case Category::kOther:
      return "other";
  }
  return "unknown";
}

}  // namespace reef
