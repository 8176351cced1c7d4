#pragma once

namespace reef {

/// While an object of this class exists, this thread allocates for pages whose room is reserved already, so
/// the pager is not asked for room.
class OwnAllocation {
 public:
  OwnAllocation() { ++depth_; }
  ~OwnAllocation() { --depth_; }
  OwnAllocation(const OwnAllocation&) = delete;
  OwnAllocation& operator=(const OwnAllocation&) = delete;

  static bool is_being_made() { return depth_ > 0; }

 private:
  // Small enough for the static TLS block, which is accessed without a function call.
  [[gnu::tls_model("initial-exec")]] static inline constinit thread_local int depth_ = 0;
};

}  // namespace reef
