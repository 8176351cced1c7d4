#include "reef/rendezvous.h"

#include <gtest/gtest.h>

#include <cstdlib>
#include <map>
#include <optional>
#include <string>
#include <vector>

#include "reef/error.h"

namespace reef {
namespace {

using Variables = std::map<std::string, std::string>;

Environment environment_of(Variables variables) {
  return [variables = std::move(variables)](const char* name) -> std::optional<std::string> {
    const auto found = variables.find(name);
    if (found == variables.end()) return std::nullopt;
    return found->second;
  };
}

Rendezvous resolve(const Variables& variables, const ProcessGroupOptions& options = {}) {
  return resolve_rendezvous(options, environment_of(variables));
}

std::string text(const Rendezvous& decision) {
  std::string where = "alone";
  if (decision.store == StoreKind::kTcp) where = "tcp " + decision.host + " " + std::to_string(decision.port);
  if (decision.store == StoreKind::kFile) where = "file " + decision.path;
  return decision.source + ": " + std::to_string(decision.rank) + "/" + std::to_string(decision.world_size) +
         " local " + std::to_string(decision.local_rank) + ", " + where +
         (decision.serves ? ", serves, " : ", ") + decision.prefix;
}

Variables operator+(Variables left, const Variables& right) {
  for (const auto& [name, value] : right) left[name] = value;
  return left;
}

ProcessGroupOptions with_store(const std::string& store) {
  ProcessGroupOptions options;
  options.store = store;
  return options;
}

ProcessGroupOptions explicitly(std::optional<int> rank, std::optional<int> world_size,
                               const std::string& store) {
  auto options = with_store(store);
  options.rank = rank;
  options.world_size = world_size;
  return options;
}

const Variables kMaster = {{"MASTER_ADDR", "alpha"}, {"MASTER_PORT", "29500"}};
const Variables kPlain = Variables{{"RANK", "1"}, {"WORLD_SIZE", "4"}, {"LOCAL_RANK", "1"}} + kMaster;
const Variables kAgent = {{"TORCHELASTIC_USE_AGENT_STORE", "True"}, {"TORCHELASTIC_RESTART_COUNT", "2"}};
const Variables kOpenMpi = {
    {"OMPI_COMM_WORLD_RANK", "2"}, {"OMPI_COMM_WORLD_SIZE", "8"}, {"OMPI_COMM_WORLD_LOCAL_RANK", "0"}};
const Variables kPmi = {{"PMI_RANK", "0"}, {"PMI_SIZE", "2"}};
const Variables kSlurm = {{"SLURM_PROCID", "3"}, {"SLURM_STEP_NUM_TASKS", "4"}, {"SLURM_LOCALID", "1"}};

TEST(Rendezvous, DecidesForEachEnvironment) {
  struct Row {
    Variables variables;
    ProcessGroupOptions options;
    std::string decision;
  };
  const std::string store = "tcp://beta:1234";
  const std::vector<Row> rows = {
      {{}, {}, "alone: 0/1 local 0, alone, /reef"},
      {{{"RANK", ""}, {"MASTER_ADDR", ""}}, {}, "alone: 0/1 local 0, alone, /reef"},
      {kPlain, {}, "torchrun: 1/4 local 1, tcp alpha 29500, /reef"},
      {kPlain + Variables{{"RANK", "0"}}, {}, "torchrun: 0/4 local 1, tcp alpha 29500, serves, /reef"},
      {kPlain + Variables{{"LOCAL_RANK", ""}}, {}, "torchrun: 1/4 local 0, tcp alpha 29500, /reef"},
      {kPlain + kAgent, {}, "torchrun: 1/4 local 1, tcp alpha 29500, /reef/attempt_2"},
      {kPlain + kAgent + Variables{{"RANK", "0"}},
       {},
       "torchrun: 0/4 local 1, tcp alpha 29500, /reef/attempt_2"},
      {kPlain + Variables{{"RANK", "0"}, {"TORCHELASTIC_USE_AGENT_STORE", "False"}},
       {},
       "torchrun: 0/4 local 1, tcp alpha 29500, serves, /reef"},
      // Our own store is ours to serve, whatever the agent does.
      {kPlain + kAgent + Variables{{"RANK", "0"}}, with_store(store),
       "torchrun: 0/4 local 1, tcp beta 1234, serves, /reef/attempt_2"},
      {{{"RANK", "0"}, {"WORLD_SIZE", "1"}}, {}, "torchrun: 0/1 local 0, alone, /reef"},
      {Variables{{"RANK", "0"}, {"WORLD_SIZE", "1"}, {"LOCAL_RANK", "0"}} + kMaster + kAgent,
       {},
       "torchrun: 0/1 local 0, alone, /reef/attempt_2"},
      {kPlain + kOpenMpi + kSlurm, {}, "torchrun: 1/4 local 1, tcp alpha 29500, /reef"},
      {kOpenMpi + kMaster, {}, "Open MPI: 2/8 local 0, tcp alpha 29500, /reef"},
      {kOpenMpi + kMaster + kPmi + kSlurm, {}, "Open MPI: 2/8 local 0, tcp alpha 29500, /reef"},
      {kOpenMpi, with_store(store), "Open MPI: 2/8 local 0, tcp beta 1234, /reef"},
      {kOpenMpi + kMaster, with_store("file:///tmp/meet"), "Open MPI: 2/8 local 0, file /tmp/meet, /reef"},
      {{{"OMPI_COMM_WORLD_RANK", "0"}, {"OMPI_COMM_WORLD_SIZE", "1"}},
       {},
       "Open MPI: 0/1 local 0, alone, /reef"},
      {kPmi + kMaster, {}, "PMI: 0/2 local 0, tcp alpha 29500, serves, /reef"},
      {kPmi + kMaster + Variables{{"PMI_RANK", "1"}, {"MPI_LOCALRANKID", "1"}},
       {},
       "PMI: 1/2 local 1, tcp alpha 29500, /reef"},
      {kSlurm + kMaster, {}, "Slurm: 3/4 local 1, tcp alpha 29500, /reef"},
      {kSlurm + Variables{{"SLURM_STEP_NODELIST", "n[07-09,3],x"}, {"MASTER_PORT", "1"}},
       {},
       "Slurm: 3/4 local 1, tcp n07 1, /reef"},
      {kSlurm + kMaster + Variables{{"SLURM_STEP_NODELIST", "n[07-09]"}},
       {},
       "Slurm: 3/4 local 1, tcp alpha 29500, /reef"},
      {{{"SLURM_PROCID", "0"}, {"SLURM_LOCALID", "0"}, {"SLURM_NTASKS", "4"}},
       {},
       "alone: 0/1 local 0, alone, /reef"},
      {{{"SLURM_PROCID", "0"}, {"SLURM_STEP_NUM_TASKS", "1"}}, {}, "Slurm: 0/1 local 0, alone, /reef"},
      {kPlain, explicitly(0, 3, store), "options: 0/3 local 0, tcp beta 1234, serves, /reef"},
      {{}, explicitly(2, 3, "tcp://[::1]:65535"), "options: 2/3 local 0, tcp ::1 65535, /reef"},
      {{}, explicitly(2, 3, "file:///a/b c"), "options: 2/3 local 0, file /a/b c, /reef"},
      {kPlain, explicitly(0, 1, ""), "options: 0/1 local 0, alone, /reef"},
      {{}, explicitly(0, 1, store), "options: 0/1 local 0, alone, /reef"},
  };
  for (std::size_t i = 0; i < rows.size(); ++i) {
    try {
      EXPECT_EQ(text(resolve(rows[i].variables, rows[i].options)), rows[i].decision) << "row " << i;
    } catch (const ConfigError& error) {
      ADD_FAILURE() << "row " << i << ", " << rows[i].decision << ": " << message_of(error);
    }
  }
}

TEST(Rendezvous, ReadsTheFirstHostOfASlurmList) {
  const std::vector<std::pair<std::string, std::string>> rows = {
      {"alpha", "alpha"},
      {"alpha,beta", "alpha"},
      {"node[01-04,7],x", "node01"},
      {"node[7,01-04]", "node7"},
      {"x,node[1-2]", "x"},
      {"gpu-a[10-12]", "gpu-a10"},
      {"rack[0-1]n[3-4]-ib", "rack0n3-ib"},
      {"n[5]", "n5"},
      {"10.0.0.[1-2]", "10.0.0.1"},
  };
  for (const auto& [list, host] : rows) {
    const auto decision = resolve(kSlurm + Variables{{"SLURM_STEP_NODELIST", list}, {"MASTER_PORT", "5"}});
    EXPECT_EQ(decision.host, host) << list;
  }
}

/// Each refusal names what is wrong, and what to do.
TEST(Rendezvous, RefusesWhatIsHalfSetOrWrong) {
  struct Row {
    Variables variables;
    ProcessGroupOptions options;
    std::vector<std::string> words;
  };
  ProcessGroupOptions hurried;
  hurried.timeout = std::chrono::milliseconds(0);
  ProcessGroupOptions fluttering;
  fluttering.heartbeat = std::chrono::milliseconds(999);
  const auto without = [](Variables variables, const char* name) {
    variables.erase(name);
    return variables;
  };
  const std::vector<Row> rows = {
      {without(kPlain, "WORLD_SIZE"), {}, {"RANK is set", "WORLD_SIZE is not", "set both"}},
      {without(kPlain, "RANK"), {}, {"WORLD_SIZE is set", "RANK is not"}},
      {without(kPlain, "MASTER_ADDR"), {}, {"MASTER_PORT is set", "MASTER_ADDR is not", "host of rank 0"}},
      {without(kPlain, "MASTER_PORT"), {}, {"MASTER_ADDR is set", "MASTER_PORT is not", "free port"}},
      {{{"RANK", "1"}, {"WORLD_SIZE", "2"}}, {}, {"2 ranks", "MASTER_ADDR and MASTER_PORT", "not set"}},
      {kPlain + Variables{{"MASTER_PORT", "0"}}, {}, {"MASTER_PORT is '0'", "1 to 65535"}},
      {kPlain + Variables{{"MASTER_PORT", "65536"}}, {}, {"MASTER_PORT is '65536'"}},
      {kPlain + Variables{{"MASTER_PORT", "29500x"}}, {}, {"MASTER_PORT is '29500x'"}},
      {kPlain + Variables{{"MASTER_PORT", "99999999999999"}}, {}, {"MASTER_PORT is '99999999999999'"}},
      {kPlain + Variables{{"RANK", "4"}}, {}, {"RANK is 4", "WORLD_SIZE is 4"}},
      {kPlain + Variables{{"RANK", "-1"}}, {}, {"RANK is '-1'", "at least 0"}},
      {kPlain + Variables{{"RANK", "one"}}, {}, {"RANK is 'one'", "whole number"}},
      {kPlain + Variables{{"RANK", "1.0"}}, {}, {"RANK is '1.0'"}},
      {kPlain + Variables{{"RANK", " 1"}}, {}, {"RANK is ' 1'"}},
      {kPlain + Variables{{"WORLD_SIZE", "0"}}, {}, {"WORLD_SIZE is '0'", "at least 1"}},
      {kPlain + Variables{{"LOCAL_RANK", "x"}}, {}, {"LOCAL_RANK is 'x'"}},
      {kPlain + Variables{{"LOCAL_RANK", "4"}}, {}, {"LOCAL_RANK is 4", "WORLD_SIZE is 4"}},
      {kPlain + Variables{{"TORCHELASTIC_USE_AGENT_STORE", "True"}},
       {},
       {"TORCHELASTIC_RESTART_COUNT is not set"}},
      {kPlain + kAgent + Variables{{"TORCHELASTIC_USE_AGENT_STORE", "yes"}}, {}, {"'yes'", "True or False"}},
      {kPlain + kAgent + Variables{{"TORCHELASTIC_RESTART_COUNT", "a"}},
       {},
       {"TORCHELASTIC_RESTART_COUNT is 'a'"}},
      {{{"MASTER_ADDR", "alpha"}}, {}, {"MASTER_ADDR is set", "run alone", "torchrun"}},
      {{{"MASTER_PORT", "1"}}, {}, {"MASTER_PORT is set", "run alone"}},
      {kMaster, {}, {"MASTER_ADDR is set", "RANK and WORLD_SIZE"}},
      {{{"LOCAL_RANK", "0"}}, {}, {"LOCAL_RANK is set"}},
      {kAgent, {}, {"TORCHELASTIC_USE_AGENT_STORE is set"}},
      {without(kOpenMpi, "OMPI_COMM_WORLD_SIZE") + kMaster,
       {},
       {"OMPI_COMM_WORLD_RANK is set", "OMPI_COMM_WORLD_SIZE is not"}},
      {without(kOpenMpi, "OMPI_COMM_WORLD_RANK") + kMaster,
       {},
       {"OMPI_COMM_WORLD_SIZE is set", "OMPI_COMM_WORLD_RANK is not"}},
      {kOpenMpi, {}, {"Open MPI started 8 ranks", "MASTER_ADDR and MASTER_PORT"}},
      {kOpenMpi + Variables{{"MASTER_ADDR", "alpha"}}, {}, {"MASTER_PORT is not"}},
      {{{"PMI_RANK", "0"}}, {}, {"PMI_RANK is set", "PMI_SIZE is not"}},
      {kPmi, {}, {"PMI started 2 ranks"}},
      {{{"SLURM_STEP_NUM_TASKS", "4"}}, {}, {"SLURM_STEP_NUM_TASKS is set", "SLURM_PROCID is not"}},
      {kSlurm, {}, {"Slurm started 4 ranks", "MASTER_ADDR and MASTER_PORT"}},
      {kSlurm + Variables{{"SLURM_STEP_NODELIST", "n[1-2]"}},
       {},
       {"MASTER_PORT is not set", "free port of n1"}},
      {kSlurm + Variables{{"SLURM_STEP_NODELIST", "n[1-2"}, {"MASTER_PORT", "5"}},
       {},
       {"SLURM_STEP_NODELIST is 'n[1-2'", "MASTER_ADDR"}},
      {kSlurm + Variables{{"SLURM_STEP_NODELIST", "n[]"}, {"MASTER_PORT", "5"}},
       {},
       {"SLURM_STEP_NODELIST is 'n[]'"}},
      {kSlurm + Variables{{"SLURM_STEP_NODELIST", ",n1"}, {"MASTER_PORT", "5"}},
       {},
       {"SLURM_STEP_NODELIST is ',n1'"}},
      {kSlurm + Variables{{"SLURM_STEP_NODELIST", "n]"}, {"MASTER_PORT", "5"}},
       {},
       {"SLURM_STEP_NODELIST is 'n]'"}},
      {{}, explicitly(0, std::nullopt, "tcp://a:1"), {"rank is given", "world_size is not"}},
      {{}, explicitly(std::nullopt, 2, "tcp://a:1"), {"world_size is given", "rank is not"}},
      {kPlain, explicitly(0, std::nullopt, ""), {"world_size is not"}},
      {{}, explicitly(0, 2, ""), {"store is not", "2 ranks meet"}},
      {{}, explicitly(2, 2, "tcp://a:1"), {"rank is 2", "world_size 2"}},
      {{}, explicitly(-1, 2, "tcp://a:1"), {"rank is -1"}},
      {{}, explicitly(0, 0, ""), {"world_size 0"}},
      {{}, with_store("tcp://a:1"), {"store is given", "rank and world_size"}},
      {{}, explicitly(0, 1, "a:1"), {"'a:1'", "tcp://host:port"}},
      {{}, explicitly(0, 2, "tcp://a"), {"'tcp://a'", "no port"}},
      {{}, explicitly(0, 2, "tcp://:1"), {"'tcp://:1'", "no host"}},
      {{}, explicitly(0, 2, "tcp://a:"), {"port of", "''"}},
      {{}, explicitly(0, 2, "tcp://a:b"), {"port of", "'b'"}},
      {{}, explicitly(0, 2, "tcp://a:70000"), {"'70000'", "1 to 65535"}},
      {{}, explicitly(0, 2, "tcp://::1:29500"), {"in brackets"}},
      {{}, explicitly(0, 2, "tcp://[::1]"), {"no port"}},
      {{}, explicitly(0, 2, "tcp://[]:1"), {"no host"}},
      {{}, explicitly(0, 2, "tcp://a/b:1"), {"not understood"}},
      {{}, explicitly(0, 2, "file://relative"), {"absolute path"}},
      {{}, explicitly(0, 2, "file:///folder/"), {"absolute path of a file"}},
      {{}, explicitly(0, 2, "udp://a:1"), {"tcp://host:port or file:///path"}},
      {{}, hurried, {"timeout is 0 ms", "positive"}},
      {{}, fluttering, {"heartbeat is 999 ms", "at least 1000", "0 for none"}},
  };
  for (std::size_t i = 0; i < rows.size(); ++i) {
    try {
      ADD_FAILURE() << "row " << i << " was accepted: " << text(resolve(rows[i].variables, rows[i].options));
    } catch (const ConfigError& error) {
      for (const auto& word : rows[i].words) {
        EXPECT_NE(message_of(error).find(word), std::string::npos)
            << "row " << i << ": '" << word << "' is not in: " << message_of(error);
      }
    }
  }
}

/// Over all subsets of the variables: an environment is accepted exactly if the first launcher that appears
/// in it has said everything, and what is decided is what that launcher said. Written down by itself, not by
/// the code's rules.
TEST(Rendezvous, NoHalfSetEnvironmentIsEverAccepted) {
  const std::vector<std::pair<const char*, const char*>> all = {
      {"RANK", "1"},
      {"WORLD_SIZE", "2"},
      {"LOCAL_RANK", "1"},
      {"MASTER_ADDR", "alpha"},
      {"MASTER_PORT", "29500"},
      {"TORCHELASTIC_USE_AGENT_STORE", "True"},
      {"TORCHELASTIC_RESTART_COUNT", "0"},
      {"OMPI_COMM_WORLD_RANK", "3"},
      {"OMPI_COMM_WORLD_SIZE", "4"},
      {"PMI_RANK", "5"},
      {"PMI_SIZE", "6"},
      {"SLURM_PROCID", "7"},
      {"SLURM_STEP_NUM_TASKS", "8"},
      {"SLURM_STEP_NODELIST", "n[1-8]"},
  };
  int accepted = 0;
  for (unsigned subset = 0; subset < 1U << all.size(); ++subset) {
    Variables variables;
    for (std::size_t i = 0; i < all.size(); ++i) {
      if ((subset >> i & 1U) != 0) variables.insert(all[i]);
    }
    const auto has = [&](const char* name) { return variables.contains(name); };
    const bool master = has("MASTER_ADDR") && has("MASTER_PORT");
    bool complete = false;
    int world_size = 1;
    if (has("RANK") || has("WORLD_SIZE")) {
      const bool agent = !has("TORCHELASTIC_USE_AGENT_STORE") || has("TORCHELASTIC_RESTART_COUNT");
      complete = has("RANK") && has("WORLD_SIZE") && master && agent;
      world_size = 2;
    } else if (has("OMPI_COMM_WORLD_RANK") || has("OMPI_COMM_WORLD_SIZE")) {
      complete = has("OMPI_COMM_WORLD_RANK") && has("OMPI_COMM_WORLD_SIZE") && master;
      world_size = 4;
    } else if (has("PMI_RANK") || has("PMI_SIZE")) {
      complete = has("PMI_RANK") && has("PMI_SIZE") && master;
      world_size = 6;
    } else if (has("SLURM_STEP_NUM_TASKS")) {
      complete =
          has("SLURM_PROCID") && has("MASTER_PORT") && (has("MASTER_ADDR") || has("SLURM_STEP_NODELIST"));
      world_size = 8;
    } else {
      complete = !has("MASTER_ADDR") && !has("MASTER_PORT") && !has("LOCAL_RANK") &&
                 !has("TORCHELASTIC_USE_AGENT_STORE") && !has("TORCHELASTIC_RESTART_COUNT");
    }
    std::string listed;
    for (const auto& [name, value] : variables) listed += name + "=" + value + " ";
    try {
      const auto decision = resolve(variables);
      ASSERT_TRUE(complete) << listed;
      ASSERT_EQ(decision.world_size, world_size) << listed;
      ASSERT_EQ(decision.rank, world_size - 1) << listed;
      ++accepted;
    } catch (const ConfigError& error) {
      ASSERT_FALSE(complete) << listed << message_of(error);
    }
  }
  EXPECT_GT(accepted, 500);
}

TEST(Rendezvous, ReadsTheProcessEnvironment) {
  ::setenv("REEF_RENDEZVOUS_TEST", "value", 1);
  EXPECT_EQ(process_environment("REEF_RENDEZVOUS_TEST"), "value");
  ::setenv("REEF_RENDEZVOUS_TEST", "", 1);
  EXPECT_EQ(process_environment("REEF_RENDEZVOUS_TEST"), std::nullopt);
  ::unsetenv("REEF_RENDEZVOUS_TEST");
  EXPECT_EQ(process_environment("REEF_RENDEZVOUS_TEST"), std::nullopt);
}

}  // namespace
}  // namespace reef
