#include <iterator>
#include <limits>
#include <string>
#include <string_view>
#include <utility>

#include "json_members.h"
#include "reef/chain_profile.h"
#include "reef/error.h"
#include "reef/schedule.h"

namespace reef {
namespace {

namespace json = boost::json;

// Members of a stage, in the order in which they are written.
template <class Stage, class Visit>
void for_each_size(Stage& stage, const Visit& visit) {
  visit("output_bytes", stage.output_bytes);
  visit("tape_bytes", stage.tape_bytes);
  visit("forward_bytes", stage.forward_bytes);
  visit("taped_bytes", stage.taped_bytes);
  visit("retape_bytes", stage.retape_bytes);
  visit("backward_bytes", stage.backward_bytes);
  visit("gradient_bytes", stage.gradient_bytes);
}
template <class Stage, class Visit>
void for_each_time(Stage& stage, const Visit& visit) {
  visit("forward_seconds", stage.forward_seconds);
  visit("retape_seconds", stage.retape_seconds);
  visit("backward_seconds", stage.backward_seconds);
  visit("spread", stage.spread);
}

constexpr std::string_view kNames[] = {"F",  "T",  "R",  "L",  "B",  "-a", "-t",
                                       ">a", ">t", "~a", "~t", "<a", "<t"};

std::string text_of(const ScheduleOp& op) {
  const std::string kind(kNames[static_cast<std::size_t>(op.kind)]);
  return op.kind == ScheduleOp::Kind::kLoss ? kind : kind + std::to_string(op.stage);
}

ScheduleOp op_of(std::string_view text) {
  for (std::size_t kind = 0; kind < std::size(kNames); ++kind) {
    if (!text.starts_with(kNames[kind])) continue;
    const std::string digits(text.substr(kNames[kind].size()));
    ScheduleOp op{static_cast<ScheduleOp::Kind>(kind), 0};
    if (op.kind == ScheduleOp::Kind::kLoss ? !digits.empty() : digits.empty() || digits.size() > 9) break;
    if (digits.find_first_not_of("0123456789") != std::string::npos) break;
    if (!digits.empty()) op.stage = static_cast<std::uint32_t>(std::stoul(digits));
    return op;
  }
  throw ConfigError("Schedule: '" + std::string(text) +
                    "' is no operation; F3, T3, R3, L, B3, -a3 and -t3 are, and >, ~ or < for -");
}

}  // namespace

std::string ChainProfile::json() const {
  json::array all;
  for (const StageProfile& stage : stages) {
    json::object one{{"name", stage.name},
                     {"tape_has_input", stage.tape_has_input},
                     {"tape_has_output", stage.tape_has_output}};
    const auto write = [&](const char* member, auto value) { one[member] = value; };
    for_each_size(stage, write);
    for_each_time(stage, write);
    all.push_back(std::move(one));
  }
  const json::object speed{{"bytes_per_second", tier_speed.bytes_per_second},
                           {"work_share", tier_speed.work_share}};
  return json::serialize(json::object{{"stages", std::move(all)},
                                      {"state_bytes", state_bytes},
                                      {"tier_speed", speed},
                                      {"tier_capacity_bytes", tier_capacity_bytes}});
}

ChainProfile chain_profile_from_json(std::string_view text) {
  constexpr const char* kWhat = "ChainProfile";
  const json::value value = parsed_json(text, kWhat);
  const json::object chain = read_member(kWhat, "stages", [&] { return value.as_object(); });
  ChainProfile profile;
  const json::object speed = object_member(chain, kWhat, "tier_speed");
  profile.tier_speed = {real_member(speed, kWhat, "bytes_per_second"),
                        real_member(speed, kWhat, "work_share")};
  profile.state_bytes = count_member(chain, kWhat, "state_bytes");
  profile.tier_capacity_bytes = count_member(chain, kWhat, "tier_capacity_bytes");
  for (const json::value& each : array_member(chain, kWhat, "stages")) {
    const json::object of = read_member(kWhat, "stages", [&] { return each.as_object(); });
    StageProfile stage;
    stage.name = text_member(of, kWhat, "name");
    stage.tape_has_input = flag_member(of, kWhat, "tape_has_input");
    stage.tape_has_output = flag_member(of, kWhat, "tape_has_output");
    for_each_size(stage,
                  [&](const char* member, std::uint64_t& to) { to = count_member(of, kWhat, member); });
    for_each_time(stage, [&](const char* member, double& to) { to = real_member(of, kWhat, member); });
    profile.stages.push_back(std::move(stage));
  }
  check(profile);
  return profile;
}

std::string Schedule::text() const {
  std::string words;
  for (const ScheduleOp& op : operations) words += (words.empty() ? "" : " ") + text_of(op);
  return words;
}

std::string Schedule::json() const {
  json::array all;
  for (const ScheduleOp& op : operations) all.push_back(json::value(text_of(op)));
  return json::serialize(json::object{{"stages", stages}, {"operations", std::move(all)}});
}

Schedule schedule_from_json(std::string_view text) {
  constexpr const char* kWhat = "Schedule";
  const json::value value = parsed_json(text, kWhat);
  const json::object of = read_member(kWhat, "stages", [&] { return value.as_object(); });
  const std::uint64_t stages = count_member(of, kWhat, "stages");
  if (stages > std::numeric_limits<std::uint32_t>::max())
    throw ConfigError("Schedule: no chain has so many stages");
  Schedule schedule{static_cast<std::uint32_t>(stages), {}};
  for (const json::value& each : array_member(of, kWhat, "operations")) {
    schedule.operations.push_back(
        op_of(read_member(kWhat, "operations", [&] { return std::string(each.as_string()); })));
  }
  return schedule;
}

}  // namespace reef
