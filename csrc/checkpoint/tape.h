#pragma once

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <functional>
#include <memory>
#include <mutex>
#include <string>
#include <utility>
#include <vector>

#include "autograd/saved_tensors.h"

namespace reef {

/// What autograd saves in one run of a function, by the order in which it does. The graph holds numbers, and
/// the tape the tensors, or it has forgotten them: then they are made anew when the first of them is wanted.
class Tape {
 public:
  /// `what` begins an error's sentence. `checks_values`: hashes of what is saved are kept, and compared.
  /// Tapes that are filled together share a lock.
  Tape(std::string what, bool checks_values,
       std::shared_ptr<std::recursive_mutex> lock = std::make_shared<std::recursive_mutex>())
      : what_(std::move(what)), checks_values_(checks_values), mutex_(std::move(lock)) {}

  /// `wanted` is called on the thread that wants a tensor, with the tape locked: if the tape is not whole, to
  /// make it so by retake(); if it is, before it is used.
  void set_wanted(std::function<void()> wanted) { wanted_ = std::move(wanted); }

  /// For the first run, whose graph is the program's, and holds this pointer.
  enum class Keep : bool { kNothing, kTensors };
  static SavedTensorScope::Make recording(const std::shared_ptr<Tape>& tape, Keep keep);

  /// Runs the function once more, its inputs detached, and keeps what it saves. kOnceWhole: ends it, by an
  /// exception from within, when all is there. Throws RecomputeError if what it saves is not what it saved
  /// first, and what it throws.
  enum class Stop : bool { kAtItsEnd, kOnceWhole };
  void retake(const std::function<void()>& function, Stop stop);

  bool is_whole() const { return whole_; }
  void forget();

  /// Storages that nothing but this tape has a reference to.
  std::vector<c10::Storage> own_storages() const;
  /// Of this tape.
  std::size_t references(const c10::StorageImpl& storage) const;

 private:
  class RecordingHook;
  class RetakingHook;
  /// What a tensor was when it was saved first.
  struct Saved {
    std::vector<std::int64_t> sizes;
    at::ScalarType dtype;
    c10::Device device;
    std::uint64_t hash;
  };
  Saved describe(const at::Tensor& tensor) const;
  void expect(std::size_t index, const at::Tensor& tensor) const;
  at::Tensor get(std::size_t index);

  std::string what_;
  bool checks_values_;
  std::function<void()> wanted_;
  std::shared_ptr<std::recursive_mutex> mutex_;
  std::vector<Saved> saved_;
  std::vector<at::Tensor> tensors_;  ///< by number; those that have been used are undefined
  bool whole_ = false;               ///< they are all there
};

}  // namespace reef
