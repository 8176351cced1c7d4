#pragma once

#include <c10/core/StorageImpl.h>
#include <c10/util/intrusive_ptr.h>
#include <torch/version.h>

#include <memory>
#include <type_traits>
#include <utility>

/// What differs between the versions of LibTorch that Reef supports, and nothing else.

#define REEF_TORCH (TORCH_VERSION_MAJOR * 100 + TORCH_VERSION_MINOR)

/// `override` of a virtual function that c10d::Backend did not have in 2.11.
#if REEF_TORCH >= 215
#define REEF_OVERRIDE_SINCE_2_15 override
#else
#define REEF_OVERRIDE_SINCE_2_15
#endif

/// In a class that stands before another autograd engine: what 2.14 added to its questions.
#if REEF_TORCH >= 214
#define REEF_FORWARD_NODE_CREATION_HOOKS(engine)                                                       \
  std::vector<std::unique_ptr<torch::autograd::NodeCreationHook>> get_node_creation_hooks() override { \
    return (engine).get_node_creation_hooks();                                                         \
  }
#else
#define REEF_FORWARD_NODE_CREATION_HOOKS(engine)
#endif

namespace reef::compat {

/// A node of autograd's graph, held as this version holds one.
template <class Node, class Pointer, class... Arguments>
Pointer make_node(Arguments&&... arguments) {
  if constexpr (std::is_constructible_v<Pointer, std::shared_ptr<Node>>) {
    return std::make_shared<Node>(std::forward<Arguments>(arguments)...);
  } else {
    return c10::make_intrusive<Node>(std::forward<Arguments>(arguments)...);
  }
}

/// What decides whether StorageImpl::data() throws. LibTorch sets it together with the text of the error, and
/// clears the text with it, which another thread may be reading; 2.11 and 2.12 cannot clear it at all. An
/// explicit instantiation may name a private member.
template <bool c10::StorageImpl::*kFlag>
struct AccessFlag {
  friend bool& access_flag(c10::StorageImpl& storage) { return storage.*kFlag; }
};
bool& access_flag(c10::StorageImpl& storage);
template struct AccessFlag<&c10::StorageImpl::throw_on_immutable_data_ptr_>;

inline void refuse_access(c10::StorageImpl& storage, bool refused) {
  access_flag(storage) = refused;
  storage.set_data_ptr_noswap(std::move(storage._mutable_data_ptr_no_checks()));  // looks at the flags again
}

}  // namespace reef::compat
