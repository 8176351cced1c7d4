#include "reef/part.h"

#include <string>

#include "reef/error.h"

namespace reef {

namespace {

struct PartMeta final : c10::BackendMeta {
  explicit PartMeta(const Part& given) : part(given) {}
  Part part;
};

}  // namespace

void set_part(const at::Tensor& tensor, const Part& part) {
  if (part.first < 0 || part.first + tensor.numel() > part.whole_elements) {
    throw ConfigError("set_part: " + std::to_string(tensor.numel()) + " elements from " +
                      std::to_string(part.first) + " on do not lie in " +
                      std::to_string(part.whole_elements) + "; count elements, not bytes.");
  }
  if (part.copy < 0) throw ConfigError("set_part: copy is " + std::to_string(part.copy) + "; count from 0.");
  tensor.unsafeGetTensorImpl()->set_backend_meta(c10::make_intrusive<PartMeta>(part));
}

std::optional<Part> part_of(const at::Tensor& tensor) {
  const auto* const found = dynamic_cast<const PartMeta*>(tensor.unsafeGetTensorImpl()->get_backend_meta());
  if (found == nullptr) return std::nullopt;
  return found->part;
}

}  // namespace reef
