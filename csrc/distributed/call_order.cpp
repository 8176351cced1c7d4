#include "distributed/call_order.h"

#include <algorithm>
#include <sstream>
#include <utility>

namespace reef {
namespace {

constexpr std::size_t kNextRanks = 4;

// A line for each group, and one for each call that is known.
std::map<std::string, CallsMade> calls_from(const std::string& record) {
  std::map<std::string, CallsMade> groups;
  std::istringstream in(record);
  for (std::string name; std::getline(in, name);) {
    CallsMade& calls = groups[name];
    std::size_t known = 0;
    in >> calls.count >> calls.by_one_thread >> known;
    in.ignore();
    for (std::string call; known > 0 && std::getline(in, call); --known) calls.last.push_back(call);
  }
  return groups;
}

}  // namespace

std::string ranks_text(const std::vector<int>& ranks) {
  std::string text = ranks.size() == 1 ? "rank " : "ranks ";
  for (std::size_t i = 0; i < ranks.size(); ++i) {
    if (i > 0) text += i + 1 == ranks.size() ? " and " : ", ";
    text += std::to_string(ranks[i]);
  }
  return text;
}

void CallsMade::add(std::string call) {
  std::replace(call.begin(), call.end(), '\n', ' ');
  last.push_back(std::move(call));
  if (last.size() > kKept) last.pop_front();
  ++count;
}

const std::string* CallsMade::at(std::int64_t number) const {
  const std::int64_t first = count - static_cast<std::int64_t>(last.size());
  if (number < first || number >= count) return nullptr;
  return &last[static_cast<std::size_t>(number - first)];
}

std::optional<std::int64_t> CallsMade::first_difference(const CallsMade& other) const {
  if (!by_one_thread || !other.by_one_thread) return std::nullopt;
  for (std::int64_t number = count - static_cast<std::int64_t>(last.size()); number < count; ++number) {
    const std::string* const theirs = other.at(number);
    if (theirs != nullptr && *theirs != *at(number)) return number;
  }
  return std::nullopt;
}

void CallOrder::begin_group(const std::string& name, const std::vector<int>& ranks) {
  const std::lock_guard lock(mutex_);
  groups_[name].ranks = ranks;
}

void CallOrder::end_group(const std::string& name) {
  const std::lock_guard lock(mutex_);
  groups_.erase(name);
}

void CallOrder::add(const std::string& group, const std::string& call) {
  if (ServesProgram::is_on()) return;
  const std::lock_guard lock(mutex_);
  const auto found = groups_.find(group);
  if (found == groups_.end()) return;
  OfGroup& of_group = found->second;
  const auto thread = std::this_thread::get_id();
  if (of_group.thread.value_or(thread) != thread) of_group.calls.by_one_thread = false;
  of_group.thread = thread;
  of_group.calls.add(call);
}

std::string CallOrder::record() const {
  const std::lock_guard lock(mutex_);
  std::ostringstream out;
  for (const auto& [name, of_group] : groups_) {
    const CallsMade& calls = of_group.calls;
    out << name << '\n' << calls.count << ' ' << calls.by_one_thread << ' ' << calls.last.size() << '\n';
    for (const std::string& call : calls.last) out << call << '\n';
  }
  return out.str();
}

std::vector<int> CallOrder::watched() const {
  const std::lock_guard lock(mutex_);
  std::vector<int> watched;
  for (const auto& [name, of_group] : groups_) {
    const std::vector<int>& ranks = of_group.ranks;
    const auto place = static_cast<std::size_t>(std::find(ranks.begin(), ranks.end(), rank_) - ranks.begin());
    for (std::size_t i = 1; i <= kNextRanks && i < ranks.size(); ++i)
      watched.push_back(ranks[(place + i) % ranks.size()]);
  }
  std::sort(watched.begin(), watched.end());
  watched.erase(std::unique(watched.begin(), watched.end()), watched.end());
  return watched;
}

std::optional<CallOrder::Difference> CallOrder::difference(const std::string& record_of_other) const {
  const auto theirs = calls_from(record_of_other);
  const std::lock_guard lock(mutex_);
  for (const auto& [name, of_group] : groups_) {
    const auto other = theirs.find(name);
    if (other == theirs.end()) continue;
    if (const auto number = of_group.calls.first_difference(other->second))
      return Difference{name, *number, of_group.ranks};
  }
  return std::nullopt;
}

std::string CallOrder::text(const Difference& difference, const std::map<int, std::string>& records) const {
  std::map<std::string, std::vector<int>> by_call;
  std::vector<int> late;
  for (const int rank : difference.ranks) {
    const auto given = records.find(rank);
    const auto calls = calls_from(rank == rank_ ? record() : given != records.end() ? given->second : "");
    const auto of_group = calls.find(difference.group);
    const std::string* const call =
        of_group == calls.end() ? nullptr : of_group->second.at(difference.number);
    if (call != nullptr) {
      by_call[*call].push_back(rank);
    } else {
      late.push_back(rank);
    }
  }
  std::vector<std::pair<std::vector<int>, std::string>> in_order;
  for (const auto& [call, ranks] : by_call) in_order.emplace_back(ranks, call);
  std::sort(in_order.begin(), in_order.end());
  std::string text = "the ranks are out of step: call " + std::to_string(difference.number + 1) +
                     " that all make alike in this group is ";
  for (std::size_t i = 0; i < in_order.size(); ++i) {
    if (i > 0) text += i + 1 == in_order.size() ? ", and " : ", ";
    text += in_order[i].second + " on " + ranks_text(in_order[i].first);
  }
  if (!late.empty())
    text += "; " + ranks_text(late) + (late.size() == 1 ? " has" : " have") + " not come to it yet";
  return text;
}

}  // namespace reef
