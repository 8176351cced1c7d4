// A buffer of the played device. It is surrounded by canary bytes, which no kernel may change.
#pragma once

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <vector>

namespace reef {

class DeviceBytes {
 public:
  /// Copies `values` to an address `shift` bytes past a multiple of 256, as the address of a view may be.
  template <class Value>
  explicit DeviceBytes(const std::vector<Value>& values, std::size_t shift = 0)
      : bytes_(values.size() * sizeof(Value)), room_(bytes_ + shift + kBoundary + 2 * kAround, kCanary) {
    const auto begin = reinterpret_cast<std::uintptr_t>(room_.data()) + kAround;
    first_ = kAround + (kBoundary - begin % kBoundary) % kBoundary + shift;
    if (bytes_ > 0) std::memcpy(data(), values.data(), bytes_);
  }

  std::uint8_t* data() { return room_.data() + first_; }
  template <class Value>
  Value* as() {
    return reinterpret_cast<Value*>(data());
  }
  template <class Value>
  std::vector<Value> copy() const {
    std::vector<Value> values(bytes_ / sizeof(Value));
    if (bytes_ > 0) std::memcpy(values.data(), room_.data() + first_, bytes_);
    return values;
  }
  bool is_whole_around() const {
    const auto begin = room_.begin(), end = room_.end();
    const auto is_canary = [](std::uint8_t byte) { return byte == kCanary; };
    const auto first = static_cast<std::ptrdiff_t>(first_), bytes = static_cast<std::ptrdiff_t>(bytes_);
    return std::all_of(begin, begin + first, is_canary) && std::all_of(begin + first + bytes, end, is_canary);
  }

 private:
  static constexpr std::size_t kBoundary = 256, kAround = 512;
  static constexpr std::uint8_t kCanary = 0xC5;
  std::size_t bytes_, first_ = 0;
  std::vector<std::uint8_t> room_;
};

}  // namespace reef
