#pragma once

#include <chrono>
#include <cstdint>
#include <functional>
#include <future>
#include <map>
#include <memory>
#include <tuple>
#include <vector>

#include "distributed/connect_peers.h"
#include "distributed/tensor_list_message.h"
#include "reef/pipeline_schedule.h"

namespace reef {

/// What is done every now and then while this rank waits for others; may be empty.
using Meanwhile = std::function<void()>;

template <class Result>
Result wait_for(std::future<Result>& future, const Meanwhile& meanwhile) {
  constexpr std::chrono::milliseconds kEvery{5};
  while (meanwhile && future.wait_for(kEvery) != std::future_status::ready) meanwhile();
  return future.get();
}

/// Sends and receives a pipeline's messages between this rank and others, beside the program: on connections
/// of the pipeline's own, or by gloo where there are none. Between two ranks messages have the order in which
/// the sender's actions make them, so each is received by its number.
class PipelineMail {
 public:
  /// Names a message by its kind, the chunk that has made it, the one that needs it, and the micro-batch.
  using Key = std::tuple<PipelineMessage::Kind, std::uint32_t, std::uint32_t, std::uint32_t>;
  static Key key_of(const PipelineMessage& message) {
    return {message.kind, message.chunk, message.to_chunk, message.micro_batch};
  }

  /// Uses gloo's tags `tag` and `tag` + 1 of the group.
  PipelineMail(ProcessGroupPtr group, int tag);
  /// Makes connections for messages like these. All ranks of the group call it alike, at most once, before
  /// begin(). Throws RankFailed.
  void connect(const std::vector<PipelineMessage>& messages);
  ~PipelineMail();
  PipelineMail(const PipelineMail&) = delete;
  PipelineMail& operator=(const PipelineMail&) = delete;

  /// Begins to receive those of `messages` that are for this rank, in this order. All ranks are given the
  /// same messages, of which each rank then sends its own, in this order.
  void begin(const std::vector<PipelineMessage>& messages);
  /// Sends what takes no waiting at once, all else beside the program: tensors must not change before end().
  void send(const PipelineMessage& message, TensorListMessage content);
  /// Waits for a message that begin() was given, and gives it away. Throws RankFailed.
  TensorListMessage receive(const PipelineMessage& message, const Meanwhile& meanwhile);
  /// Waits until all messages have been sent and received, whether or not they are used. Throws RankFailed.
  void end(const Meanwhile& meanwhile);

 private:
  struct Queues;
  /// Returns the end of the route to or from a rank, which is made when it is first asked for.
  template <class ByPeer, class ByGloo, class Routes>
  auto& route_at(int rank, Routes& routes);

  ProcessGroupPtr group_;
  int tag_;
  PeerConnections connections_;
  std::shared_ptr<Queues> queues_;
  std::map<Key, std::future<TensorListMessage>> coming_;
  std::vector<std::future<void>> going_;
};

}  // namespace reef
