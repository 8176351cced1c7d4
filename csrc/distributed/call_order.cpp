#include "distributed/call_order.h"

#include <algorithm>
#include <sstream>
#include <utility>

namespace reef {
namespace {

constexpr std::size_t kNextRanks = 4;

// Of a group: its name, how much of it there is, two lines for each call, and one for each shard that has
// ended.
std::map<std::string, CallsMade> calls_from(const std::string& record) {
  std::map<std::string, CallsMade> groups;
  std::istringstream in(record);
  for (std::string name; std::getline(in, name);) {
    CallsMade& calls = groups[name];
    std::size_t known = 0, ended = 0;
    in >> calls.count >> calls.by_one_thread >> known >> ended;
    in.ignore();
    CallsMade::Call call;
    for (; known > 0 && std::getline(in, call.text) && std::getline(in, call.of); --known)
      calls.last.push_back(call);
    for (std::string shard; ended > 0 && std::getline(in, shard); --ended) calls.ended.insert(shard);
  }
  return groups;
}

// Of a shard, or of another whose calls are known by its name, which may be that of one that has ended.
bool begins(const std::string& call) {
  return call == CallsMade::kShardBegins || call == CallsMade::kLocalUpdatesBegin ||
         call == CallsMade::kDdpHookBegins;
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

void CallsMade::add(Call call) {
  for (std::string* const line : {&call.text, &call.of}) std::replace(line->begin(), line->end(), '\n', ' ');
  if (begins(call.text)) ended.clear();
  last.push_back(std::move(call));
  if (last.size() > kKept) last.pop_front();
  ++count;
}

const CallsMade::Call* CallsMade::at(std::int64_t number) const {
  const std::int64_t first = count - static_cast<std::int64_t>(last.size());
  if (number < first || number >= count) return nullptr;
  return &last[static_cast<std::size_t>(number - first)];
}

std::optional<std::int64_t> CallsMade::first_difference(const CallsMade& other) const {
  if (!by_one_thread || !other.by_one_thread) return std::nullopt;
  for (std::int64_t number = count - static_cast<std::int64_t>(last.size()); number < count; ++number) {
    const Call* const theirs = other.at(number);
    if (theirs != nullptr && *theirs != *at(number)) return number;
  }
  const auto number = first_that_never_comes(other);
  return number ? number : other.first_that_never_comes(*this);
}

// Of this rank's calls, the first that the other has not made and will not make.
std::optional<std::int64_t> CallsMade::first_that_never_comes(const CallsMade& other) const {
  for (std::int64_t number = other.count; number < count; ++number) {
    const Call* const call = at(number);
    if (call == nullptr) continue;
    if (begins(call->text)) break;
    if (!call->of.empty() && other.ended.contains(call->of)) return number;
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

void CallOrder::add(const std::string& group, const std::string& call, const std::string& of_shard) {
  if (ServesProgram::is_on()) return;
  const std::lock_guard lock(mutex_);
  const auto found = groups_.find(group);
  if (found == groups_.end()) return;
  OfGroup& of_group = found->second;
  const auto thread = std::this_thread::get_id();
  if (of_group.thread.value_or(thread) != thread) of_group.calls.by_one_thread = false;
  of_group.thread = thread;
  of_group.calls.add({of_shard.empty() ? call : call + " of " + of_shard, of_shard});
}

void CallOrder::end_shard(const std::string& group, const std::string& shard) {
  const std::lock_guard lock(mutex_);
  if (const auto found = groups_.find(group); found != groups_.end()) found->second.calls.ended.insert(shard);
}

std::string CallOrder::record() const {
  const std::lock_guard lock(mutex_);
  std::ostringstream out;
  for (const auto& [name, of_group] : groups_) {
    const CallsMade& calls = of_group.calls;
    out << name << '\n' << calls.count << ' ' << calls.by_one_thread << ' ';
    out << calls.last.size() << ' ' << calls.ended.size() << '\n';
    for (const CallsMade::Call& call : calls.last) out << call.text << '\n' << call.of << '\n';
    for (const std::string& shard : calls.ended) out << shard << '\n';
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
  std::map<int, CallsMade> of_ranks;
  std::map<std::string, std::vector<int>> by_call;
  std::set<std::string> shards;
  for (const int rank : difference.ranks) {
    const auto given = records.find(rank);
    auto groups = calls_from(rank == rank_ ? record() : given != records.end() ? given->second : "");
    const CallsMade& calls = of_ranks[rank] = std::move(groups[difference.group]);
    if (const CallsMade::Call* const call = calls.at(difference.number)) {
      by_call[call->text].push_back(rank);
      shards.insert(call->of);
    }
  }
  std::vector<int> late;
  std::map<std::string, std::vector<int>> ended;
  for (const auto& [rank, calls] : of_ranks) {
    if (calls.at(difference.number) != nullptr) continue;
    const auto shard =
        std::find_if(shards.begin(), shards.end(),
                     [&, &theirs = calls.ended](const auto& each) { return theirs.contains(each); });
    (shard == shards.end() ? late : ended[*shard]).push_back(rank);
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
  for (const auto& [shard, ranks] : ended)
    text += "; " + ranks_text(ranks) + (ranks.size() == 1 ? " has" : " have") + " ended " + shard;
  if (!late.empty())
    text += "; " + ranks_text(late) + (late.size() == 1 ? " has" : " have") + " not come to it yet";
  return text;
}

}  // namespace reef
