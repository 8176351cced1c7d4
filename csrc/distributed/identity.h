#pragma once

#include <c10/util/intrusive_ptr.h>

#include <string>

namespace c10d {
class Backend;
class ProcessGroup;
}  // namespace c10d

namespace reef {

/// The backend of a world of one: every collective is the identity, done when it returns, on any device.
/// Outputs that are not their inputs are copied on the current stream. There is nobody to send to or receive
/// from.
c10::intrusive_ptr<c10d::Backend> make_identity_backend();

/// A group of this process alone, on every device.
c10::intrusive_ptr<c10d::ProcessGroup> make_world_of_one(const std::string& name);

}  // namespace reef
