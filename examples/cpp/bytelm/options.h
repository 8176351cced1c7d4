#pragma once

#include <c10/core/Device.h>

#include <cstdint>
#include <optional>
#include <string>
#include <vector>

#include "reef/shard.h"

namespace bytelm {

/// What the command line says. Sizes are in bytes of text (one token is one byte).
struct Options {
  std::vector<std::string> data;  ///< files and folders; empty: the Python standard library
  std::int64_t width = 128;
  std::int64_t depth = 4;
  std::int64_t heads = 4;
  std::int64_t context = 128;
  std::int64_t batch = 8;  ///< windows in a step of one rank
  std::int64_t steps = 1200;
  std::string optimizer = "adamw";
  std::string state;  ///< how reef::optim keeps its states; "": torch::optim keeps them
  reef::Stage stage = reef::Stage::kReplicate;               ///< what several ranks divide
  reef::Compression compression = reef::Compression::kNone;  ///< of gradients between ranks
  reef::CompressionOptions compression_options;
  double learning_rate = 3e-3;  ///< at the end of the warm-up
  std::int64_t seed = 0;
  std::int64_t threads = 0;  ///< 0: as many as LibTorch takes by itself
  std::string device = "cpu";
  std::int64_t eval_every = 200;
  std::int64_t sample = 400;
  std::string save;             ///< "": nothing is saved
  std::int64_t save_every = 0;  ///< 0: at the end only
  std::string resume;           ///< "": from the beginning
  std::string chart = "bytelm-memory.svg";
  std::string trace;    ///< "": none
  std::string losses;   ///< "": none
  std::string summary;  ///< "": none
  bool ledger = true;
  std::optional<std::int64_t> budget_bytes;  ///< nullopt: none
  std::string spill;                         ///< folder for pages; "": host memory
  std::int64_t pipeline = 0;  ///< micro-batches of a pipeline over the ranks; 0: the model is not cut
  std::string schedule;       ///< of the pipeline; "": planned for the ranks that there are
  std::int64_t replicas = 1;  ///< of the pipeline
  std::optional<std::int64_t> recompute_within_bytes;  ///< nullopt: nothing is computed twice
};

/// Reads the command line; nullopt if it asked for help, which is then on stdout. Throws reef::ConfigError.
std::optional<Options> parse_options(int argc, const char* const* argv);

/// The device that `text` names: "cpu", "cuda" (the one of this rank) or "cuda:1". Throws reef::ConfigError
/// if there is no such device.
c10::Device find_device(const std::string& text, int local_rank);

}  // namespace bytelm
