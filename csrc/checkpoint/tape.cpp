#include "checkpoint/tape.h"

#include <ATen/core/grad_mode.h>
#include <c10/core/TensorImpl.h>
#include <torch/csrc/autograd/graph_task.h>

#include <algorithm>
#include <exception>
#include <sstream>
#include <utility>

#include "checkpoint/captured.h"
#include "checkpoint/writes_undone.h"
#include "observer/call.h"
#include "reef/error.h"
#include "tier/hash.h"

namespace reef {
namespace {

/// Thrown from within a function that has saved all that is needed of it. Not an error; of a type that passes
/// through Python.
struct Whole final : std::exception {
  const char* what() const noexcept override { return "reef: what was to be recomputed is there"; }
};

std::string shape_of(const std::vector<std::int64_t>& sizes, at::ScalarType dtype) {
  std::ostringstream text;
  text << dtype << ' ' << c10::IntArrayRef(sizes);
  return text.str();
}

}  // namespace

/// Has a number in the graph's place of a tensor. In-place changes are noticed, as autograd would have.
class Tape::RecordingHook final : public torch::autograd::SavedVariableHooks {
 public:
  RecordingHook(std::shared_ptr<Tape> tape, Keep keep) : tape_(std::move(tape)), keep_(keep) {}

  void call_pack_hook(const at::Tensor& tensor) override {
    const std::lock_guard lock(*tape_->mutex_);
    index_ = tape_->saved_.size();
    tape_->saved_.push_back(tape_->describe(tensor));
    if (!tensor.is_inference()) {
      version_ = tensor.unsafeGetTensorImpl()->version_counter();
      saved_version_ = version_.current_version();
    }
    if (keep_ == Keep::kTensors) tape_->tensors_.push_back(tensor.detach());
  }

  at::Tensor call_unpack_hook() override {
    if (version_.enabled() && version_.current_version() != saved_version_) {
      throw RecomputeError(tape_->what_ + ": a tensor that backward needs, " +
                           shape_of(tape_->saved_[index_].sizes, tape_->saved_[index_].dtype) +
                           ", has been modified in place since forward; modify a copy of it");
    }
    return tape_->get(index_);
  }

 private:
  std::shared_ptr<Tape> tape_;
  Keep keep_;
  std::size_t index_ = 0;
  c10::VariableVersion version_{0};
  std::uint32_t saved_version_ = 0;
};

/// Gives the tape what is saved once more. The graph of this run is nobody's, unless the function goes
/// backward itself.
class Tape::RetakingHook final : public torch::autograd::SavedVariableHooks {
 public:
  RetakingHook(Tape& tape, Stop stop) : tape_(tape), stop_(stop) {}

  void call_pack_hook(const at::Tensor& tensor) override {
    Captured::SecondRun::check_innermost();
    tensor_ = tensor.detach();
    const std::size_t index = tape_.tensors_.size();
    tape_.expect(index, tensor_);
    tape_.tensors_.push_back(tensor_);
    if (stop_ != Stop::kOnceWhole || index + 1 < tape_.saved_.size()) return;
    // Such as the noise of rrelu: then the function runs to its end, which is not far.
    const auto& all = tape_.tensors_;
    if (std::none_of(all.begin(), all.end(), ObservedRun::is_unfinished)) throw Whole();
  }
  at::Tensor call_unpack_hook() override { return tensor_; }

