#include <algorithm>
#include <array>
#include <charconv>
#include <cmath>
#include <sstream>
#include <string_view>
#include <utility>

#include "reef/async_updates.h"
#include "reef/error.h"

namespace reef {
namespace {

using Kind = AsyncEvent::Kind;

constexpr std::array<std::pair<AsyncRule, std::string_view>, 4> kRules = {
    {{AsyncRule::kPlain, "plain"},
     {AsyncRule::kStalenessAware, "staleness_aware"},
     {AsyncRule::kDelayCompensated, "delay_compensated"},
     {AsyncRule::kElastic, "elastic"}}};
constexpr std::array<std::pair<Kind, std::string_view>, 5> kKinds = {{{Kind::kPull, "pull"},
                                                                      {Kind::kPush, "push"},
                                                                      {Kind::kLeave, "leave"},
                                                                      {Kind::kJoin, "join"},
                                                                      {Kind::kClock, "clock"}}};
constexpr const char* kUnbounded = "unbounded";

template <class Table, class Value>
std::string_view name_of(const Table& table, Value value) {
  return std::find_if(table.begin(), table.end(), [&](const auto& row) { return row.first == value; })
      ->second;
}

// The shortest that is read as the same number.
std::string exact(double number) {
  std::array<char, 32> text;
  const auto end = std::to_chars(text.data(), text.data() + text.size(), number).ptr;
  return {text.data(), end};
}

/// Words and numbers of one line.
class Line {
 public:
  Line(const std::string& text, std::int64_t number) : words_(text), text_(text), number_(number) {}

  [[noreturn]] void refuse() const {
    throw ConfigError("line " + std::to_string(number_) + " of a log of asynchronous updates is '" + text_ +
                      "': give the text of an AsyncLog.");
  }
  std::string word() {
    std::string word;
    if (!(words_ >> word)) refuse();
    return word;
  }
  void expect(const char* expected) {
    if (word() != expected) refuse();
  }
  template <class Number>
  Number number(const std::string& text) const {
    Number value{};
    const char* const end = text.data() + text.size();
    const auto read = std::from_chars(text.data(), end, value);
    if (read.ec != std::errc() || read.ptr != end) refuse();
    return value;
  }
  template <class Number>
  Number number_after(const char* name) {
    expect(name);
    return number<Number>(word());
  }
  void end() {
    if (std::string more; words_ >> more) refuse();
  }

 private:
  std::istringstream words_;
  std::string text_;
  std::int64_t number_;
};

}  // namespace

std::string to_string(AsyncRule rule) { return std::string(name_of(kRules, rule)); }

AsyncRule async_rule_of(const std::string& name) {
  std::string all;
  for (const auto& [rule, known] : kRules) {
    if (known == name) return rule;
    all += (all.empty() ? "" : ", ") + std::string(known);
  }
  throw ConfigError("the rule of asynchronous updates '" + name + "' is none of " + all + ".");
}

void check_async_options(const AsyncOptions& options, int workers) {
  const auto refuse = [](const std::string& what) { throw ConfigError("AsyncOptions: " + what); };
  if (options.servers < 1)
    refuse("servers is " + std::to_string(options.servers) + ": at least one rank serves.");
  if (workers < 1)
    refuse("no rank is left to work beside " + std::to_string(options.servers) +
           " servers: start more ranks, or give fewer servers.");
  if (options.staleness && *options.staleness < 0)
    refuse("staleness is " + std::to_string(*options.staleness) +
           ": give 0 (synchronous) or more, or none for unbounded.");
  if (!std::isfinite(options.compensation) || options.compensation < 0.0)
    refuse("compensation is " + exact(options.compensation) + ": give a number from 0.");
  if (!(options.elasticity >= 0.0 && options.elasticity <= 1.0))
    refuse("elasticity is " + exact(options.elasticity) +
           ": give a number in (0, 1], or 0 for 0.9 / workers.");
}

std::vector<std::int64_t> AsyncLog::staleness_histogram() const {
  std::vector<std::int64_t> counts;
  for (const AsyncEvent& event : events) {
    if (event.kind != Kind::kPush) continue;
    const auto staleness = static_cast<std::size_t>(event.staleness);
    if (counts.size() <= staleness) counts.resize(staleness + 1);
    ++counts[staleness];
  }
  return counts;
}

std::string AsyncLog::text() const {
  std::ostringstream out;
  out << "workers " << workers << " servers " << options.servers << " rule " << to_string(options.rule)
      << " staleness " << (options.staleness ? std::to_string(*options.staleness) : kUnbounded)
      << " compensation " << exact(options.compensation) << " elasticity " << exact(options.elasticity)
      << '\n';
  for (const AsyncEvent& event : events) {
    out << name_of(kKinds, event.kind) << " worker " << event.worker << " clock " << event.clock
        << " version " << event.version << " staleness " << event.staleness << " seconds "
        << exact(event.seconds) << '\n';
  }
  return out.str();
}

AsyncLog read_async_log(const std::string& text) {
  std::istringstream lines(text);
  std::string next;
  std::getline(lines, next);
  Line first(next, 1);
  AsyncLog log;
  log.workers = first.number_after<int>("workers");
  log.options.servers = first.number_after<int>("servers");
  first.expect("rule");
  log.options.rule = async_rule_of(first.word());
  first.expect("staleness");
  const std::string staleness = first.word();
  log.options.staleness.reset();
  if (staleness != kUnbounded) log.options.staleness = first.number<std::int64_t>(staleness);
  log.options.compensation = first.number_after<double>("compensation");
  log.options.elasticity = first.number_after<double>("elasticity");
  first.end();
  check_async_options(log.options, log.workers);
  for (std::int64_t number = 2; std::getline(lines, next); ++number) {
    Line line(next, number);
    const std::string name = line.word();
    const auto* const kind =
        std::find_if(kKinds.begin(), kKinds.end(), [&](const auto& row) { return row.second == name; });
    if (kind == kKinds.end()) line.refuse();
    AsyncEvent event{kind->first};
    event.worker = line.number_after<int>("worker");
    event.clock = line.number_after<std::int64_t>("clock");
    event.version = line.number_after<std::int64_t>("version");
    event.staleness = line.number_after<std::int64_t>("staleness");
    event.seconds = line.number_after<double>("seconds");
    line.end();
    if (event.worker < 0 || event.worker >= log.workers || event.staleness < 0) line.refuse();
    log.events.push_back(event);
  }
  return log;
}

}  // namespace reef
