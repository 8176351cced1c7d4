#include "reef/pipeline_schedule.h"

#include <charconv>
#include <iterator>
#include <optional>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "json_members.h"
#include "reef/error.h"

namespace reef {
namespace {

namespace json = boost::json;

constexpr const char* kWhat = "PipelineSchedule";
constexpr std::string_view kKinds = "FBIWU";
constexpr std::string_view kRules[] = {"flush", "stash", "vertical", "two_buffers", "newest", "wave"};

std::optional<std::uint32_t> number(std::string_view digits) {
  std::uint32_t value = 0;
  const auto [end, error] = std::from_chars(digits.data(), digits.data() + digits.size(), value);
  if (digits.empty() || error != std::errc() || end != digits.data() + digits.size()) return std::nullopt;
  return value;
}

PipelineAction action_of(const std::string& text) {
  const std::size_t at = text.find_first_of(kKinds);
  if (at != std::string::npos) {
    const auto chunk = number(std::string_view(text).substr(0, at));
    const auto micro_batch = number(std::string_view(text).substr(at + 1));
    if (chunk && micro_batch)
      return {static_cast<PipelineAction::Kind>(kKinds.find(text[at])), *chunk, *micro_batch};
  }
  throw ConfigError("PipelineSchedule: '" + text +
                    "' is no action; give a chunk, one of F, B, I, W and U, and a micro-batch, as in 2F0");
}

PipelineVersionRule::Kind rule_of(const std::string& name) {
  std::string names;
  for (std::size_t i = 0; i < std::size(kRules); ++i) {
    if (name == kRules[i]) return static_cast<PipelineVersionRule::Kind>(i);
    names += (names.empty() ? "" : ", ") + std::string(kRules[i]);
  }
  throw ConfigError("PipelineSchedule: '" + name + "' is no rule of versions; use one of " + names);
}

json::value as_json(const PipelineAction& action) { return json::value(action.text()); }
json::value as_json(std::uint32_t rank) { return rank; }

template <class Row>
json::array as_json(const std::vector<Row>& rows) {
  json::array all;
  for (const Row& row : rows) all.push_back(as_json(row));
  return all;
}

}  // namespace

std::string PipelineAction::text() const {
  return std::to_string(chunk) + kKinds[static_cast<std::size_t>(kind)] + std::to_string(micro_batch);
}

std::string PipelineSchedule::json() const {
  const json::object rule{{"rule", kRules[static_cast<std::size_t>(versions.kind)]},
                          {"micro_batches_per_update", versions.micro_batches_per_update},
                          {"staleness", versions.staleness}};
  return json::serialize(json::object{{"name", name},
                                      {"micro_batches", micro_batches},
                                      {"rank_of", as_json(rank_of)},
                                      {"actions", as_json(actions)},
                                      {"versions", rule}});
}

PipelineSchedule pipeline_schedule_from_json(std::string_view text) {
  const json::value value = parsed_json(text, kWhat);
  const json::object of = read_member(kWhat, "name", [&] { return value.as_object(); });
  PipelineSchedule schedule;
  schedule.name = text_member(of, kWhat, "name");
  schedule.micro_batches = small_count_member(of, kWhat, "micro_batches");
  for (const json::value& direction : array_member(of, kWhat, "rank_of")) {
    std::vector<std::uint32_t>& ranks = schedule.rank_of.emplace_back();
    for (const json::value& rank : read_member(kWhat, "rank_of", [&] { return direction.as_array(); }))
      ranks.push_back(read_member(kWhat, "rank_of", [&] { return rank.to_number<std::uint32_t>(); }));
  }
  for (const json::value& rank : array_member(of, kWhat, "actions")) {
    std::vector<PipelineAction>& actions = schedule.actions.emplace_back();
    for (const json::value& action : read_member(kWhat, "actions", [&] { return rank.as_array(); }))
      actions.push_back(
          action_of(read_member(kWhat, "actions", [&] { return std::string(action.as_string()); })));
  }
  if (of.contains("versions")) {
    const json::object rule = object_member(of, kWhat, "versions");
    schedule.versions = {rule_of(text_member(rule, kWhat, "rule")),
                         small_count_member(rule, kWhat, "micro_batches_per_update"),
                         small_count_member(rule, kWhat, "staleness")};
  }
  check(schedule);
  return schedule;
}

}  // namespace reef
