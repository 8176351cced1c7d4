#include "pipeline_run/mail.h"

#include <exception>
#include <torch/csrc/distributed/c10d/ProcessGroup.hpp>
#include <utility>

#include "distributed/message_queue.h"

namespace reef {

/// Owned by the threads that serve them, too.
struct PipelineMail::Queues {
  std::map<int, MessageQueue> sending, receiving;  ///< by the other rank
};

namespace {

/// Runs `work` in its turn beside the program.
template <class Result, class Work>
std::future<Result> start(MessageQueue& queue, const std::shared_ptr<void>& owner, Work work) {
  const auto promise = std::make_shared<std::promise<Result>>();
  std::future<Result> result = promise->get_future();
  queue.start(
      [promise, work = std::move(work)] {
        try {
          if constexpr (std::is_void_v<Result>) {
            work();
            promise->set_value();
          } else {
            promise->set_value(work());
          }
        } catch (...) {
          promise->set_exception(std::current_exception());
        }
      },
      owner);
  return result;
}

}  // namespace

PipelineMail::PipelineMail(ProcessGroupPtr group, int tag)
    : group_(std::move(group)), tag_(tag), queues_(std::make_shared<Queues>()) {}

PipelineMail::~PipelineMail() = default;

void PipelineMail::begin(const std::vector<PipelineMessage>& messages) {
  const auto own = static_cast<std::uint32_t>(group_->getRank());
  for (const PipelineMessage& message : messages) {
    if (message.to != own) continue;
    const int from = static_cast<int>(message.from);
    const MessageRoute route = MessageRoute::to("reef::Pipeline", from, group_);
    coming_[key_of(message)] = start<TensorListMessage>(
        queues_->receiving[from], queues_,
        [route, number = received_[from]++, tag = tag_] { return receive_tensor_list(route, number, tag); });
  }
}

void PipelineMail::send(const PipelineMessage& message, TensorListMessage content) {
  const int to = static_cast<int>(message.to);
  const MessageRoute route = MessageRoute::to("reef::Pipeline", to, group_);
  for (at::Tensor& tensor : content.tensors) {
    if (tensor.defined()) tensor = values_of_message(tensor);
  }
  going_.push_back(start<void>(queues_->sending[to], queues_,
                               [route, number = sent_[to]++, tag = tag_, content = std::move(content)] {
                                 send_tensor_list(route, content, number, tag);
                               }));
}

TensorListMessage PipelineMail::receive(const PipelineMessage& message) {
  const auto at = coming_.find(key_of(message));
  std::future<TensorListMessage> future = std::move(at->second);
  coming_.erase(at);
  return future.get();
}

void PipelineMail::end() {
  auto going = std::exchange(going_, {});
  auto coming = std::exchange(coming_, {});
  std::exception_ptr failed;
  const auto wait = [&](auto& future) {
    try {
      future.get();
    } catch (...) {
      if (!failed) failed = std::current_exception();
    }
  };
  for (auto& future : going) wait(future);
  for (auto& [key, future] : coming) wait(future);
  if (failed) std::rethrow_exception(failed);
}

}  // namespace reef
