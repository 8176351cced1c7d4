#include "reef/clip_grad_norm.h"

#include <torch/library.h>

#include <optional>
#include <torch/csrc/distributed/c10d/ProcessGroup.hpp>

TORCH_LIBRARY_FRAGMENT(reef, m) {
  m.def(
      "clip_grad_norm_(Tensor[] parameters, float max_norm, __torch__.torch.classes.c10d.ProcessGroup? "
      "group) "
      "-> float",
      [](const std::vector<at::Tensor>& parameters, double max_norm,
         const std::optional<reef::ProcessGroupPtr>& group) {
        return reef::clip_grad_norm_(parameters, max_norm, group.value_or(reef::ProcessGroupPtr()));
      });
}
