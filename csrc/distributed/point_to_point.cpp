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

#include "distributed/message_header.h"
#include "distributed/message_route.h"
#include "distributed/tag_space.h"
#include "reef/error.h"

namespace reef {
namespace {

using at::Tensor;
using Kind = MessageHeader::Kind;
using Answer = MessageHeader::Answer;

constexpr int kHeaderTag = TagSpace::kMessages;
constexpr int kValuesTag = TagSpace::kMessages + 1;
constexpr int kAnswerTag = TagSpace::kMessages + 2;

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

void transfer_out(const MessageRoute& route, const Tensor& tensor, const MessageHeader& sent) {
  const Tensor answer = at::empty({MessageHeader::kBytes}, at::kByte);
  route.run("reef::send to rank " + std::to_string(route.other), [&] {
    MessageRoute::Works works = {route.take(answer, kAnswerTag), route.give(sent.to_bytes(), kHeaderTag)};
    for_each_message_chunk(sent.payload_bytes(), [&](std::int64_t first, std::int64_t count) {
      works.push_back(route.give(bytes_of_message(tensor, first, count), kValuesTag));
    });
    route.wait(works);
  });
  const auto wanted = MessageHeader::from_bytes(answer);
  if (!wanted) throw no_header(route.other);
  if (wanted->answer != Answer::kTaken) throw refused(sent, route.group().getRank(), *wanted, route.other);
}

/// `into` is undefined if any tensor is welcome.
Tensor transfer_in(const MessageRoute& route, Tensor into, MessageHeader wanted) {
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
    const Tensor place = taken ? into : at::empty({std::min(bytes, kMessageChunkBytes)}, at::kByte);
    MessageRoute::Works works;
    for_each_message_chunk(bytes, [&](std::int64_t first, std::int64_t count) {
      works.push_back(route.take(bytes_of_message(place, taken ? first : 0, count), kValuesTag));
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
Message enqueue(MessageQueue& queue, const MessageRoute& route, bool waits, Transfer transfer,
                Finish finish) {
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

MessageQueue& queue_of(std::map<int, MessageQueue>& queues, const MessageRoute& route) {
  const std::lock_guard lock(route.use->mutex);
  return queues[route.other];
}

Message begin_send(const Tensor& tensor, int to, const ProcessGroupPtr& group, std::int64_t tag, bool waits) {
  const std::string name = waits ? "reef::send" : "reef::isend";
  const at::NoGradGuard no_grad;
  check_message(name, tensor);
  const MessageRoute route = MessageRoute::to(name, to, group);
  const Tensor values = values_of_message(tensor);
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
  const MessageRoute route = MessageRoute::to(waits ? "reef::receive" : "reef::ireceive", from, group);
  return enqueue(
      queue_of(route.use->receiving, route), route, waits,
      [route, tag] { return transfer_in(route, Tensor(), MessageHeader::anything(tag)); },
      [device](const Tensor& came) { return came.to(device); });
}

Message begin_receive_into(const Tensor& tensor, int from, const ProcessGroupPtr& group, std::int64_t tag,
                           bool waits) {
  const std::string name = waits ? "reef::receive_into" : "reef::ireceive_into";
  const at::NoGradGuard no_grad;
  check_message(name, tensor);
  if (at::has_internal_overlap(tensor) == at::MemOverlap::Yes) {
    throw ConfigError(
        name +
        " was given a tensor whose elements share memory (an expanded tensor): pass a contiguous one.");
  }
  const MessageRoute route = MessageRoute::to(name, from, group);
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
