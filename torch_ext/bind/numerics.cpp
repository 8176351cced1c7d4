#include "reef/numerics.h"

#include <torch/library.h>

TORCH_LIBRARY_FRAGMENT(reef, m) { m.def("count_nonfinite(Tensor tensor) -> SymInt"); }

TORCH_LIBRARY_IMPL(reef, CPU, m) {
  m.impl("count_nonfinite",
         [](const at::Tensor& tensor) { return c10::SymInt(reef::count_nonfinite(tensor)); });
}

TORCH_LIBRARY_IMPL(reef, CUDA, m) {
  m.impl("count_nonfinite",
         [](const at::Tensor& tensor) { return c10::SymInt(reef::count_nonfinite(tensor)); });
}
