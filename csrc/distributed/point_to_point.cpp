#include "reef/point_to_point.h"

#include <ATen/MemoryOverlap.h>
#include <ATen/core/grad_mode.h>
#include <ATen/ops/empty.h>

#include <algorithm>
#include <functional>
#include <future>
#include <mutex>
#include <string>
#include <torch/csrc/distributed/c10d/ProcessGroup.hpp>
#include <utility>
#include <vector>

#include "distributed/group_use.h"
#include "distributed/members.h"
#include "distributed/message_header.h"
#include "distributed/sigpipe.h"
#include "reef/error.h"

namespace reef {
namespace {

using at::Tensor;
using Kind = MessageHeader::Kind;
using Answer = MessageHeader::Answer;
using Works = std::vector<c10::intrusive_ptr<c10d::Work>>;

constexpr std::int64_t kChunkBytes = std::int64_t{16} << 20;
constexpr int kHeaderTag = TagSpace::kMessages;
constexpr int kValuesTag = TagSpace::kMessages + 1;
constexpr int kAnswerTag = TagSpace::kMessages + 2;

/// One direction between this rank and another.
struct Route {
  std::shared_ptr<GroupUse> use;
  int other;

  c10d::ProcessGroup& group() const { return *use->group; }
  c10::intrusive_ptr<c10d::Work> give(const Tensor& bytes, int tag) const {
    const SigpipeBlocked blocked;  // gloo writes to the socket on the thread that calls, if it can
    std::vector<Tensor> tensors = {bytes};
    return group().send(tensors, other, tag);
  }
  c10::intrusive_ptr<c10d::Work> take(const Tensor& bytes, int tag) const {
    const SigpipeBlocked blocked;
    std::vector<Tensor> tensors = {bytes};
    return group().recv(tensors, other, tag);
  }
  void wait(const Works& works) const {
    for (const auto& work : works) use->wait_for_message(work, other);
  }
  /// What goes wrong on the way is a rank that is gone, and whoever waits for another is told.
  template <class Exchange>
  void run(const std::string& name, const Exchange& exchange) const {
    try {
      if (Heartbeat* const heart = heart_of(group())) heart->check();
      exchange();
    } catch (const std::exception& error) {
      const std::exception_ptr failed = rank_failed(group(), name, error);
      use->fail();
      std::rethrow_exception(failed);
    }
  }
};

/// The memory of a tensor on the CPU that lies there in order, as bytes, whatever its dtype.
Tensor bytes_of(const Tensor& tensor, std::int64_t first, std::int64_t count) {
  Tensor bytes = at::detail::make_tensor<c10::TensorImpl>(c10::Storage(tensor.storage()),
                                                          c10::DispatchKeySet(c10::DispatchKey::CPU),
                                                          caffe2::TypeMeta::Make<std::uint8_t>());
  const std::int64_t offset = tensor.storage_offset() * static_cast<std::int64_t>(tensor.element_size());
  bytes.unsafeGetTensorImpl()->set_sizes_and_strides(at::IntArrayRef{count}, at::IntArrayRef{1},
                                                     offset + first);
  return bytes;
}

/// In the messages in which the values travel: alike on both sides.
template <class Each>
void for_each_chunk(std::int64_t bytes, const Each& each) {
  for (std::int64_t first = 0; first < bytes; first += kChunkBytes)
    each(first, std::min(kChunkBytes, bytes - first));
}

ConfigError refused(const MessageHeader& sent, int from, const MessageHeader& wanted, int to) {
  if (wanted.answer == Answer::kNoMemory) {
    return ConfigError("rank " + std::to_string(to) + " has no memory for what comes to it by " +
                       sent.text() + " from rank " + std::to_string(from) +
                       ": send less at once, or free memory there.");
  }
  return ConfigError(sent.text() + " from rank " + std::to_string(from) + " has met " + wanted.text() +
                     " on rank " + std::to_string(to) +
                     ": make dtype, shape, tag and order the same on both; this message is lost on both, the "
                     "next ones go on.");
}

ConfigError no_header(int other) {
  return ConfigError("what came from rank " + std::to_string(other) +
                     " is not the header of a message of this version of Reef: run the same on all ranks.");
}

void transfer_out(const Route& route, const Tensor& tensor, const MessageHeader& sent) {
  const Tensor answer = at::empty({MessageHeader::kBytes}, at::kByte);
  route.run("reef::send to rank " + std::to_string(route.other), [&] {
    Works works = {route.take(answer, kAnswerTag), route.give(sent.to_bytes(), kHeaderTag)};
    for_each_chunk(sent.payload_bytes(), [&](std::int64_t first, std::int64_t count) {
      works.push_back(route.give(bytes_of(tensor, first, count), kValuesTag));
    });
    route.wait(works);
  });
  const auto wanted = MessageHeader::from_bytes(answer);
  if (!wanted) throw no_header(route.other);
  if (wanted->answer != Answer::kTaken) throw refused(sent, route.group().getRank(), *wanted, route.other);
}

/// `into` is undefined if any tensor is welcome.
Tensor transfer_in(const Route& route, Tensor into, MessageHeader wanted) {
  const std::string name = "reef::receive from rank " + std::to_string(route.other);
  const Tensor header = at::empty({MessageHeader::kBytes}, at::kByte);
  route.run(name, [&] { route.wait({route.take(header, kHeaderTag)}); });
  const auto sent = MessageHeader::from_bytes(header);
  std::exception_ptr no_memory;
  wanted.answer = sent && wanted.wants(*sent) ? Answer::kTaken : Answer::kRefused;
  if (wanted.answer == Answer::kTaken && !into.defined()) {
    try {
      into = at::empty(sent->sizes, sent->dtype);
    } catch (const std::exception&) {
      no_memory = std::current_exception();
      wanted.answer = Answer::kNoMemory;
    }
  }
  route.run(name, [&] {
    const std::int64_t bytes = sent ? sent->payload_bytes() : 0;
    const bool taken = wanted.answer == Answer::kTaken;
    const Tensor place = taken ? into : at::empty({std::min(bytes, kChunkBytes)}, at::kByte);
    Works works;
    for_each_chunk(bytes, [&](std::int64_t first, std::int64_t count) {
      works.push_back(route.take(bytes_of(place, taken ? first : 0, count), kValuesTag));
    });
    route.wait(works);
    // Last: gloo tells who waits for a message of a rank that is gone, and not always who sends to it.
    route.wait({route.give(wanted.to_bytes(), kAnswerTag)});
  });
  if (no_memory) std::rethrow_exception(no_memory);
  if (!sent) throw no_header(route.other);
  if (wanted.answer != Answer::kTaken) throw refused(*sent, route.other, wanted, route.group().getRank());
  return into;
}

void check_tensor(const std::string& name, const Tensor& tensor) {
  if (!tensor.defined()) throw ConfigError(name + " was given a tensor that is undefined.");
  if (tensor.layout() != at::kStrided || tensor.is_quantized() || tensor.is_meta() || tensor.is_nested() ||
      tensor.key_set().has(c10::DispatchKey::Python) || !tensor.has_storage()) {
    throw ConfigError(name + " was given a tensor that is not dense (" + tensor.toString() +
                      ") or has no values of its own: convert it first.");
  }
  if (tensor.dim() > MessageHeader::kMostDims) {
    throw ConfigError(name + " was given a tensor of " + std::to_string(tensor.dim()) + " dimensions: " +
                      std::to_string(MessageHeader::kMostDims) + " at most can be told; reshape it.");
  }
}

Route route_to(const std::string& name, int other, const ProcessGroupPtr& group) {
  if (!group)
    throw ConfigError(name + " was given no process group: make one with reef::init_process_group.");
  const int size = group->getSize();
  if (other < 0 || other >= size || other == group->getRank()) {
    throw ConfigError(name + " was given rank " + std::to_string(other) + " on rank " +
                      std::to_string(group->getRank()) + " of " + std::to_string(size) +
                      ": messages go to and from another rank of the group.");
  }
  const auto devices = group->getDeviceTypes();
  const bool gloo =
      std::any_of(devices.begin(), devices.end(), [](const auto& each) { return each.is_cpu(); }) &&
      group->getBackend(c10::kCPU)->getBackendName() == "gloo";
  if (!gloo)
    throw ConfigError(name +
                      " was given a group without gloo for the CPU, by which messages travel: make one with "
                      "reef::init_process_group.");
  return {GroupUse::of(group), other};
}

/// In order, on the CPU: the tensor itself, where it is that.
Tensor on_host(const Tensor& tensor) {
  if (tensor.is_cpu()) return tensor.detach().resolve_conj().resolve_neg().contiguous();
  const auto options =
      tensor.options().device(c10::kCPU).requires_grad(false).pinned_memory(tensor.is_cuda());
  return at::empty(tensor.sizes(), options).copy_(tensor.detach());
}

bool lies_in_order(const Tensor& tensor) {
  return tensor.is_cpu() && tensor.is_contiguous() && !tensor.is_conj() && !tensor.is_neg();
}

}  // namespace

struct Message::State {
  std::shared_future<Tensor> arrived;
  std::function<Tensor(const Tensor&)> finish;  ///< on the thread that waits, whose stream it is
  std::once_flag finishing;
  Tensor result;
};

namespace {

/// Runs `transfer` in its turn, beside the program or on this thread. It owns no tensor of the program's,
/// which may be Python's: those end with the Message, on a thread that Python knows.
template <class Transfer, class Finish>
Message enqueue(MessageQueue& queue, const Route& route, bool waits, Transfer transfer, Finish finish) {
  const auto arrival = std::make_shared<std::promise<Tensor>>();
  auto state = std::make_shared<Message::State>();
  state->arrived = arrival->get_future().share();
  state->finish = std::move(finish);
  auto work = [arrival, transfer = std::move(transfer)] {
    try {
      arrival->set_value(transfer());
    } catch (...) {
      arrival->set_exception(std::current_exception());
    }
  };
  if (waits) {
    queue.run(work);
  } else {
    queue.start(std::move(work), route.use);
  }
  return Message(std::move(state));
}

MessageQueue& queue_of(std::map<int, MessageQueue>& queues, const Route& route) {
  const std::lock_guard lock(route.use->mutex);
  return queues[route.other];
}

Message begin_send(const Tensor& tensor, int to, const ProcessGroupPtr& group, std::int64_t tag, bool waits) {
  const std::string name = waits ? "reef::send" : "reef::isend";
  const at::NoGradGuard no_grad;
  check_tensor(name, tensor);
  const Route route = route_to(name, to, group);
  const Tensor values = on_host(tensor);
  return enqueue(
      queue_of(route.use->sending, route), route, waits,
      [route, values, header = MessageHeader::of(Kind::kSend, tensor, tag)] {
        transfer_out(route, values, header);
        return Tensor();
      },
      [tensor](const Tensor&) { return tensor; });
}

Message begin_receive(int from, const ProcessGroupPtr& group, std::int64_t tag, c10::Device device,
                      bool waits) {
  const at::NoGradGuard no_grad;
  const Route route = route_to(waits ? "reef::receive" : "reef::ireceive", from, group);
  return enqueue(
      queue_of(route.use->receiving, route), route, waits,
      [route, tag] { return transfer_in(route, Tensor(), MessageHeader::anything(tag)); },
      [device](const Tensor& came) { return came.to(device); });
}

Message begin_receive_into(const Tensor& tensor, int from, const ProcessGroupPtr& group, std::int64_t tag,
                           bool waits) {
  const std::string name = waits ? "reef::receive_into" : "reef::ireceive_into";
  const at::NoGradGuard no_grad;
  check_tensor(name, tensor);
  if (at::has_internal_overlap(tensor) == at::MemOverlap::Yes) {
    throw ConfigError(
        name +
        " was given a tensor whose elements share memory (an expanded tensor): pass a contiguous one.");
  }
  const Route route = route_to(name, from, group);
  const bool directly = lies_in_order(tensor);
  return enqueue(
      queue_of(route.use->receiving, route), route, waits,
      [route, place = directly ? tensor.detach() : Tensor(),
       header = MessageHeader::of(Kind::kReceiveInto, tensor, tag)] {
        return transfer_in(route, place, header);
      },
      [tensor, directly](const Tensor& came) {
        if (!directly) {
          tensor.copy_(came);
        } else if (!tensor.is_inference()) {
          tensor.unsafeGetTensorImpl()->bump_version();  // as an in-place operator would
        }
        return tensor;
      });
}

}  // namespace

Message::Message(std::shared_ptr<State> state) : state_(std::move(state)) {}

Tensor Message::wait() const {
  const Tensor& arrived = state_->arrived.get();
  std::call_once(state_->finishing, [&] {
    const at::NoGradGuard no_grad;
    state_->result = state_->finish(arrived);
  });
  return state_->result;
}

bool Message::is_through() const {
  return state_->arrived.wait_for(std::chrono::seconds(0)) == std::future_status::ready;
}

void send(const Tensor& tensor, int to, const ProcessGroupPtr& group, std::int64_t tag) {
  begin_send(tensor, to, group, tag, /*waits=*/true).wait();
}
Tensor receive(int from, const ProcessGroupPtr& group, std::int64_t tag, c10::Device device) {
  return begin_receive(from, group, tag, device, /*waits=*/true).wait();
}
void receive_into(const Tensor& tensor, int from, const ProcessGroupPtr& group, std::int64_t tag) {
  begin_receive_into(tensor, from, group, tag, /*waits=*/true).wait();
}
Message isend(const Tensor& tensor, int to, const ProcessGroupPtr& group, std::int64_t tag) {
  return begin_send(tensor, to, group, tag, /*waits=*/false);
}
Message ireceive(int from, const ProcessGroupPtr& group, std::int64_t tag, c10::Device device) {
  return begin_receive(from, group, tag, device, /*waits=*/false);
}
Message ireceive_into(const Tensor& tensor, int from, const ProcessGroupPtr& group, std::int64_t tag) {
  return begin_receive_into(tensor, from, group, tag, /*waits=*/false);
}

}  // namespace reef
