#include "reef/point_to_point.h"

#include <torch/custom_class.h>
#include <torch/library.h>

#include <limits>
#include <torch/csrc/distributed/c10d/ProcessGroup.hpp>
#include <utility>

#include "reef/error.h"

namespace {

struct BoundMessage final : torch::CustomClassHolder {
  explicit BoundMessage(reef::Message under_way) : message(std::move(under_way)) {}
  const reef::Message message;
};
using MessagePtr = c10::intrusive_ptr<BoundMessage>;

int rank_of(std::int64_t rank) {
  if (rank < 0 || rank > std::numeric_limits<int>::max())
    throw reef::ConfigError("there is no rank " + std::to_string(rank) + ".");
  return static_cast<int>(rank);
}

}  // namespace

TORCH_LIBRARY_FRAGMENT(reef, m) {
  m.class_<BoundMessage>("Message")
      .def("wait", [](const MessagePtr& self) { return self->message.wait(); })
      .def("is_through", [](const MessagePtr& self) { return self->message.is_through(); });
  m.def("send(Tensor tensor, int to, __torch__.torch.classes.c10d.ProcessGroup group, int tag) -> ()",
        [](const at::Tensor& tensor, std::int64_t to, const reef::ProcessGroupPtr& group, std::int64_t tag) {
          reef::send(tensor, rank_of(to), group, tag);
        });
  m.def(
      "receive(int source, __torch__.torch.classes.c10d.ProcessGroup group, int tag, Device device) -> "
      "Tensor",
      [](std::int64_t source, const reef::ProcessGroupPtr& group, std::int64_t tag, c10::Device device) {
        return reef::receive(rank_of(source), group, tag, device);
      });
  m.def(
      "receive_into(Tensor(a!) tensor, int source, __torch__.torch.classes.c10d.ProcessGroup group, int tag) "
      "-> ()",
      [](const at::Tensor& tensor, std::int64_t source, const reef::ProcessGroupPtr& group,
         std::int64_t tag) { reef::receive_into(tensor, rank_of(source), group, tag); });
  m.def(
      "isend(Tensor tensor, int to, __torch__.torch.classes.c10d.ProcessGroup group, int tag) -> "
      "__torch__.torch.classes.reef.Message",
      [](const at::Tensor& tensor, std::int64_t to, const reef::ProcessGroupPtr& group, std::int64_t tag) {
        return c10::make_intrusive<BoundMessage>(reef::isend(tensor, rank_of(to), group, tag));
      });
  m.def(
      "ireceive(int source, __torch__.torch.classes.c10d.ProcessGroup group, int tag, Device device) -> "
      "__torch__.torch.classes.reef.Message",
      [](std::int64_t source, const reef::ProcessGroupPtr& group, std::int64_t tag, c10::Device device) {
        return c10::make_intrusive<BoundMessage>(reef::ireceive(rank_of(source), group, tag, device));
      });
  m.def(
      "ireceive_into(Tensor(a!) tensor, int source, __torch__.torch.classes.c10d.ProcessGroup group, int "
      "tag) "
      "-> __torch__.torch.classes.reef.Message",
      [](const at::Tensor& tensor, std::int64_t source, const reef::ProcessGroupPtr& group,
         std::int64_t tag) {
        return c10::make_intrusive<BoundMessage>(reef::ireceive_into(tensor, rank_of(source), group, tag));
      });
}
