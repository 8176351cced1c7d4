// LocalUpdates in the middle of a round, as data.
#include <set>
#include <string>
#include <torch/csrc/distributed/c10d/ProcessGroup.hpp>
#include <utility>

#include "reef/error.h"
#include "shard/local_rounds.h"

namespace reef {
namespace {

constexpr const char* kMethod = "local updates: ";
constexpr const char* kStep = "step";

std::string prefix(std::size_t part) { return "part " + std::to_string(part) + ", "; }

}  // namespace

OptimizerState LocalUpdates::Rounds::state() const {
  lane->wait_all();
  OptimizerState state;
  state.communication = {kMethod + text(), group->getSize(), {{kStep, step}}, {}};
  auto& own = state.communication.of_ranks.emplace_back(group->getRank(), NamedState{}).second;
  for (std::size_t part = 0; part < outer.size(); ++part) {
    for (auto& one : outer[part]->state(prefix(part))) own.push_back(std::move(one));
  }
  return state;
}

void LocalUpdates::Rounds::load_state(const OptimizerState& own) {
  note("load_state()");
  std::vector<std::function<void()>> take;
  std::int64_t at = 0;
  std::uint64_t digest = 0;
  agree([&](Together& together, bool exchange) {
    together.here([&] {
      check_no_update();
      lane->wait_all();
      const OptimizerState::Communication& given = own.communication;
      const std::string here = kMethod + text(),
                        of = given.method.empty() ? "none of LocalUpdates" : given.method;
      if (given.method != here)
        throw ConfigError("the state that is loaded is of \"" + of + "\", and this is \"" + here +
                          "\": give the same options, or begin a round with the module's state");
      const std::string ranks = std::to_string(group->getSize());
      if (given.ranks != group->getSize())
        throw ConfigError("the state that is loaded is of " + std::to_string(given.ranks) +
                          " ranks in the middle of a round, and these are " + ranks +
                          ": take as many, or load the module as it was after finish()");
      if (given.of_ranks.size() != 1 || given.of_ranks.front().first != group->getRank())
        throw ConfigError("the state that is loaded is not that of rank " + std::to_string(group->getRank()) +
                          " of " + ranks + ": every rank loads what state() has given there");
      if (given.numbers.size() != 1 || given.numbers.front().first != kStep ||
          !given.numbers.front().second.isInt() || given.numbers.front().second.toInt() < 0)
        throw ConfigError("the state that is loaded does not say its step; give what state() has given");
      at = given.numbers.front().second.toInt();
      const NamedState& values = given.of_ranks.front().second;
      std::set<std::string> known;
      if (!take.empty()) return;
      for (std::size_t part = 0; part < outer.size(); ++part) {
        for (const auto& one : outer[part]->state(prefix(part))) known.insert(one.first);
        take.push_back(outer[part]->prepared(values, prefix(part)));
      }
      if (known.size() != values.size())
        throw ConfigError(
            "the state that is loaded has more than the parameters that are here; build the "
            "module as it was");
      digest = OuterPart::digest(values);
    });
    together.agree_on("the local step of the state that is loaded", std::to_string(at));
    if (exchange)
      together.agree_on("the round (a digest of its start) of the state that is loaded",
                        std::to_string(digest));
  });
  drop_travelling();
  expect_writes();
  for (const auto& one : take) one();
  step = at;
}

}  // namespace reef
