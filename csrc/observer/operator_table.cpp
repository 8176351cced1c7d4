#include "observer/operator_table.h"

#include <ATen/core/function_schema.h>
#include <ATen/record_function.h>

#include <algorithm>
#include <array>
#include <functional>
#include <mutex>
#include <string_view>
#include <unordered_map>

namespace reef {
namespace {

struct Entry {
  std::string overload;
  Operator op;
};

// Keyed by text and not by the address of the name: ranges are named by temporary strings, and an operator
// library can be unloaded and another take its addresses.
std::size_t hash_of(std::string_view name, std::string_view overload) {
  const std::hash<std::string_view> hash;
  return hash(name) ^ (hash(overload) << 1);
}

bool is_of(const Entry& entry, std::string_view name, std::string_view overload) {
  return entry.op.name == name && entry.overload == overload;
}

Entry* describe(const at::RecordFunction& call, std::string_view name, std::string_view overload) {
  auto* entry = new Entry{std::string(overload), {}};
  Operator& op = entry->op;
  op.name = name;
  op.name_in_backward = op.name + " (backward)";
  const auto schema = call.operator_schema();
  if (!schema) return entry;
  op.is_operator = true;
  op.is_collective = name.starts_with("c10d::");
  const std::size_t arguments = std::min<std::size_t>(schema->arguments().size(), 64);
  for (std::size_t i = 0; i < arguments; ++i) {
    const auto* alias = schema->arguments()[i].alias_info();
    if (alias != nullptr && alias->isWrite()) op.writes_arguments |= std::uint64_t{1} << i;
  }
  return entry;
}

const Entry* find_or_describe(const at::RecordFunction& call, std::string_view name,
                              std::string_view overload, std::size_t hash) {
  static auto* const mutex = new std::mutex;
  static auto* const table = new std::unordered_multimap<std::size_t, Entry*>;
  const std::lock_guard lock(*mutex);
  const auto [first, last] = table->equal_range(hash);
  const auto known =
      std::find_if(first, last, [&](const auto& e) { return is_of(*e.second, name, overload); });
  if (known != last) return known->second;
  return table->emplace(hash, describe(call, name, overload))->second;
}

}  // namespace

const Operator& operator_of(const at::RecordFunction& call) {
  constexpr std::size_t kRecent = 256;
  static thread_local std::array<const Entry*, kRecent> recent{};
  const std::string_view name = call.name();
  const std::string_view overload = call.overload_name();
  const std::size_t hash = hash_of(name, overload);
  const Entry*& slot = recent[hash % kRecent];
  if (slot == nullptr || !is_of(*slot, name, overload)) slot = find_or_describe(call, name, overload, hash);
  return slot->op;
}

}  // namespace reef