 private:
  Tape& tape_;
  Stop stop_;
  at::Tensor tensor_;
};

SavedTensorScope::Make Tape::recording(const std::shared_ptr<Tape>& tape, Keep keep) {
  tape->whole_ = keep == Keep::kTensors;
  return [tape, keep] { return std::make_unique<RecordingHook>(tape, keep); };
}

void Tape::retake(const std::function<void()>& function, Stop stop) {
  const std::lock_guard lock(*mutex_);
  tensors_.clear();
  whole_ = false;
  try {
    const SavedTensorScope keeping([&] { return std::make_unique<RetakingHook>(*this, stop); });
    const at::AutoGradMode grad_mode(true);
    if (!saved_.empty() || stop == Stop::kAtItsEnd) function();
  } catch (...) {
    // Whatever the end looks like by now: Python makes an error of its own of it.
    if (stop == Stop::kAtItsEnd || tensors_.size() < saved_.size()) {
      forget();
      throw;
    }
  }
  if (tensors_.size() != saved_.size()) {
    const std::size_t found = tensors_.size();
    forget();
    throw RecomputeError(what_ + ": it has saved " + std::to_string(found) +
                         " tensors when it was run once more, and " + std::to_string(saved_.size()) +
                         " at first; a function that is checkpointed computes the same twice");
  }
  whole_ = true;
}

void Tape::forget() {
  const std::lock_guard lock(*mutex_);
  tensors_.clear();
  whole_ = false;
}

std::size_t Tape::references(const c10::StorageImpl& storage) const {
  return static_cast<std::size_t>(
      std::count_if(tensors_.begin(), tensors_.end(), [&](const at::Tensor& tensor) {
        return tensor.defined() && tensor.has_storage() &&
               tensor.storage().unsafeGetStorageImpl() == &storage;
      }));
}

std::vector<c10::Storage> Tape::own_storages() const {
  std::vector<c10::Storage> own;
  for (const at::Tensor& tensor : tensors_) {
    if (!tensor.defined() || !tensor.has_storage() || tensor.nbytes() == 0) continue;
    const c10::Storage& storage = tensor.storage();
    const bool known = std::any_of(own.begin(), own.end(),
                                   [&](const c10::Storage& other) { return other.is_alias_of(storage); });
    if (!known && storage.use_count() == references(*storage.unsafeGetStorageImpl())) own.push_back(storage);
  }
  return own;
}

Tape::Saved Tape::describe(const at::Tensor& tensor) const {
  std::uint64_t hash = 0;
  const bool opaque = tensor.layout() != c10::kStrided ||
                      tensor.scalar_type() == at::kByte ||  // workspaces have gaps
                      ObservedRun::is_unfinished(tensor);
  if (checks_values_ && !opaque) {
    const at::NoGradGuard no_grad;
    const at::Tensor plain = tensor.detach().contiguous().cpu();
    hash = hash_bytes(plain.const_data_ptr(), plain.nbytes());
  }
  return {tensor.sizes().vec(), tensor.scalar_type(), tensor.device(), hash};
}

void Tape::expect(std::size_t index, const at::Tensor& tensor) const {
  if (index >= saved_.size()) {
    throw RecomputeError(what_ + ": it has saved more tensors when it was run once more than the " +
                         std::to_string(saved_.size()) +
                         " at first; a function that is checkpointed computes the same twice");
  }
  const Saved now = describe(tensor);
  const Saved& first = saved_[index];
  const bool alike = now.sizes == first.sizes && now.dtype == first.dtype && now.device == first.device;
  if (alike && (now.hash == first.hash || WritesUndone::puts_back(tensor))) return;
  throw RecomputeError(
      what_ + ": saved tensor " + std::to_string(index + 1) + " of " + std::to_string(saved_.size()) +
      (alike ? ", " + shape_of(now.sizes, now.dtype) + ", has other values when it is computed once more"
             : " is " + shape_of(now.sizes, now.dtype) + " when it is computed once more, and was " +
                   shape_of(first.sizes, first.dtype)) +
      "; a function that is checkpointed computes the same twice");
}

at::Tensor Tape::get(std::size_t index) {
  const std::lock_guard lock(*mutex_);
  if (whole_ || index >= tensors_.size() || !tensors_[index].defined()) wanted_();
  at::Tensor tensor = tensors_.at(index);
  if (in_backward() && !torch::autograd::get_current_graph_task_keep_graph()) {
    whole_ = false;
    tensors_[index].reset();
  }
  return tensor;
}

}  // namespace reef
