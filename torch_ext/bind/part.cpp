#include "reef/part.h"

#include <torch/library.h>

TORCH_LIBRARY_FRAGMENT(reef, m) {
  m.def("part_of(Tensor tensor) -> int[]", [](const at::Tensor& tensor) {
    const std::optional<reef::Part> part = reef::part_of(tensor);
    return part ? std::vector<std::int64_t>{part->first, part->whole_elements, part->copy}
                : std::vector<std::int64_t>{};
  });
  m.def("set_part(Tensor tensor, int first, int whole_elements, int copy, int[]? whole_shape) -> ()",
        [](const at::Tensor& tensor, std::int64_t first, std::int64_t whole_elements, std::int64_t copy,
           at::OptionalIntArrayRef whole_shape) {
          reef::set_part(tensor, {first, whole_elements, copy}, whole_shape);
        });
  m.def("whole_shape_of(Tensor tensor) -> int[]", &reef::whole_shape_of);
}
