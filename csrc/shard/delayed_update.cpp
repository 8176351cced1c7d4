#include "reef/delayed_update.h"

#include <ATen/core/grad_mode.h>

#include <utility>
#include <vector>

#include "reef/error.h"
#include "shard/shard_parts.h"

namespace reef {
namespace {

using Groups = std::vector<torch::optim::OptimizerParamGroup>;
void copy_options(const Groups& from, Groups& to) {
  for (std::size_t i = 0; i < to.size(); ++i) to[i].set_options(from[i].options().clone());
}

}  // namespace

UpdateBeside::UpdateBeside(Shard& shard) : parts_(shard.parts_.get()) {
  if (parts_->update != nullptr)
    throw ConfigError("reef::UpdateBeside was given a shard that has one: end that first.");
  if (!parts_->gatherer || !parts_->gatherer->can_hold()) {
    throw ConfigError(
        "reef::UpdateBeside was given a shard whose parameters() are not copies beside whole parameters: "
        "give ShardOptions::offload, and a stage below kParameters.");
  }
  parts_->update = this;
  parts_->reducer->when_giving([this] { wait(); });
}

UpdateBeside::~UpdateBeside() {
  wait();
  parts_->gatherer->release();
  parts_->reducer->when_giving([] {});
  parts_->update = nullptr;
}

void UpdateBeside::begin() {
  wait();
  parts_are_read_ = parts_->gatherer->hold();
  parts_->reducer->lend_gradients();
  const std::lock_guard lock(mutex_);
  under_way_ = true;
}

void UpdateBeside::wait_for_parts() { parts_are_read_(); }

void UpdateBeside::end() noexcept {
  for (at::Tensor& part : parts_->parameters) part.mutable_grad().reset();
  const std::lock_guard lock(mutex_);
  under_way_ = false;
  ended_.notify_all();
}

void UpdateBeside::wait() {
  std::unique_lock lock(mutex_);
  ended_.wait(lock, [&] { return !under_way_; });
}

bool UpdateBeside::under_way() const {
  const std::lock_guard lock(mutex_);
  return under_way_;
}

void UpdateBeside::finish() {
  wait();
  parts_->gatherer->release();
}

DelayedUpdate::DelayedUpdate(torch::optim::Optimizer& optimizer, Shard& shard)
    : torch::optim::Optimizer(std::vector<torch::optim::OptimizerParamGroup>{},
                              std::make_unique<torch::optim::OptimizerOptions>()),
      optimizer_(optimizer),
      beside_(shard) {
  // add_param_group() knows LibTorch's own options only.
  for (const auto& group : optimizer.param_groups()) param_groups_.push_back(group);
  thread_ = std::thread([this] { serve(); });
}

DelayedUpdate::~DelayedUpdate() {
  {
    const std::lock_guard lock(mutex_);
    closing_ = true;
  }
  begun_.notify_one();
  thread_.join();
}

void DelayedUpdate::serve() {
  std::unique_lock lock(mutex_);
  while (true) {
    begun_.wait(lock, [&] { return stepping_ || closing_; });
    if (!stepping_) return;
    lock.unlock();
    std::exception_ptr error;
    try {
      beside_.wait_for_parts();
      optimizer_.step();
    } catch (...) {
      error = std::current_exception();
    }
    lock.lock();
    error_ = error;
    stepping_ = false;
    beside_.end();
  }
}

// Throws what the step has thrown, once.
void DelayedUpdate::wait() {
  beside_.wait();
  const std::lock_guard lock(mutex_);
  if (error_) std::rethrow_exception(std::exchange(error_, nullptr));
}

at::Tensor DelayedUpdate::step(LossClosure closure) {
  if (closure) {
    throw ConfigError(
        "reef::DelayedUpdate was given a closure, which a step beside the program cannot call: call backward "
        "before step().");
  }
  wait();
  if (optimizer_.param_groups().size() != param_groups_.size()) {
    throw ConfigError("reef::DelayedUpdate has " + std::to_string(param_groups_.size()) +
                      " groups of parameters, and its optimizer " +
                      std::to_string(optimizer_.param_groups().size()) + ": add groups before you make it.");
  }
  copy_options(param_groups_, optimizer_.param_groups());
  beside_.begin();
  {
    const std::lock_guard lock(mutex_);
    stepping_ = true;
  }
  begun_.notify_one();
  return {};
}

void DelayedUpdate::zero_grad(bool set_to_none) {
  if (!beside_.under_way()) torch::optim::Optimizer::zero_grad(set_to_none);
}

void DelayedUpdate::finish() {
  wait();
  beside_.finish();
}

void DelayedUpdate::save(torch::serialize::OutputArchive& archive) const {
  beside_.wait();
  optimizer_.save(archive);
}

void DelayedUpdate::load(torch::serialize::InputArchive& archive) {
  finish();
  optimizer_.load(archive);
  copy_options(optimizer_.param_groups(), param_groups_);
}

}  // namespace reef
