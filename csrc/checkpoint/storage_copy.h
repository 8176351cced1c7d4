#pragma once

#include <ATen/core/Tensor.h>
#include <c10/core/Storage.h>

#include <cstdint>

namespace reef {

/// All that a storage holds, as it is at construction.
class StorageCopy {
 public:
  StorageCopy() = default;
  explicit StorageCopy(const c10::Storage& storage);

  bool is_there() const { return bytes_.defined(); }
  std::uint64_t bytes() const { return is_there() ? bytes_.nbytes() : 0; }
  /// The storage's bytes as a tensor, with a version of its own.
  at::Tensor place() const;
  /// Makes the storage hold that again. No version changes.
  void put_back() const;
  const at::Tensor& what() const { return bytes_; }

 private:
  c10::Storage storage_;
  at::Tensor bytes_;
};

}  // namespace reef
