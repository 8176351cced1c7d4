// One rank, told on the command line what to do and what to suffer: brings up a group, runs all-reduces, and
// says in one line how it ended. tests/python/test_process_group.py starts several of them.
#include <ATen/ops/full.h>
#include <unistd.h>

#include <chrono>
#include <csignal>
#include <iostream>
#include <map>
#include <string>
#include <thread>

#include "reef/collectives.h"
#include "reef/error.h"
#include "reef/process_group.h"

namespace {

constexpr int kRankFailed = 10;  // exit codes
constexpr int kGroupFailed = 11;
constexpr int kConfigError = 12;

using Arguments = std::map<std::string, std::string>;

// Each has a value; those of the form rank:step happen on that rank before that step, counted from 0.
constexpr const char* kUsage =
    "rank_probe [--rank R] [--world-size N] [--store S] [--interface I] [--timeout-ms MS] [--steps K] "
    "[--groups N]\n"
    "           [--elements N | --elements-on-rank RANK:N] [--kill RANK:STEP] [--leave RANK:STEP] [--throw "
    "RANK:STEP]\n"
    "           [--late RANK:MS] [--then-sleep-ms MS] [--heartbeat-ms MS] [--stop RANK:STEP] [--stop-ms "
    "MS]\n";

/// The number after "rank:" if that rank is `rank`, else `otherwise`.
int on_rank(const Arguments& arguments, const char* name, int rank, int otherwise) {
  const auto found = arguments.find(name);
  if (found == arguments.end()) return otherwise;
  const auto colon = found->second.find(':');
  if (std::stoi(found->second.substr(0, colon)) != rank) return otherwise;
  return std::stoi(found->second.substr(colon + 1));
}

int number(const Arguments& arguments, const char* name, int otherwise) {
  const auto found = arguments.find(name);
  return found == arguments.end() ? otherwise : std::stoi(found->second);
}

std::string text(const Arguments& arguments, const char* name) {
  const auto found = arguments.find(name);
  return found == arguments.end() ? "" : found->second;
}

void sleep_ms(int duration) { std::this_thread::sleep_for(std::chrono::milliseconds(duration)); }

/// This process stands still for so long, with its connections open.
void stop_for(int duration) {
  const pid_t stopped = ::getpid();
  if (::fork() == 0) {
    const timespec time{duration / 1000, duration % 1000 * 1'000'000L};
    ::nanosleep(&time, nullptr);
    ::kill(stopped, SIGCONT);
    ::_exit(0);
  }
  ::kill(stopped, SIGSTOP);
}

void run(const Arguments& arguments) {
  reef::ProcessGroupOptions options;
  if (arguments.contains("--rank")) options.rank = number(arguments, "--rank", 0);
  if (arguments.contains("--world-size")) options.world_size = number(arguments, "--world-size", 0);
  options.store = text(arguments, "--store");
  options.interface = text(arguments, "--interface");
  options.timeout = std::chrono::milliseconds(number(arguments, "--timeout-ms", 120000));
  options.heartbeat = std::chrono::milliseconds(number(arguments, "--heartbeat-ms", 10000));

  for (int round = 0; round < number(arguments, "--groups", 1); ++round) {
    const auto group = reef::init_process_group(options);
    const int rank = group->getRank();
    const int size = group->getSize();
    std::cout << "up: rank " << rank << " of " << size << std::endl;
    const int elements =
        on_rank(arguments, "--elements-on-rank", rank, number(arguments, "--elements", 1000));
    for (int step = 0; step < number(arguments, "--steps", 3); ++step) {
      if (step == on_rank(arguments, "--kill", rank, -1)) ::kill(::getpid(), SIGKILL);
      if (step == on_rank(arguments, "--stop", rank, -1)) stop_for(number(arguments, "--stop-ms", 0));
      if (step == on_rank(arguments, "--leave", rank, -1)) ::_exit(0);
      if (step == on_rank(arguments, "--throw", rank, -1)) throw std::runtime_error("no more data");
      if (step == 0) sleep_ms(on_rank(arguments, "--late", rank, 0));
      const at::Tensor tensor = at::full({elements}, rank + 1.0);
      reef::all_reduce(tensor, group);
      if (tensor[0].item<double>() != size * (size + 1) / 2.0) throw std::logic_error("the sum is wrong");
    }
    reef::barrier(group);
  }
  sleep_ms(number(arguments, "--then-sleep-ms", 0));
  std::cout << "done" << std::endl;
}

}  // namespace

int main(int count, char** values) {
  Arguments arguments;
  for (int i = 1; i + 1 < count; i += 2) arguments[values[i]] = values[i + 1];
  if (count % 2 == 0) {
    std::cerr << kUsage;
    return 2;
  }
  try {
    run(arguments);
    return 0;
  } catch (const reef::RankFailed& error) {
    std::cout << "RankFailed " << error.failed_rank() << ": " << reef::message_of(error) << std::endl;
    return kRankFailed;
  } catch (const reef::ProcessGroupError& error) {
    std::cout << "ProcessGroupError " << error.rank() << ": " << reef::message_of(error) << std::endl;
    return kGroupFailed;
  } catch (const reef::ConfigError& error) {
    std::cout << "ConfigError: " << reef::message_of(error) << std::endl;
    return kConfigError;
  } catch (const std::exception& error) {
    std::cout << "error: " << reef::message_of(error) << std::endl;
    return 1;
  }
}
