#include "reef/process_group.h"

#include <torch/library.h>

#include "reduction.h"
#include "reef/collectives.h"
#include "reef/error.h"

namespace {

reef::ProcessGroupOptions options_of(std::optional<std::int64_t> rank, std::optional<std::int64_t> world_size,
                                     const std::string& store, const std::string& interface,
                                     double timeout_seconds, double heartbeat_seconds) {
  reef::ProcessGroupOptions options;
  if (rank) options.rank = static_cast<int>(*rank);
  if (world_size) options.world_size = static_cast<int>(*world_size);
  options.store = store;
  options.interface = interface;
  options.timeout = std::chrono::milliseconds(static_cast<std::int64_t>(timeout_seconds * 1000));
  options.heartbeat = std::chrono::milliseconds(static_cast<std::int64_t>(heartbeat_seconds * 1000));
  return options;
}

}  // namespace

TORCH_LIBRARY_FRAGMENT(reef, m) {
  m.def(
      "init_process_group(int? rank, int? world_size, str store, str interface, float timeout_seconds, "
      "float heartbeat_seconds) -> "
      "__torch__.torch.classes.c10d.ProcessGroup",
      [](std::optional<std::int64_t> rank, std::optional<std::int64_t> world_size, const std::string& store,
         const std::string& interface, double timeout_seconds, double heartbeat_seconds) {
        return reef::init_process_group(
            options_of(rank, world_size, store, interface, timeout_seconds, heartbeat_seconds));
      });
  m.def("resolve_rendezvous", [](std::optional<std::int64_t> rank, std::optional<std::int64_t> world_size,
                                 const std::string& store) {
    const reef::Rendezvous r = reef::resolve_rendezvous(options_of(rank, world_size, store, "", 300, 10));
    return std::make_tuple(std::int64_t{r.rank}, std::int64_t{r.world_size}, std::int64_t{r.local_rank},
                           r.source);
  });
  // The mutability marks tell torch.compile what changes.
  m.def(
      "all_reduce(Tensor(a!)[] tensors, __torch__.torch.classes.c10d.ProcessGroup group, str reduction, int "
      "bucket_bytes) -> ()",
      [](const std::vector<at::Tensor>& tensors, const reef::ProcessGroupPtr& group,
         const std::string& reduction, std::int64_t bucket_bytes) {
        reef::all_reduce(tensors, group, reef::bind::reduction_of(reduction), bucket_bytes);
      });
  m.def(
      "broadcast(Tensor(a!)[] tensors, __torch__.torch.classes.c10d.ProcessGroup group, int root, int "
      "bucket_bytes) -> ()",
      [](const std::vector<at::Tensor>& tensors, const reef::ProcessGroupPtr& group, std::int64_t root,
         std::int64_t bucket_bytes) {
        reef::broadcast(tensors, group, static_cast<int>(root), bucket_bytes);
      });
  m.def("barrier(__torch__.torch.classes.c10d.ProcessGroup group) -> ()",
        [](const reef::ProcessGroupPtr& group) { reef::barrier(group); });
}
