#pragma once

#include <ATen/core/Tensor.h>
#include <c10/util/intrusive_ptr.h>

#include <cstdint>
#include <functional>
#include <memory>
#include <string>
#include <vector>

#include "distributed/group_use.h"

namespace reef {

/// Messages by gloo between this rank and another one of a group.
struct MessageRoute {
  using Works = std::vector<c10::intrusive_ptr<c10d::Work>>;

  /// `name` is the call in whose name ConfigError is thrown, if `other` is not another rank of the group, or
  /// the group has no gloo for the CPU.
  static MessageRoute to(const std::string& name, int other, const ProcessGroupPtr& group);

  std::shared_ptr<GroupUse> use;
  int other;

  c10d::ProcessGroup& group() const { return *use->group; }
  /// Begin to send and to receive bytes, which lie on the CPU in order.
  c10::intrusive_ptr<c10d::Work> give(const at::Tensor& bytes, int tag) const;
  c10::intrusive_ptr<c10d::Work> take(const at::Tensor& bytes, int tag) const;
  void wait(const Works& works) const;
  /// Runs `exchange`. If it throws, a rank is gone: ends what waits for others, and throws RankFailed in the
  /// name of `name`.
  void run(const std::string& name, const std::function<void()>& exchange) const;
};

/// Most bytes that travel as one message of gloo.
inline constexpr std::int64_t kMessageChunkBytes = std::int64_t{16} << 20;

/// Calls `each(first, count)` for the messages in which so many bytes travel, which are alike on both sides.
template <class Each>
void for_each_message_chunk(std::int64_t bytes, const Each& each) {
  for (std::int64_t first = 0; first < bytes; first += kMessageChunkBytes)
    each(first, bytes - first < kMessageChunkBytes ? bytes - first : kMessageChunkBytes);
}

/// Returns part of the memory of a tensor that lies on the CPU in order, as bytes, whatever its dtype.
at::Tensor bytes_of_message(const at::Tensor& tensor, std::int64_t first, std::int64_t count);

/// Returns the values of a tensor in order on the CPU: the tensor itself, without its graph, if it is that.
at::Tensor values_of_message(const at::Tensor& tensor);

/// Throws ConfigError in the name of the call `name` unless the tensor is dense and has values that can be
/// sent.
void check_message(const std::string& name, const at::Tensor& tensor);

}  // namespace reef
