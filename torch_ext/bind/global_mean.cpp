#include "reef/global_mean.h"

#include <torch/library.h>

#include <torch/csrc/distributed/c10d/ProcessGroup.hpp>

#include "reduction.h"

TORCH_LIBRARY_FRAGMENT(reef, m) {
  m.def(
      "global_mean(Tensor sum, int count, __torch__.torch.classes.c10d.ProcessGroup group, str reduction) -> "
      "Tensor",
      [](const at::Tensor& sum, std::int64_t count, const reef::ProcessGroupPtr& group,
         const std::string& reduction) {
        return reef::global_mean(sum, count, group, reef::bind::reduction_of(reduction));
      });
}
