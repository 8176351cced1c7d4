#include "pipeline_run/mail.h"

#include <algorithm>
#include <exception>
#include <set>
#include <torch/csrc/distributed/c10d/ProcessGroup.hpp>
#include <utility>

#include "distributed/gloo_tensor_list.h"
#include "distributed/message_queue.h"
#include "distributed/peer_tensor_list.h"
#include "pipeline/traffic.h"

namespace reef {

/// Owned by the threads that serve them, too.
struct PipelineMail::Queues {
  /// One end of a route, and what is to be done there.
  template <class End>
  struct Served {
    std::unique_ptr<End> end;
    MessageQueue queue;
  };
  std::map<int, Served<TensorListSender>> sending;  ///< by the other rank
  std::map<int, Served<TensorListReceiver>> receiving;
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

// What the simulation counts.
static_assert(MessageRoom::kAhead == kReceivesAhead && kMessageChunkBytes == kLargestAheadBytes);

/// Messages of one kind from one chunk to another are mostly alike.
std::int64_t stream_of(const PipelineMessage& message) {
  const std::int64_t chunks = std::int64_t{message.chunk} << 30 | message.to_chunk;
  return 3 * chunks + static_cast<std::int64_t>(message.kind);
}

}  // namespace

PipelineMail::PipelineMail(ProcessGroupPtr group, int tag)
    : group_(std::move(group)), tag_(tag), queues_(std::make_shared<Queues>()) {}

PipelineMail::~PipelineMail() = default;

void PipelineMail::connect(const std::vector<PipelineMessage>& messages) {
  std::set<std::pair<int, int>> pairs;
  for (const PipelineMessage& message : messages) {
    const auto [smaller, larger] = std::minmax(message.from, message.to);
    if (smaller < larger) pairs.emplace(static_cast<int>(smaller), static_cast<int>(larger));
  }
  connections_ = connect_peers(group_, pairs);
}

template <class ByPeer, class ByGloo, class Routes>
auto& PipelineMail::route_at(int rank, Routes& routes) {
  auto& served = routes[rank];
  if (served.end) return served;
  MessageRoute route = MessageRoute::to("reef::Pipeline", rank, group_);
  if (const auto own = connections_.find(rank); own != connections_.end()) {
    served.end = std::make_unique<ByPeer>(std::move(route), own->second);
  } else {
    served.end = std::make_unique<ByGloo>(std::move(route), tag_);
  }
  return served;
}

void PipelineMail::begin(const std::vector<PipelineMessage>& messages) {
  const auto own = static_cast<std::uint32_t>(group_->getRank());
  /// Of one rank, in its order: the streams, and of how many the receive has begun.
  struct Expected {
    std::vector<std::int64_t> streams;
    std::size_t begun = 0;
  };
  std::map<int, std::shared_ptr<Expected>> expected;
  for (const PipelineMessage& message : messages) {
    if (message.to != own) continue;
    auto& of_rank = expected[static_cast<int>(message.from)];
    if (!of_rank) of_rank = std::make_shared<Expected>();
    of_rank->streams.push_back(stream_of(message));
  }
  std::map<int, std::size_t> number;
  for (const PipelineMessage& message : messages) {
    if (message.to != own) continue;
    const int from = static_cast<int>(message.from);
    auto& receiving = route_at<PeerTensorListReceiver, GlooTensorListReceiver>(from, queues_->receiving);
    coming_[key_of(message)] = start<TensorListMessage>(
        receiving.queue, queues_,
        [&from_rank = *receiving.end, all = expected.at(from), at = number[from]++] {
          while (all->begun < all->streams.size() && all->begun < at + MessageRoom::kAhead)
            from_rank.begin(all->streams[all->begun++]);
          return from_rank.take();
        });
  }
}

void PipelineMail::send(const PipelineMessage& message, TensorListMessage content) {
  const int to = static_cast<int>(message.to);
  for (at::Tensor& tensor : content.tensors) {
    TensorLayout& layout = content.layouts.emplace_back();
    if (!tensor.defined()) continue;
    if (!lies_in_order(tensor)) layout = layout_of(tensor);
    tensor = values_of_message(tensor);
  }
  auto& sending = route_at<PeerTensorListSender, GlooTensorListSender>(to, queues_->sending);
  if (sending.queue.is_idle() && sending.end->send_at_once(content)) return;
  going_.push_back(start<void>(sending.queue, queues_,
                               [&to_rank = *sending.end, stream = stream_of(message),
                                content = std::move(content)] { to_rank.send(content, stream); }));
}

TensorListMessage PipelineMail::receive(const PipelineMessage& message, const Meanwhile& meanwhile) {
  const auto at = coming_.find(key_of(message));
  std::future<TensorListMessage> future = std::move(at->second);
  coming_.erase(at);
  return wait_for(future, meanwhile);
}

void PipelineMail::end(const Meanwhile& meanwhile) {
  auto going = std::exchange(going_, {});
  auto coming = std::exchange(coming_, {});
  std::exception_ptr failed;
  const auto wait = [&](auto& future) {
    try {
      wait_for(future, meanwhile);
    } catch (...) {
      if (!failed) failed = std::current_exception();
    }
  };
  for (auto& future : going) wait(future);
  for (auto& [key, future] : coming) wait(future);
  if (failed) std::rethrow_exception(failed);
}

}  // namespace reef
