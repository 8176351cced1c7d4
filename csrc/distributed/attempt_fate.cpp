#include "distributed/attempt_fate.h"

#include <algorithm>
#include <array>
#include <torch/csrc/distributed/c10d/Store.hpp>

namespace reef {
namespace {

constexpr const char* kKey = "fate";
constexpr std::array<const char*, 6> kWords = {"", "together", "up", "anew", "missed", "failed"};  // by Kind

std::string word_of(AttemptFate::Kind kind) { return kWords[static_cast<std::size_t>(kind)]; }

std::string to_record(const AttemptFate& fate) {
  return fate.reason.empty() ? word_of(fate.kind) : word_of(fate.kind) + ' ' + fate.reason;
}

AttemptFate from_record(const std::string& record) {
  const auto blank = std::min(record.find(' '), record.size());
  const auto* const found = std::find(kWords.begin(), kWords.end(), record.substr(0, blank));
  return {static_cast<AttemptFate::Kind>(found - kWords.begin()),
          record.substr(std::min(blank + 1, record.size()))};
}

}  // namespace

AttemptFate AttemptFate::of(c10d::Store& store) {
  const auto record = value_of(store, kKey);
  return record ? from_record(std::string(record->begin(), record->end())) : AttemptFate{};
}

AttemptFate AttemptFate::decide(c10d::Store& store, Kind before) const {
  return from_record(store.compareSet(kKey, word_of(before), to_record(*this)));
}

}  // namespace reef
