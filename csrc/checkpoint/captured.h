#pragma once

#include <ATen/core/Tensor.h>
#include <c10/core/TensorImpl.h>

#include <cstdint>
#include <exception>
#include <string>
#include <unordered_map>
#include <vector>

#include "checkpoint/observed_run.h"
#include "checkpoint/storage_copy.h"

namespace reef {

/// What the first run of a function has found in memory that it did not make: what it reads there, a second
/// run must find there, too. What the first run reads and also writes is kept as it was before; of what it
/// only reads, the version.
class Captured {
 public:
  class FirstRun;
  class SecondRun;

  /// Of copies, which live as long as this does.
  std::uint64_t bytes() const;

 private:
  struct Found {
    std::vector<std::int64_t> sizes;  ///< of a tensor there
    at::ScalarType dtype;
    c10::VariableVersion version{c10::VariableVersion::DISABLED};
    std::uint32_t then = 0;
    bool is_read = false;         ///< by what does not write it
    bool is_overwritten = false;  ///< before that, all of it
    bool is_in_graph = false;     ///< and written
    StorageCopy before = {};
  };
  /// The memory that an operator was given as one of its arguments.
  struct Operand {
    std::size_t step;
    const c10::StorageImpl* storage;
  };

  std::unordered_map<const c10::StorageImpl*, Found> found_;
  std::vector<const Operator*> steps_;
  std::vector<Operand> operands_;  ///< of these, in order, what was captured
  ObservedRun::Made left_;         ///< what it made and has not freed
  std::exception_ptr failure_;
};

/// While one lives, operators of this thread are of the first run.
class Captured::FirstRun final : public ObservedRun {
 public:
  enum class For : bool { kTheProgram, kMeasurement };
  explicit FirstRun(Captured& captured, For what = For::kTheProgram)
      : ObservedRun(what == For::kTheProgram ? Kind::kFirst : Kind::kAgain), captured_(captured) {}
  ~FirstRun();

 private:
  void about_to_run(const OperatorCall& call) override;
  void about_to_write(Found& found, const at::Tensor& tensor, const Operator& op);

  Captured& captured_;
};

/// While one lives, within a WritesUndone, operators of this thread are of a second run, which finds what the
/// first one has found. Throws RecomputeError if that is no longer known: a tensor that was read was modified
/// by somebody else.
class Captured::SecondRun final : public ObservedRun {
 public:
  SecondRun(const Captured& captured, const std::string& what);
  ~SecondRun();

  /// Throws RecomputeError if the innermost second run of this thread was given, where the first was given
  /// what it had found, what the first has made: then something is carried from run to run.
  static void check_innermost();

 private:
  void about_to_run(const OperatorCall& call) override;
  void put_back(const StorageCopy& copy);

  const Captured& captured_;
  std::string what_;
  std::size_t step_ = 0, operand_ = 0;
  bool is_alike_ = false;  ///< the operators so far, once it has begun
  std::string carried_;    ///< the tensor, or ""
  std::unordered_map<const c10::StorageImpl*, bool> written_;
  SecondRun* outer_scope_;
};

}  // namespace reef
