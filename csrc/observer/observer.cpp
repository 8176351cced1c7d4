#include "observer/observer.h"

#include <algorithm>
#include <array>
#include <atomic>
#include <memory>
#include <mutex>

#include "fork.h"
#include "observer/call.h"
#include "observer/global_callback.h"

namespace reef {
namespace {

constexpr std::size_t kMostListeners = 8;  // bits of OperatorCall::heard

struct Listeners {
  std::array<std::atomic<OperatorListener*>, kMostListeners> active{};  ///< nullptr: nobody observes for it
  MutexAtFork mutex{AtFork::Order::kTables};
  std::array<OperatorListener*, kMostListeners> known{};
  std::array<int, kMostListeners> observations{};
  GlobalCallback callback;
  bool has_outputs = false;  ///< the callback
};

std::atomic<std::size_t> listening = 0;  ///< all listeners are before this one

Listeners& listeners() {
  static auto* const all = new Listeners;
  return *all;
}

// A listener that no longer observes still hears of what it heard begin.
void ends(const at::RecordFunction&, at::ObserverContext* context) {
  if (context == nullptr) return;
  auto& begun = static_cast<OperatorCall&>(*context);
  for (std::size_t i = 0; i < kMostListeners; ++i) {
    if ((begun.heard >> i & 1) != 0) listeners().known[i]->ends(begun);
  }
}

// LibTorch swallows what an observer throws, and then does not call ends(). So exceptions are caught for each
// listener: only the one that threw does not hear of the end.
std::unique_ptr<at::ObserverContext> begins(const at::RecordFunction& call) {
  std::array<OperatorListener*, kMostListeners> all{};
  bool any = false;
  for (std::size_t i = 0; i < listening.load(std::memory_order_acquire); ++i) {
    OperatorListener* const listener = listeners().active[i].load(std::memory_order_acquire);
    if (listener == nullptr || !listener->listens()) continue;
    all[i] = listener;
    any = true;
  }
  if (!any) return nullptr;
  const Operator& op = operator_of(call);
  if (!op.is_operator && call.inputs().empty()) return nullptr;
  auto begun = std::make_unique<OperatorCall>(op, call);
  begun->in_backward = in_backward();
  begun->records_gradient = !begun->in_backward && records_gradient(call);
  if (begun->records_gradient) listeners().callback.need_lock();
  for (std::size_t i = 0; i < kMostListeners; ++i) {
    if (all[i] == nullptr || (!op.is_operator && !all[i]->hears_ranges())) continue;
    try {
      if (all[i]->begins(*begun)) begun->heard |= static_cast<std::uint8_t>(1 << i);
    } catch (...) {  // The listener has left nothing behind (OperatorListener::begins).
    }
  }
  if (begun->heard == 0) return nullptr;
  return begun;
}

// With the lock held.
void observe_anew(Listeners& all) {
  bool any = false;
  bool outputs = false;
  for (std::size_t i = 0; i < kMostListeners; ++i) {
    if (all.observations[i] == 0) continue;
    any = true;
    outputs |= all.known[i]->needs_outputs();
  }
  if (!any) return all.callback.remove();
  const auto callback = at::RecordFunctionCallback(begins, ends)
                            .needsInputs(true)
                            .needsOutputs(outputs)
                            .scopes({at::RecordScope::FUNCTION});
  if (outputs == all.has_outputs) return all.callback.add(callback);
  all.callback.replace(callback);
  all.has_outputs = outputs;
}

}  // namespace

namespace {

// Blocks that a thread keeps for its next calls. It is plain data, which is found without a call; a second
// object, made when the first block is kept, frees them when the thread ends.
struct Spare {
  static constexpr std::size_t kMost = 8;
  enum class State : std::uint8_t { kNew, kOwned, kEnded };
  void* blocks[kMost] = {};
  std::size_t count = 0;
  State state = State::kNew;
};
[[gnu::tls_model("initial-exec")]] constinit thread_local Spare spare;

void free_spare_at_thread_end() {
  struct Owner {
    ~Owner() {
      spare.state = Spare::State::kEnded;
      while (spare.count > 0) ::operator delete(spare.blocks[--spare.count]);
    }
  };
  static thread_local const Owner owner;
  (void)owner;
  spare.state = Spare::State::kOwned;
}

}  // namespace

void* OperatorCall::operator new(std::size_t bytes) {
  return spare.count > 0 ? spare.blocks[--spare.count] : ::operator new(bytes);
}

// A thread may still run operators while it ends.
void OperatorCall::operator delete(void* block) noexcept {
  if (spare.state == Spare::State::kNew) free_spare_at_thread_end();
  if (spare.state == Spare::State::kOwned && spare.count < Spare::kMost) {
    spare.blocks[spare.count++] = block;
  } else {
    ::operator delete(block);
  }
}

OperatorObservation::OperatorObservation(OperatorListener& listener) {
  Listeners& all = listeners();
  const std::lock_guard lock(all.mutex);
  index_ = static_cast<std::size_t>(
      std::find_if(all.known.begin(), all.known.end(),
                   [&](const auto* known) { return known == &listener || known == nullptr; }) -
      all.known.begin());
  TORCH_INTERNAL_ASSERT(index_ < kMostListeners);
  all.known[index_] = &listener;
  if (index_ >= listening) listening = index_ + 1;
  if (all.observations[index_]++ > 0) return;
  all.active[index_].store(&listener, std::memory_order_release);
  observe_anew(all);
}

OperatorObservation::~OperatorObservation() {
  Listeners& all = listeners();
  const std::lock_guard lock(all.mutex);
  if (--all.observations[index_] > 0) return;
  all.active[index_].store(nullptr, std::memory_order_release);
  observe_anew(all);
}

}  // namespace reef
