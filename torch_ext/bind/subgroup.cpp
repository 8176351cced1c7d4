#include "reef/subgroup.h"

#include <torch/library.h>

#include <optional>
#include <torch/csrc/distributed/c10d/ProcessGroup.hpp>
#include <vector>

TORCH_LIBRARY_FRAGMENT(reef, m) {
  m.def(
      "subgroup(__torch__.torch.classes.c10d.ProcessGroup group, int[] ranks) -> "
      "__torch__.torch.classes.c10d.ProcessGroup?",
      [](const reef::ProcessGroupPtr& group,
         const std::vector<std::int64_t>& ranks) -> std::optional<reef::ProcessGroupPtr> {
        auto members = reef::subgroup(group, ranks);
        if (!members) return std::nullopt;
        return members;
      });
}
