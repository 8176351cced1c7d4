#pragma once

namespace reef {

/// While one lives, what this thread allocates is for a page whose room is there already: nobody is asked.
class OwnAllocation {
 public:
  OwnAllocation() { ++depth_; }
  ~OwnAllocation() { --depth_; }
  OwnAllocation(const OwnAllocation&) = delete;
  OwnAllocation& operator=(const OwnAllocation&) = delete;

  static bool is_being_made() { return depth_ > 0; }

 private:
  // Small enough for the static block, which is found without a call.
  [[gnu::tls_model("initial-exec")]] static inline constinit thread_local int depth_ = 0;
};

}  // namespace reef
