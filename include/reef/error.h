#pragma once

#include <c10/util/Exception.h>

#include <cstdint>
#include <exception>
#include <string>

#include "reef/export.h"

namespace reef {

/// Errors derive from LibTorch's own classes, so handlers that exist catch them, and Python receives them as
/// ValueError, torch.distributed.DistError and so on. Each says in one sentence what happened, where (rank,
/// parameter, operator, file), and the next step.

/// A value that a user gave (option, environment variable, text) cannot be used. Nothing has been changed.
class REEF_API ConfigError : public c10::ValueError {
 public:
  explicit ConfigError(const std::string& message);
};

/// A file could not be read or written; `path` and the operating system's `error_number` (0 if none) are
/// kept.
class REEF_API FileError : public c10::Error {
 public:
  FileError(const std::string& message, std::string path, int error_number = 0);
  const std::string& path() const { return path_; }
  int error_number() const { return error_number_; }

 private:
  std::string path_;
  int error_number_;
};

/// Memory did not suffice within a budget. The text contains " out of memory.", by which programs know such
/// errors.
class REEF_API BudgetError : public c10::OutOfMemoryError {
 public:
  BudgetError(const std::string& message, std::uint64_t smallest_budget_bytes);
  /// The least budget with which what failed would have gone on.
  std::uint64_t smallest_budget_bytes() const { return smallest_budget_bytes_; }

 private:
  std::uint64_t smallest_budget_bytes_;
};

/// A gradient held NaN or an infinity when an optimizer stepped; the text names the parameters.
class REEF_API NonFiniteGradient : public c10::Error {
 public:
  explicit NonFiniteGradient(const std::string& message);
};

/// A function that is checkpointed did not compute the same when it was run once more; the text says which of
/// the tensors that it saves for backward differs.
class REEF_API RecomputeError : public c10::Error {
 public:
  explicit RecomputeError(const std::string& message);
};

/// The process group could not be brought up on this rank.
class REEF_API ProcessGroupError : public c10::DistError {
 public:
  ProcessGroupError(const std::string& message, int rank);
  int rank() const { return rank_; }

 private:
  int rank_;
};

/// A collective or a message failed because a rank is gone, or has sent nonsense. `failed_rank` is -1 where
/// it could not be told which; in a subgroup it counts as in the group that init_process_group made.
class REEF_API RankFailed : public c10::DistBackendError {
 public:
  RankFailed(const std::string& message, int failed_rank);
  int failed_rank() const { return failed_rank_; }

 private:
  int failed_rank_;
};

/// Ranks of a group have made different calls where all make the same one (a backward pass, a collective, a
/// state dict), or have ended the shard whose call it is, so that others wait in vain: batches end earlier on
/// some of them, say. The text says which rank stands where. The group cannot be used any more; gradients are
/// what they were before the pass.
class REEF_API RanksOutOfStep : public c10::DistError {
 public:
  explicit RanksOutOfStep(const std::string& message);
};

/// A pass of backward was abandoned on every rank, since it failed on one, or one in no_sync before it did.
/// Gradients are what they were before it, but for what passes in no_sync had added up, which is dropped;
/// training can go on. (Stage::kParameters: where ranks exchange messages, see docs/shard.md.)
class REEF_API PassAbandoned : public c10::DistError {
 public:
  PassAbandoned(const std::string& message, int rank);
  int rank() const { return rank_; }

 private:
  int rank_;
};

/// The sentence of an exception, without the C++ backtrace that c10::Error::what() appends.
REEF_API std::string message_of(const std::exception& error);

}  // namespace reef
