#pragma once

#include <cstdint>
#include <string>
#include <string_view>
#include <vector>

#include "reef/export.h"

namespace reef {

/// Pure data and pure code (no Torch): which rank of a pipeline computes what, and in which order. A model is
/// a chain of stages (chain_profile.h). A chunk is a run of consecutive stages that lives on one rank; chunks
/// are numbered from 0 along the model. A batch is cut into micro-batches, numbered from 0. Messages are not
/// listed, since they follow from the actions: see pipeline_messages().

struct PipelineAction {
  enum class Kind : std::uint8_t {
    kForward,   ///< F: the forward pass of a chunk for a micro-batch
    kBackward,  ///< B: the whole backward pass
    kInput,     ///< I: the part of the backward pass that makes the gradient of the chunk's input
    kWeight,    ///< W: the rest of it, which makes the gradients of the chunk's weights
    kUpdate,    ///< U: an optimizer step for the chunk, of gradients up to those of the micro-batch
  };
  Kind kind = Kind::kForward;
  std::uint32_t chunk = 0;
  std::uint32_t micro_batch = 0;

  /// Gives chunk, kind and micro-batch, as torch.distributed.pipelining does: "2F0".
  REEF_API std::string text() const;
  friend bool operator==(const PipelineAction&, const PipelineAction&) = default;
};

/// Which version of a chunk's weights a pass uses. A version is the number of updates before it; see
/// pipeline_versions().
struct PipelineVersionRule {
  enum class Kind : std::uint8_t {
    kFlush,       ///< the weights as they were before the schedule: synchronous
    kStash,       ///< the newest of the chunk at the forward pass, kept for the backward pass (PipeDream)
    kVertical,    ///< that which chunk 0 used for the micro-batch, on all chunks (PipeDream, vertical sync)
    kTwoBuffers,  ///< one update behind, on all chunks (PipeDream-2BW)
    kNewest,      ///< the newest at each pass, so that the two may differ (PipeMare)
    kWave,        ///< a virtual worker's own updates, all of the same number of micro-batches ago (HetPipe)
  };
  Kind kind = Kind::kFlush;
  /// The number of micro-batches whose gradients an update adds up; of kWave, of a wave.
  std::uint32_t micro_batches_per_update = 1;
  /// Of kWave: how many waves of other virtual workers the weights may lack when a wave has ended (D of
  /// HetPipe).
  std::uint32_t staleness = 0;

  friend bool operator==(const PipelineVersionRule&, const PipelineVersionRule&) = default;
};

struct PipelineSchedule {
  std::string name;
  std::uint32_t micro_batches = 0;
  /// The rank of each chunk, for each direction. Micro-batch m is of direction m modulo their number: with
  /// two of them (Chimera, DualPipe) odd micro-batches find a replica of the model that is placed otherwise.
  /// Where chunks have several ranks that take turns, each combination of ranks that a micro-batch can meet
  /// is a direction.
  std::vector<std::vector<std::uint32_t>> rank_of;
  std::vector<std::vector<PipelineAction>> actions;  ///< of each rank, in its order
  PipelineVersionRule versions = {};

  std::uint32_t ranks() const { return static_cast<std::uint32_t>(actions.size()); }
  std::uint32_t chunks() const {
    return rank_of.empty() ? 0 : static_cast<std::uint32_t>(rank_of.front().size());
  }
  /// Gives the rank that computes a chunk for a micro-batch.
  std::uint32_t rank(std::uint32_t chunk, std::uint32_t micro_batch) const {
    return rank_of[micro_batch % rank_of.size()][chunk];
  }
  /// Writes a line for each rank: "rank 0: 0F0 0F1 0B0 ...".
  REEF_API std::string text() const;
  REEF_API std::string json() const;

  friend bool operator==(const PipelineSchedule&, const PipelineSchedule&) = default;
};

/// Reads PipelineSchedule::json(), or what a user has written like it, in which "versions" may be left out.
/// Throws ConfigError if the text is not of that form, or for what check() throws.
REEF_API PipelineSchedule pipeline_schedule_from_json(std::string_view text);

/// Throws ConfigError, which names rank and action, unless the schedule can run: each action is on the rank
/// of its chunk; each chunk runs forward once for each micro-batch, and then backward once, whole or as I and
/// W (or no chunk ever runs backward: a schedule to serve with); and ranks that run their actions in order
/// never wait for each other in a circle.
REEF_API void check(const PipelineSchedule& schedule);

/// Whether each rank makes the weight gradients of each of its chunks in ascending order of micro-batches:
/// then they are added up as one process would that takes these micro-batches one after another.
REEF_API bool adds_in_order(const PipelineSchedule& schedule);

/// A tensor that a chunk gives to later ones besides its output, and that is sent to each of them directly.
/// Its gradient is added up on its way back, from the last of them by way of the others to the chunk that has
/// given it: so its bits do not depend on where the model is cut.
struct PipelineSkip {
  std::uint32_t from = 0;         ///< chunk
  std::vector<std::uint32_t> to;  ///< chunks, ascending
  std::uint64_t bytes = 0;        ///< of the tensor, for one micro-batch; the gradient has as many

  friend bool operator==(const PipelineSkip&, const PipelineSkip&) = default;
};

/// A message that a schedule implies, from the rank that has made something to the one that needs it.
struct PipelineMessage {
  enum class Kind : std::uint8_t {
    kOutput,    ///< of `chunk`, for the next chunk, and what it gives to `to_chunk` besides
    kGradient,  ///< of the input of `chunk`, for the chunk before, and of what it has taken besides
    kNext,      ///< what follows from the last chunk's output, for the first one: see Pipeline::generate()
  };
  Kind kind = Kind::kOutput;
  std::uint32_t chunk = 0;     ///< that has made it
  std::uint32_t to_chunk = 0;  ///< that needs it
  std::uint32_t micro_batch = 0;
  std::uint32_t from = 0;  ///< rank
  std::uint32_t to = 0;    ///< rank

  friend bool operator==(const PipelineMessage&, const PipelineMessage&) = default;
};

/// Lists the messages in the order in which each rank sends them, rank by rank. What is for the same chunk
/// travels together. Throws ConfigError for skips that are not from a chunk to later ones.
REEF_API std::vector<PipelineMessage> pipeline_messages(const PipelineSchedule& schedule,
                                                        const std::vector<PipelineSkip>& skips = {});

/// Whether each rank needs the messages of every other rank in the order in which that one sends them: then a
/// transport without tags will do.
REEF_API bool receives_in_order(const PipelineSchedule& schedule);

/// Repeats a schedule for so many batches, one after another without a barrier between them. Micro-batches
/// are numbered on, so their number must be a multiple of the number of directions.
REEF_API PipelineSchedule repeated(const PipelineSchedule& schedule, std::uint32_t batches);

/// Adds an update of each chunk after it has made the weight gradients of every micro_batches-th micro-batch.
REEF_API PipelineSchedule with_updates(PipelineSchedule schedule, std::uint32_t micro_batches);

}  // namespace reef
