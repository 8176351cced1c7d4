#pragma once

#include <chrono>
#include <cstdint>
#include <functional>
#include <optional>
#include <string>

#include "reef/export.h"

namespace reef {

/// How to meet the other ranks. What is left empty comes from the environment (see resolve_rendezvous).
struct ProcessGroupOptions {
  std::optional<int> rank;  ///< with `world_size` and `store`: explicit, the environment is not read
  std::optional<int> world_size;
  std::string store;      ///< "tcp://host:port" (rank 0 serves it) or "file:///path" (shared by all ranks)
  std::string interface;  ///< for gloo, such as "eth0"; empty: GLOO_SOCKET_IFNAME, else loopback if all ranks
                          ///< share this machine, else the one the host name is on
  std::chrono::milliseconds timeout =
      std::chrono::minutes(5);  ///< of the bring-up, and of each collective after it
  /// A rank that others wait for and that has given no sign of life for so long (its process stopped, its
  /// machine hanging) has failed. At least 1 s, or 0: only the timeout counts. Needs a store by tcp.
  std::chrono::milliseconds heartbeat = std::chrono::seconds(10);
};

enum class StoreKind : std::uint8_t {
  kNone,  ///< world of one
  kTcp,
  kFile,
};

/// Where this process stands among the ranks and where they meet: the decision, before any socket is opened.
struct Rendezvous {
  int rank = 0;
  int world_size = 1;
  int local_rank = 0;  ///< among the ranks of this host: which device to take
  StoreKind store = StoreKind::kNone;
  std::string host;        ///< kTcp
  std::uint16_t port = 0;  ///< kTcp
  bool serves = false;     ///< kTcp: this process opens the port (rank 0, unless torchrun's agent serves it)
  std::string path;        ///< kFile
  std::string prefix;      ///< of every key in the store; differs between restarts under torchrun
  std::string source;      ///< "options", "torchrun", "Open MPI", "PMI", "Slurm" or "alone"
};

/// Reads one environment variable; nullopt if it is not set. An empty value counts as not set.
using Environment = std::function<std::optional<std::string>(const char* name)>;
REEF_API std::optional<std::string> process_environment(const char* name);

/// Decides in this order: explicit options; torchrun (RANK, WORLD_SIZE, LOCAL_RANK, MASTER_ADDR, MASTER_PORT,
/// TORCHELASTIC_*); Open MPI (OMPI_COMM_WORLD_*); PMI (PMI_RANK, PMI_SIZE: MPICH, Intel MPI); Slurm
/// (SLURM_PROCID with SLURM_STEP_NUM_TASKS); none of them: a world of one. mpirun's and Slurm's ranks meet at
/// MASTER_ADDR:MASTER_PORT or at `options.store`; under Slurm MASTER_ADDR defaults to the first host of
/// SLURM_STEP_NODELIST. Throws ConfigError for a half-set environment, a value that is not a number, a rank
/// outside [0, world_size), a store address that cannot be read: each names the variable and what to set.
REEF_API Rendezvous resolve_rendezvous(const ProcessGroupOptions& options = {},
                                       const Environment& environment = process_environment);

}  // namespace reef
