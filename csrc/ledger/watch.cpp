#include "ledger/watch.h"

#include <c10/core/StorageImpl.h>
#include <torch/nn/module.h>
#include <torch/optim/adagrad.h>
#include <torch/optim/adam.h>
#include <torch/optim/adamw.h>
#include <torch/optim/lbfgs.h>
#include <torch/optim/optimizer.h>
#include <torch/optim/rmsprop.h>
#include <torch/optim/sgd.h>

#include <algorithm>
#include <mutex>
#include <unordered_map>
#include <vector>

#include "ledger/blocks.h"
#include "ledger/counting_allocator.h"
#include "ledger/cuda.h"
#include "reef/ledger.h"
#include "reef/state_tensors.h"

namespace reef {
namespace {

// LibTorch's states have no common way to list their tensors, hence one line for each.
template <class Visit>
void each_tensor(torch::optim::OptimizerParamState& state, const Visit& visit) {
  using namespace torch::optim;
  if (auto* adam = dynamic_cast<AdamParamState*>(&state)) {
    for (const auto& t : {adam->exp_avg(), adam->exp_avg_sq(), adam->max_exp_avg_sq()}) visit(t);
  } else if (auto* adamw = dynamic_cast<AdamWParamState*>(&state)) {
    for (const auto& t : {adamw->exp_avg(), adamw->exp_avg_sq(), adamw->max_exp_avg_sq()}) visit(t);
  } else if (auto* sgd = dynamic_cast<SGDParamState*>(&state)) {
    visit(sgd->momentum_buffer());
  } else if (auto* rmsprop = dynamic_cast<RMSpropParamState*>(&state)) {
    for (const auto& t : {rmsprop->square_avg(), rmsprop->momentum_buffer(), rmsprop->grad_avg()}) visit(t);
  } else if (auto* adagrad = dynamic_cast<AdagradParamState*>(&state)) {
    visit(adagrad->sum());
  } else if (auto* lbfgs = dynamic_cast<LBFGSParamState*>(&state)) {
    for (const auto& t : {lbfgs->d(), lbfgs->H_diag(), lbfgs->prev_flat_grad()}) visit(t);
    for (const auto* list : {&lbfgs->old_dirs(), &lbfgs->old_stps(), &lbfgs->ro()}) {
      std::for_each(list->begin(), list->end(), visit);
    }
  } else if (const auto* known = dynamic_cast<const StateTensors*>(&state)) {
    for (const at::Tensor& tensor : known->state_tensors()) visit(tensor);
  }
}

void mark_state(const at::Tensor& tensor) { mark_tensor(tensor, Category::kOptimizerState); }

// An optimizer keys its state by TensorImpl, but may write through an alias (SGD writes p.data()): storages
// connect the two. Several parameters can share a storage.
struct WatchedOptimizer {
  explicit WatchedOptimizer(torch::optim::Optimizer* watched) : optimizer(watched) {}

  torch::optim::Optimizer* optimizer;
  std::size_t parameters = 0;
  std::unordered_map<const c10::StorageImpl*, std::vector<void*>> keys;

  void update_keys() {
    std::size_t count = 0;
    for (const auto& group : optimizer->param_groups()) count += group.params().size();
    if (count == parameters) return;
    parameters = count;
    keys.clear();
    for (const auto& group : optimizer->param_groups()) {
      for (const at::Tensor& p : group.params()) {
        if (p.has_storage()) keys[p.storage().unsafeGetStorageImpl()].push_back(p.unsafeGetTensorImpl());
      }
    }
  }

  void written(const c10::StorageImpl* storage) {
    update_keys();
    const auto found = keys.find(storage);
    if (found == keys.end()) return;
    for (void* key : found->second) {
      const auto state = optimizer->state().find(key);
      if (state != optimizer->state().end()) each_tensor(*state->second, mark_state);
    }
  }
};

std::mutex& watched_mutex() {
  static auto* const mutex = new std::mutex;
  return *mutex;
}
std::vector<WatchedOptimizer>& watched() {
  static auto* const optimizers = new std::vector<WatchedOptimizer>;
  return *optimizers;
}

}  // namespace

void mark_tensor(const at::Tensor& tensor, Category category) {
  if (!tensor.defined() || !tensor.has_storage()) return;
  c10::StorageImpl& storage = *tensor.storage().unsafeGetStorageImpl();
  const void* data = storage._mutable_data_ptr_no_checks().get();
  if (data == nullptr) return;
  if (Blocks::instance().mark(data, category)) return;
  if (adopt(storage) || adopt_cuda(storage)) Blocks::instance().mark(data, category);
}

std::vector<at::Tensor> state_tensors(torch::optim::Optimizer& optimizer) {
  std::vector<at::Tensor> tensors;
  for (const auto& [key, state] : optimizer.state()) {
    each_tensor(*state, [&](const at::Tensor& tensor) {
      if (tensor.defined()) tensors.push_back(tensor);
    });
  }
  return tensors;
}

void watch_optimizer(torch::optim::Optimizer* optimizer) {
  for (const auto& [key, state] : optimizer->state()) each_tensor(*state, mark_state);
  const std::lock_guard lock(watched_mutex());
  watched().emplace_back(optimizer);
}

void forget_optimizer(torch::optim::Optimizer* optimizer) {
  const std::lock_guard lock(watched_mutex());
  const auto first = std::find_if(watched().begin(), watched().end(),
                                  [&](const WatchedOptimizer& w) { return w.optimizer == optimizer; });
  if (first != watched().end()) watched().erase(first);
}

void parameter_written(const at::Tensor& parameter) {
  const std::lock_guard lock(watched_mutex());
  for (WatchedOptimizer& w : watched()) w.written(parameter.storage().unsafeGetStorageImpl());
}

void Ledger::watch(const torch::nn::Module& module) {
  for (const at::Tensor& tensor : module.parameters()) mark_tensor(tensor, Category::kParameter);
  for (const at::Tensor& tensor : module.buffers()) mark_tensor(tensor, Category::kParameter);
}

void Ledger::watch(at::TensorList tensors) {
  for (const at::Tensor& tensor : tensors) mark_tensor(tensor, Category::kParameter);
}

void Ledger::mark(const at::Tensor& tensor, Category category) { mark_tensor(tensor, category); }

}  // namespace reef
