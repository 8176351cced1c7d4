#include "checkpoint/captured.h"

#include <ATen/core/grad_mode.h>

#include <algorithm>
#include <iterator>
#include <sstream>
#include <string_view>
#include <utility>

#include "reef/error.h"

namespace reef {
namespace {

thread_local Captured::SecondRun* innermost_second = nullptr;  ///< of this thread, the innermost

// Of operators that write: whether what is there has no influence on what is there afterwards.
bool overwrites(const Operator& op) {
  static constexpr std::string_view kOverwriting[] = {"aten::copy_", "aten::fill_", "aten::zero_"};
  const std::string_view name = op.name;
  if (std::find(std::begin(kOverwriting), std::end(kOverwriting), name) != std::end(kOverwriting))
    return true;
  return op.is_of_torch && !name.ends_with('_') && name.find("batch_norm") == std::string_view::npos;  // out=
}

bool is_all_of(const at::Tensor& tensor, const c10::Storage& storage) {
  return tensor.is_non_overlapping_and_dense() && tensor.nbytes() == storage.nbytes();
}

std::string text_of(const std::vector<std::int64_t>& sizes, at::ScalarType dtype) {
  std::ostringstream text;
  text << dtype << ' ' << c10::IntArrayRef(sizes);
  return text.str();
}

}  // namespace

std::uint64_t Captured::bytes() const {
  std::uint64_t bytes = 0;
  for (const auto& [storage, found] : found_) bytes += found.before.bytes();
  return bytes;
}

Captured::FirstRun::~FirstRun() {
  captured_.failure_ = failure();
  // What it has added to for itself alone, as batch norm does to its statistics, is no matter to a second
  // run.
  std::erase_if(captured_.found_,
                [](const auto& entry) { return !entry.second.is_read && !entry.second.is_in_graph; });
  for (auto& [storage, found] : captured_.found_) {
    if (found.version.enabled()) found.then = found.version.current_version();
  }
  for (const auto& [storage, weak] : made()) {
    if (!weak.expired()) captured_.left_.emplace(storage, weak);
  }
}

void Captured::FirstRun::about_to_run(const OperatorCall& call) {
  found_in(call, [&](const at::Tensor& tensor, std::size_t argument) {
    const c10::StorageImpl* const storage = tensor.storage().unsafeGetStorageImpl();
    captured_.operands_.push_back({captured_.steps_.size(), storage});
    const auto [entry, is_new] =
        captured_.found_.try_emplace(storage, Found{tensor.sizes().vec(), tensor.scalar_type()});
    Found& found = entry->second;
    if (is_new && !tensor.is_inference()) found.version = tensor.unsafeGetTensorImpl()->version_counter();
    if (call.op.says_it_writes(argument)) {
      about_to_write(found, tensor, call.op);
    } else if (!found.is_overwritten) {
      found.is_read = true;
    }
  });
  captured_.steps_.push_back(&call.op);
}

void Captured::FirstRun::about_to_write(Found& found, const at::Tensor& tensor, const Operator& op) {
  if (found.is_overwritten || found.before.is_there()) return;
  if (!tensor.is_leaf()) {
    found.is_in_graph = true;
    return;
  }
  if (!found.is_read && overwrites(op) && is_all_of(tensor, tensor.storage())) {
    found.is_overwritten = true;
    return;
  }
  const Unobserved unobserved;
  found.before = StorageCopy(tensor.storage());
}

Captured::SecondRun::SecondRun(const Captured& captured, const std::string& what)
    : ObservedRun(Kind::kAgain), captured_(captured), what_(what), outer_scope_(innermost_second) {
  if (captured.failure_) std::rethrow_exception(captured.failure_);
  for (const auto& [storage, found] : captured.found_) {
    if (found.is_in_graph) {
      throw RecomputeError(what + ": it writes into a tensor in a graph that it has not made, " +
                           text_of(found.sizes, found.dtype) +
                           ", and would do so twice; let it work on a copy");
    }
    if (found.before.is_there() || !found.version.enabled() || found.version.current_version() == found.then)
      continue;
    throw RecomputeError(what + ": a tensor that it reads, " + text_of(found.sizes, found.dtype) +
                         ", has been modified in place since it was run first; modify it after backward, or "
                         "let it read a copy");
  }
  const at::NoGradGuard no_grad;
  for (const auto& [storage, found] : captured.found_) {
    if (found.before.is_there()) put_back(found.before);
  }
  innermost_second = this;
  is_alike_ = true;
}

// The copying is heard of, and undone; that something else refers to the storage is not news.
void Captured::SecondRun::put_back(const StorageCopy& copy) {
  at::Tensor all;
  {
    const Unobserved unobserved;
    all = copy.place();
  }
  all.copy_(copy.what());
}

Captured::SecondRun::~SecondRun() { innermost_second = outer_scope_; }

// Operators are compared one by one for as long as they are the same: a second run may find a table that the
// first one has made, and make none.
void Captured::SecondRun::about_to_run(const OperatorCall& call) {
  is_alike_ = is_alike_ && step_ < captured_.steps_.size() && captured_.steps_[step_] == &call.op;
  if (!is_alike_ || !carried_.empty()) return;
  std::vector<const c10::StorageImpl*> before;
  for (; operand_ < captured_.operands_.size() && captured_.operands_[operand_].step == step_; ++operand_) {
    before.push_back(captured_.operands_[operand_].storage);
  }
  ++step_;
  std::size_t index = 0;
  found_in(call, [&](const at::Tensor& tensor, std::size_t argument) {
    const c10::StorageImpl* const storage = tensor.storage().unsafeGetStorageImpl();
    const bool was_captured = index < before.size();
    const bool is_carried = was_captured && before[index] != storage && captured_.left_.contains(storage);
    ++index;
    if (call.op.says_it_writes(argument)) {
      written_[storage] = true;
    } else if (is_carried && !written_.contains(storage)) {
      carried_ = text_of(tensor.sizes().vec(), tensor.scalar_type());
    }
  });
}

void Captured::SecondRun::check_innermost() {
  if (innermost_second == nullptr) return;
  innermost_second->check();
  if (innermost_second->carried_.empty()) return;
  throw RecomputeError(
      innermost_second->what_ + ": it reads a tensor, " + innermost_second->carried_ +
      ", that its first run has made in the place of one that this had read; a function that "
      "is checkpointed writes what it carries from call to call in place, or carries nothing");
}

}  // namespace reef
