// One rank that does what it is told on its standard input, and says in one line how each went: tries to
// bring up a group, or adds up in the one it has. tests/python/test_attempts.py starts several, and anew.
#include <ATen/ops/full.h>

#include <chrono>
#include <cstdlib>
#include <iostream>
#include <sstream>
#include <string>

#include "reef/collectives.h"
#include "reef/error.h"
#include "reef/process_group.h"

namespace {

/// "try WORLD_SIZE TIMEOUT_MS [INTERFACE]", which leaves the group before, or "add".
class Rank {
 public:
  explicit Rank(std::string store) : store_(std::move(store)) {}

  std::string obey(std::istringstream words) {
    std::string what;
    words >> what;
    if (what == "try") {
      group_ = nullptr;
      std::string world_size;
      std::int64_t timeout_ms = 0;
      reef::ProcessGroupOptions options;
      words >> world_size >> timeout_ms >> options.interface;
      ::setenv("WORLD_SIZE", world_size.c_str(), 1);
      options.store = store_;
      options.timeout = std::chrono::milliseconds(timeout_ms);
      group_ = reef::init_process_group(options);
    }
    add();
    return "done";
  }

 private:
  void add() const {
    const int size = group_->getSize();
    const at::Tensor tensor = at::full({1000}, group_->getRank() + 1.0);
    reef::all_reduce(tensor, group_);
    if (!tensor.eq(size * (size + 1) / 2.0).all().item<bool>()) throw std::logic_error("the sum is wrong");
  }

  std::string store_;
  reef::ProcessGroupPtr group_;
};

std::string told(Rank& rank, const std::string& line) {
  try {
    return rank.obey(std::istringstream(line));
  } catch (const reef::RankFailed& error) {
    return "RankFailed: " + reef::message_of(error);
  } catch (const reef::ProcessGroupError& error) {
    return "ProcessGroupError: " + reef::message_of(error);
  } catch (const std::exception& error) {
    return "error: " + reef::message_of(error);
  }
}

}  // namespace

int main(int count, char** values) {
  Rank rank(count > 1 ? values[1] : "");
  for (std::string line; std::getline(std::cin, line);) std::cout << told(rank, line) << std::endl;
}
