#include "observer/operator_table.h"

#include <ATen/core/dispatch/Dispatcher.h>
#include <ATen/core/function_schema.h>
#include <ATen/record_function.h>

#include <algorithm>
#include <array>
#include <atomic>
#include <functional>
#include <mutex>
#include <string_view>
#include <unordered_map>

#include "fork.h"

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

bool is_of_torch(const c10::FunctionSchema& schema) {
  return schema.name().starts_with("aten::") || schema.name().starts_with("prims::");
}

// Schemas of LibTorch's own operators tell the truth about what is written, except for batch norm's
// statistics. Of others nothing is known; collectives say nothing.
bool says_it_writes(const c10::FunctionSchema& schema, std::size_t argument) {
  const c10::Argument& what = schema.arguments()[argument];
  if (what.alias_info() != nullptr && what.alias_info()->isWrite()) return true;
  return what.name() == "running_mean" || what.name() == "running_var" || schema.name().starts_with("c10d::");
}
bool may_write(const c10::FunctionSchema& schema, std::size_t argument) {
  return says_it_writes(schema, argument) || !is_of_torch(schema);
}

// A kernel that only calls other operators: it is registered for no backend.
bool is_composite(const c10::FunctionSchema& schema) {
  const auto op = c10::Dispatcher::singleton().findSchema(schema.operator_name());
  return op && op->hasKernelForDispatchKey(c10::DispatchKey::CompositeImplicitAutograd) &&
         !op->hasKernelForDispatchKey(c10::DispatchKey::CPU);
}

// Every result shares an argument's memory and nothing is written.
bool is_view(const c10::FunctionSchema& schema) {
  if (!is_of_torch(schema)) return false;
  const auto aliases = [](const c10::Argument& what) {
    return what.alias_info() != nullptr && !what.alias_info()->isWrite();
  };
  return !schema.returns().empty() && std::all_of(schema.returns().begin(), schema.returns().end(), aliases);
}

Entry* describe(const at::RecordFunction& call, std::string_view name, std::string_view overload) {
  auto* entry = new Entry{std::string(overload), {}};
  Operator& op = entry->op;
  op.name = name;
  op.name_in_backward = op.name + " (backward)";
  op.is_of_reducer = name.starts_with("torch::distributed::reducer::");
  const auto schema = call.operator_schema();
  if (!schema) return entry;
  op.is_operator = true;
  op.makes_alike = name.ends_with("_like") || name == "aten::clone";
  op.is_collective = name.starts_with("c10d::");
  for (std::size_t i = 0; i < schema->arguments().size(); ++i) {
    const std::uint64_t bit = std::uint64_t{1} << std::min<std::size_t>(i, 63);
    if (may_write(*schema, i)) op.writes_arguments |= bit;
    if (says_it_writes(*schema, i)) op.says_it_writes_arguments |= bit;
  }
  op.is_composite = is_composite(*schema);
  op.is_view = is_view(*schema);
  op.is_of_torch = is_of_torch(*schema);
  return entry;
}

const Entry* find_or_describe(const at::RecordFunction& call, std::string_view name,
                              std::string_view overload, std::size_t hash) {
  static auto* const mutex = new MutexAtFork(AtFork::Order::kTables);
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
  constexpr std::size_t kRecent = 1024;
  static std::array<std::atomic<const Entry*>, kRecent> recent{};
  const std::string_view name = call.name();
  const std::string_view overload = call.overload_name();
  // The address says where to look, the text whether it is found.
  const auto address =
      reinterpret_cast<std::uintptr_t>(name.data()) ^ reinterpret_cast<std::uintptr_t>(overload.data()) << 1;
  std::atomic<const Entry*>& slot = recent[(address >> 4 ^ address >> 14) % kRecent];
  const Entry* entry = slot.load(std::memory_order_acquire);
  if (entry == nullptr || !is_of(*entry, name, overload)) {
    entry = find_or_describe(call, name, overload, hash_of(name, overload));
    slot.store(entry, std::memory_order_release);
  }
  return entry->op;
}

}  // namespace reef
