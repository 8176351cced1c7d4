#include "reef/rendezvous.h"

#include <algorithm>
#include <charconv>
#include <cstdlib>
#include <initializer_list>
#include <string_view>
#include <system_error>

#include "reef/error.h"

namespace reef {
namespace {

constexpr int kLargestPort = 65535;
constexpr const char* kPrefix = "/reef";

std::optional<int> integer_in(std::string_view text) {
  int value = 0;
  const auto [end, error] = std::from_chars(text.data(), text.data() + text.size(), value);
  if (error != std::errc{} || end != text.data() + text.size()) return std::nullopt;
  return value;
}

std::string quoted(std::string_view text) {
  std::string result = "'";
  return result.append(text).append("'");
}

/// Where the ranks meet.
struct Address {
  StoreKind kind = StoreKind::kNone;
  std::string host;
  std::uint16_t port = 0;
  std::string path;
};

std::uint16_t parse_port(std::string_view text, const std::string& what) {
  const auto port = integer_in(text);
  if (!port || *port < 1 || *port > kLargestPort) {
    throw ConfigError(what + " is " + quoted(text) + ", which is no port: set a number from 1 to 65535.");
  }
  return static_cast<std::uint16_t>(*port);
}

Address parse_store(std::string_view store) {
  constexpr std::string_view kTcp = "tcp://";
  constexpr std::string_view kFile = "file://";
  const std::string what = "ProcessGroupOptions::store " + quoted(store);
  if (store.starts_with(kFile)) {
    const auto path = store.substr(kFile.size());
    if (!path.starts_with('/') || path.ends_with('/')) {
      throw ConfigError(what + " is not the absolute path of a file: write file:///path/of/the/file.");
    }
    return {.kind = StoreKind::kFile, .host = "", .path = std::string(path)};
  }
  if (!store.starts_with(kTcp)) {
    throw ConfigError(what + " is not understood: write tcp://host:port or file:///path.");
  }
  const auto rest = store.substr(kTcp.size());
  const auto colon = rest.rfind(':');
  if (colon == std::string_view::npos || rest.ends_with(']')) {
    throw ConfigError(what + " names no port: write tcp://host:port.");
  }
  auto host = rest.substr(0, colon);
  if (host.starts_with('[') && host.ends_with(']')) {
    host = host.substr(1, host.size() - 2);
  } else if (host.find_first_of("[]:/") != std::string_view::npos) {
    throw ConfigError(what + " is not understood: write tcp://host:port, an IPv6 address in brackets.");
  }
  if (host.empty()) throw ConfigError(what + " names no host: write tcp://host:port.");
  return {.kind = StoreKind::kTcp,
          .host = std::string(host),
          .port = parse_port(rest.substr(colon + 1), "the port of " + what),
          .path = ""};
}

/// The first host of a Slurm list such as "node[01-04,7],login" or "rack[0-1]n[3-4]-ib".
std::string first_host(std::string_view list) {
  std::string host;
  for (std::size_t i = 0; i < list.size() && list[i] != ','; ++i) {
    if (list[i] != '[') {
      host += list[i];
      continue;
    }
    const auto close = list.find(']', i);
    const auto end = list.find_first_of("-,]", i);
    if (close == std::string_view::npos || end == i + 1) return "";
    host += list.substr(i + 1, end - i - 1);
    i = close;
  }
  return host.find(']') == std::string::npos ? host : "";
}

/// The environment, read with errors that name the variable.
class Variables {
 public:
  explicit Variables(const Environment& environment) : environment_(environment) {}

  std::optional<std::string> text(const char* name) const {
    auto value = environment_(name);
    return value && !value->empty() ? value : std::nullopt;
  }
  bool set(const char* name) const { return text(name).has_value(); }
  std::optional<std::string> first_set(std::initializer_list<const char*> names) const {
    for (const char* name : names) {
      if (set(name)) return name;
    }
    return std::nullopt;
  }

  /// A number of at least `least`; nullopt if the variable is not set.
  std::optional<int> number(const char* name, int least) const {
    const auto value = text(name);
    if (!value) return std::nullopt;
    const auto result = integer_in(*value);
    if (!result || *result < least) {
      throw ConfigError(std::string(name) + " is " + quoted(*value) + ": set a whole number of at least " +
                        std::to_string(least) + ", or start the program with torchrun.");
    }
    return result;
  }

