#include "reef/part.h"

#include <c10/util/accumulate.h>

#include <string>
#include <utility>

#include "reef/error.h"

namespace reef {

namespace {

struct PartMeta final : c10::BackendMeta {
  PartMeta(const Part& given, std::vector<std::int64_t> shape) : part(given), whole_shape(std::move(shape)) {}
  Part part;
  std::vector<std::int64_t> whole_shape;
};

const PartMeta* meta_of(const at::Tensor& tensor) {
  return dynamic_cast<const PartMeta*>(tensor.unsafeGetTensorImpl()->get_backend_meta());
}

}  // namespace

void set_part(const at::Tensor& tensor, const Part& part, at::OptionalIntArrayRef whole_shape) {
  if (part.first < 0 || part.first + tensor.numel() > part.whole_elements) {
    throw ConfigError("set_part: " + std::to_string(tensor.numel()) + " elements from " +
                      std::to_string(part.first) + " on do not lie in " +
                      std::to_string(part.whole_elements) + "; count elements, not bytes.");
  }
  if (part.copy < 0) throw ConfigError("set_part: copy is " + std::to_string(part.copy) + "; count from 0.");
  std::vector<std::int64_t> shape = whole_shape ? whole_shape->vec() : std::vector{part.whole_elements};
  if (c10::multiply_integers(shape) != part.whole_elements) {
    throw ConfigError("set_part: a whole of " + std::to_string(part.whole_elements) +
                      " elements has the shape " + c10::str(at::IntArrayRef(shape)) +
                      "; give the shape of the whole.");
  }
  tensor.unsafeGetTensorImpl()->set_backend_meta(c10::make_intrusive<PartMeta>(part, std::move(shape)));
}

std::optional<Part> part_of(const at::Tensor& tensor) {
  const PartMeta* const found = meta_of(tensor);
  if (found == nullptr) return std::nullopt;
  return found->part;
}

std::vector<std::int64_t> whole_shape_of(const at::Tensor& tensor) {
  const PartMeta* const found = meta_of(tensor);
  return found == nullptr ? tensor.sizes().vec() : found->whole_shape;
}

}  // namespace reef