 private:
  const Environment& environment_;
};

/// The variables by which one launcher tells each process its place.
struct Launcher {
  const char* source;
  const char* rank;
  const char* world_size;
  const char* local_rank;
};
constexpr Launcher kTorchrun = {"torchrun", "RANK", "WORLD_SIZE", "LOCAL_RANK"};
constexpr Launcher kOpenMpi = {"Open MPI", "OMPI_COMM_WORLD_RANK", "OMPI_COMM_WORLD_SIZE",
                               "OMPI_COMM_WORLD_LOCAL_RANK"};
constexpr Launcher kPmi = {"PMI", "PMI_RANK", "PMI_SIZE", "MPI_LOCALRANKID"};
constexpr Launcher kSlurm = {"Slurm", "SLURM_PROCID", "SLURM_STEP_NUM_TASKS", "SLURM_LOCALID"};

Rendezvous place(const Launcher& launcher, const Variables& variables) {
  const auto rank = variables.number(launcher.rank, 0);
  const auto world_size = variables.number(launcher.world_size, 1);
  if (!rank || !world_size) {
    const char* present = rank ? launcher.rank : launcher.world_size;
    const char* absent = rank ? launcher.world_size : launcher.rank;
    throw ConfigError(std::string(present) + " is set, but " + absent +
                      " is not: set both, or neither to run alone.");
  }
  if (*rank >= *world_size) {
    throw ConfigError(std::string(launcher.rank) + " is " + std::to_string(*rank) + ", but " +
                      launcher.world_size + " is " + std::to_string(*world_size) +
                      ": ranks count from 0 to one less than the world size.");
  }
  const int local_rank = variables.number(launcher.local_rank, 0).value_or(0);
  if (local_rank >= *world_size) {
    throw ConfigError(std::string(launcher.local_rank) + " is " + std::to_string(local_rank) + ", but " +
                      launcher.world_size + " is " + std::to_string(*world_size) +
                      ": no host can hold more ranks than there are.");
  }
  Rendezvous result;
  result.rank = *rank;
  result.world_size = *world_size;
  result.local_rank = local_rank;
  result.prefix = kPrefix;
  result.source = launcher.source;
  return result;
}

void meet_at(Rendezvous& rendezvous, const Address& address) {
  rendezvous.store = address.kind;
  rendezvous.host = address.host;
  rendezvous.port = address.port;
  rendezvous.path = address.path;
  rendezvous.serves = address.kind == StoreKind::kTcp && rendezvous.rank == 0;
}

/// MASTER_ADDR:MASTER_PORT, both or neither (kNone). `default_host` stands in for MASTER_ADDR.
Address master(const Variables& variables, const std::optional<std::string>& default_host = std::nullopt) {
  const auto host = variables.set("MASTER_ADDR") ? variables.text("MASTER_ADDR") : default_host;
  const auto port = variables.text("MASTER_PORT");
  if (port && !host) {
    throw ConfigError("MASTER_PORT is set, but MASTER_ADDR is not: set MASTER_ADDR to the host of rank 0.");
  }
  if (!port && variables.set("MASTER_ADDR")) {
    throw ConfigError("MASTER_ADDR is set, but MASTER_PORT is not: set MASTER_PORT to a free port of " +
                      *host + ".");
  }
  if (!port) return {};
  return {.kind = StoreKind::kTcp, .host = *host, .port = parse_port(*port, "MASTER_PORT"), .path = ""};
}

void meet(Rendezvous& rendezvous, const ProcessGroupOptions& options, const Variables& variables) {
  if (!options.store.empty()) {
    const auto address = parse_store(options.store);
    if (rendezvous.world_size > 1) meet_at(rendezvous, address);
    return;
  }
  std::optional<std::string> default_host;
  if (rendezvous.source == kSlurm.source) {
    if (const auto list = variables.text("SLURM_STEP_NODELIST")) {
      default_host = first_host(*list);
      if (default_host->empty()) {
        throw ConfigError("SLURM_STEP_NODELIST is " + quoted(*list) +
                          ", whose first host cannot be read: set MASTER_ADDR to the host of rank 0.");
      }
    }
  }
  const auto address = master(variables, default_host);
  if (rendezvous.world_size == 1) return;
  if (address.kind == StoreKind::kNone) {
    const bool port_only = default_host.has_value();
    throw ConfigError(rendezvous.source + " started " + std::to_string(rendezvous.world_size) +
                      " ranks, but " + (port_only ? "MASTER_PORT is" : "MASTER_ADDR and MASTER_PORT are") +
                      " not set: set " +
                      (port_only ? "it to a free port of " + *default_host
                                 : "them to the host of rank 0 and a free port of it") +
                      ", or give ProcessGroupOptions::store.");
  }
  meet_at(rendezvous, address);
}

/// torchrun's agent serves the store and starts the ranks anew after a failure; a number in the keys keeps
/// the new ranks from reading what the old ones left.
void follow_agent(Rendezvous& rendezvous, const ProcessGroupOptions& options, const Variables& variables) {
  const auto restarts = variables.number("TORCHELASTIC_RESTART_COUNT", 0);
  const auto agent = variables.text("TORCHELASTIC_USE_AGENT_STORE");
  if (agent && *agent != "True" && *agent != "False") {
    throw ConfigError("TORCHELASTIC_USE_AGENT_STORE is " + quoted(*agent) +
                      ": torchrun sets True or False; unset it if torchrun is not in use.");
  }
  const bool agent_serves = agent == "True";
  if (agent_serves && !restarts) {
    throw ConfigError(
        "TORCHELASTIC_USE_AGENT_STORE is True, but TORCHELASTIC_RESTART_COUNT is not set: start the program "
        "with torchrun, or unset both.");
  }
  if (restarts) rendezvous.prefix += "/attempt_" + std::to_string(*restarts);
  if (agent_serves && options.store.empty()) rendezvous.serves = false;
}

Rendezvous from_options(const ProcessGroupOptions& options) {
  if (!options.rank || !options.world_size) {
    throw ConfigError(std::string("ProcessGroupOptions::") + (options.rank ? "rank" : "world_size") +
                      " is given, but " + (options.rank ? "world_size" : "rank") +
                      " is not: give rank, world_size and store, or none of them.");
  }
  if (*options.world_size < 1 || *options.rank < 0 || *options.rank >= *options.world_size) {
    throw ConfigError("ProcessGroupOptions::rank is " + std::to_string(*options.rank) + " and world_size " +
                      std::to_string(*options.world_size) +
                      ": ranks count from 0 to one less than the world size.");
  }
  Rendezvous result;
  result.rank = *options.rank;
  result.world_size = *options.world_size;
  result.prefix = kPrefix;
  result.source = "options";
  if (options.store.empty() && result.world_size > 1) {
    throw ConfigError("ProcessGroupOptions::rank and world_size are given, but store is not: say where the " +
                      std::to_string(result.world_size) + " ranks meet, tcp://host:port or file:///path.");
  }
  if (!options.store.empty()) {
    const auto address = parse_store(options.store);
    if (result.world_size > 1) meet_at(result, address);
  }
  return result;
}

Rendezvous alone(const ProcessGroupOptions& options, const Variables& variables) {
  if (!options.store.empty()) {
    throw ConfigError(
        "ProcessGroupOptions::store is given, but neither rank and world_size nor a launcher's variables "
        "are: give "
        "them, or start the program with torchrun, mpirun or srun.");
  }
  const auto half =
      variables.first_set({"MASTER_ADDR", "MASTER_PORT", "LOCAL_RANK", "TORCHELASTIC_USE_AGENT_STORE",
                           "TORCHELASTIC_RESTART_COUNT", "OMPI_COMM_WORLD_LOCAL_RANK", "MPI_LOCALRANKID"});
  if (half) {
    throw ConfigError(
        *half +
        " is set, but no variable gives this process its rank (RANK and WORLD_SIZE): unset it to run "
        "alone, or start the program with torchrun.");
  }
  Rendezvous result;
  result.prefix = kPrefix;
  result.source = "alone";
  return result;
}

}  // namespace

std::optional<std::string> process_environment(const char* name) {
  const char* value = std::getenv(name);
  if (value == nullptr || *value == '\0') return std::nullopt;
  return value;
}

Rendezvous resolve_rendezvous(const ProcessGroupOptions& options, const Environment& environment) {
  if (options.timeout.count() <= 0) {
    throw ConfigError("ProcessGroupOptions::timeout is " + std::to_string(options.timeout.count()) +
                      " ms: give a positive duration.");
  }
  if (const auto beat = options.heartbeat.count(); beat != 0 && beat < 1000) {
    throw ConfigError("ProcessGroupOptions::heartbeat is " + std::to_string(beat) +
                      " ms: give at least 1000, or 0 for none.");
  }
  if (options.rank || options.world_size) return from_options(options);

  const Variables variables(environment);
  const auto is_set = [&](const Launcher& launcher) {
    return variables.set(launcher.rank) || variables.set(launcher.world_size);
  };
  const bool torchrun = is_set(kTorchrun);
  const Launcher* launcher = torchrun           ? &kTorchrun
                             : is_set(kOpenMpi) ? &kOpenMpi
                             : is_set(kPmi)     ? &kPmi
                             // SLURM_PROCID alone is a batch script, whose process is no rank of anything.
                             : variables.set(kSlurm.world_size) ? &kSlurm
                                                                : nullptr;
  if (launcher == nullptr) return alone(options, variables);
  auto result = place(*launcher, variables);
  meet(result, options, variables);
  if (torchrun) follow_agent(result, options, variables);
  return result;
}

}  // namespace reef
