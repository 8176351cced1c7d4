#include "reef/collectives.h"

#include <ATen/MemoryOverlap.h>
#include <ATen/core/grad_mode.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/tensor.h>
#include <ATen/ops/view_as_real.h>

#include <algorithm>
#include <exception>
#include <functional>
#include <mutex>
#include <string>
#include <torch/csrc/distributed/c10d/ProcessGroup.hpp>
#include <unordered_set>
#include <utility>
#include <vector>

#include "distributed/members.h"
#include "reef/error.h"
#include "reef/ledger.h"

namespace reef {
namespace {

using WorkPtr = c10::intrusive_ptr<c10d::Work>;
using DtypeOf = at::ScalarType (*)(at::ScalarType);
using Send = std::function<void(const at::Tensor& buffer)>;

/// Waits for what `issue` starts. What goes wrong on the way is a rank that is gone; a wrong argument is
/// thrown as it is.
void run(const ProcessGroupPtr& group, const char* name, const std::function<WorkPtr()>& issue) {
  WorkPtr work;
  Heartbeat* const heart = heart_of(*group);
  try {
    if (heart != nullptr) heart->check();
    work = issue();
  } catch (const c10::DistError& error) {
    std::rethrow_exception(rank_failed(*group, name, error));
  } catch (const Heartbeat::Silence& error) {
    std::rethrow_exception(rank_failed(*group, name, error));
  }
  try {
    if (heart != nullptr) {
      heart->wait_for_collective(work, *group->getBackend(c10::kCPU));
    } else {
      work->wait();
    }
  } catch (const Heartbeat::Silence& error) {
    // A thread of its backend waits on, and whoever destroys that would wait for the thread.
    static std::mutex mutex;
    static auto* const kept = new std::vector<c10::intrusive_ptr<c10d::Backend>>;
    {
      const std::lock_guard lock(mutex);
      kept->push_back(group->getBackend(c10::kCPU));
    }
    std::rethrow_exception(rank_failed(*group, name, error));
  } catch (const std::exception& error) {
    std::rethrow_exception(rank_failed(*group, name, error));
  }
}

void check(const std::string& name, at::TensorList tensors, const ProcessGroupPtr& group,
           std::int64_t bucket_bytes) {
  if (!group)
    throw ConfigError(name + " was given no process group: make one with reef::init_process_group.");
  if (bucket_bytes <= 0) {
    throw ConfigError(name + " was given bucket_bytes " + std::to_string(bucket_bytes) +
                      ": give a positive number.");
  }
  for (std::size_t i = 0; i < tensors.size(); ++i) {
    const auto which = name + " was given tensor " + std::to_string(i);
    if (!tensors[i].defined()) throw ConfigError(which + ", which is undefined: leave it out on every rank.");
    if (tensors[i].layout() != at::kStrided || tensors[i].is_quantized()) {
      throw ConfigError(which + ", which is not dense (" + tensors[i].toString() + "): convert it first.");
    }
    if (at::has_internal_overlap(tensors[i]) == at::MemOverlap::Yes) {
      throw ConfigError(which +
                        ", whose elements share memory (an expanded tensor): pass a contiguous copy.");
    }
  }
}

/// What must be equal on all ranks before a byte may flow. gloo ends the process when a message is longer
/// than the receiver expects, and adds up the wrong elements when it is shorter.
struct Signature {
  Signature(const char* name, std::int64_t detail, at::TensorList list, std::int64_t bucket_bytes)
      : tensors(static_cast<std::int64_t>(list.size())) {
    for (const char* letter = name; *letter != '\0'; ++letter) mix(*letter);
    mix(detail);
    mix(bucket_bytes);
    for (const auto& tensor : list) {
      mix(static_cast<std::int64_t>(tensor.scalar_type()));
      mix(tensor.dim());
      for (const auto size : tensor.sizes()) mix(size);
      elements += tensor.numel();
    }
  }

  void mix(std::int64_t word) {  // FNV-1a over words
    hash = (hash ^ static_cast<std::uint64_t>(word)) * 1099511628211U;
  }

  std::uint64_t hash = 14695981039346656037U;
  std::int64_t tensors = 0;
  std::int64_t elements = 0;
};

std::string text(std::int64_t tensors, std::int64_t elements) {
  return std::to_string(tensors) + " tensors of " + std::to_string(elements) + " elements in all";
}

/// One small all-gather on the CPU. Not for CUDA tensors alone: the host would have to wait for the other
/// ranks.
void check_agreement(const char* name, at::TensorList tensors, const ProcessGroupPtr& group,
                     std::int64_t detail, std::int64_t bucket_bytes) {
  if (std::none_of(tensors.begin(), tensors.end(), [](const auto& tensor) { return tensor.is_cpu(); }))
    return;
  const Signature own(name, detail, tensors, bucket_bytes);
  std::vector<at::Tensor> input = {
      at::tensor({static_cast<std::int64_t>(own.hash), own.tensors, own.elements}, at::kLong)};
  std::vector<std::vector<at::Tensor>> output(1);
  for (int rank = 0; rank < group->getSize(); ++rank) output[0].push_back(at::empty({3}, at::kLong));
  run(group, name, [&] { return group->allgather(output, input); });
  for (int rank = 0; rank < group->getSize(); ++rank) {
    const auto* other = output[0][static_cast<std::size_t>(rank)].const_data_ptr<std::int64_t>();
    if (other[0] == static_cast<std::int64_t>(own.hash)) continue;
    throw ConfigError(std::string(name) + " was given " + text(own.tensors, own.elements) + " on rank " +
                      std::to_string(group->getRank()) + " and " + text(other[1], other[2]) + " on rank " +
                      std::to_string(rank) +
                      "; order, shapes, dtypes, root, reduction or bucket_bytes differ: pass "
                      "the same on every rank.");
  }
}

/// Tensors of one dtype and device that travel together.
struct Bucket {
  std::vector<at::Tensor> tensors;
  std::int64_t elements = 0;
};

std::vector<Bucket> fill_buckets(at::TensorList tensors, std::int64_t bucket_bytes, DtypeOf buffer_dtype) {
  std::vector<Bucket> full;
  std::vector<Bucket> filling;  // one per dtype and device
  std::unordered_set<const void*> seen;
  for (const auto& tensor : tensors) {
    if (tensor.numel() == 0 || !seen.insert(tensor.unsafeGetTensorImpl()).second) continue;
    const auto fits_kind = [&](const Bucket& bucket) {
      const auto& first = bucket.tensors.front();
      return first.scalar_type() == tensor.scalar_type() && first.device() == tensor.device();
    };
    auto bucket = std::find_if(filling.begin(), filling.end(), fits_kind);
    const auto bytes = static_cast<std::int64_t>(c10::elementSize(buffer_dtype(tensor.scalar_type())));
    if (bucket == filling.end()) {
      bucket = filling.emplace(filling.end());
    } else if ((bucket->elements + tensor.numel()) * bytes > bucket_bytes) {
      full.push_back(std::exchange(*bucket, {}));
    }
    bucket->tensors.push_back(tensor);
    bucket->elements += tensor.numel();
  }
  full.insert(full.end(), filling.begin(), filling.end());
  return full;
}

bool travels_as_it_is(const Bucket& bucket, DtypeOf buffer_dtype) {
  const auto& first = bucket.tensors.front();
  return bucket.tensors.size() == 1 && first.is_contiguous() && !first.is_conj() && !first.is_neg() &&
         buffer_dtype(first.scalar_type()) == first.scalar_type();
}

/// Sends every tensor, in buckets, and puts what comes back in its place.
void exchange(at::TensorList tensors, std::int64_t bucket_bytes, DtypeOf buffer_dtype, const Send& send) {
  const at::NoGradGuard no_grad;
  const CategoryScope communication(Category::kCommunication);
  at::Tensor flat;
  for (const auto& bucket : fill_buckets(tensors, bucket_bytes, buffer_dtype)) {
    const auto& first = bucket.tensors.front();
    if (travels_as_it_is(bucket, buffer_dtype)) {
      send(first.detach().as_strided({first.numel()},
                                     {1}));  // view(-1) of one element may keep another stride
      if (!first.is_inference())
        first.unsafeGetTensorImpl()->bump_version();  // as an in-place operator would
      continue;
    }
    const auto options = first.options().dtype(buffer_dtype(first.scalar_type()));
    const bool reusable = flat.defined() && flat.dtype() == options.dtype() &&
                          flat.device() == first.device() && flat.numel() >= bucket.elements;
    if (!reusable) {
      flat.reset();  // before the next is allocated
      flat = at::empty({bucket.elements}, options.requires_grad(false));
    }
    const auto each_part = [&](const auto& copy) {
      std::int64_t offset = 0;
      for (const auto& tensor : bucket.tensors) {
        copy(tensor, flat.narrow(0, offset, tensor.numel()).view(tensor.sizes()));
        offset += tensor.numel();
      }
    };
    each_part([](const at::Tensor& tensor, const at::Tensor& part) { part.copy_(tensor); });
    send(flat.narrow(0, 0, bucket.elements));
    each_part([](const at::Tensor& tensor, const at::Tensor& part) { tensor.copy_(part); });
  }
}

/// The dtype in which elements of `dtype` are summed: one that every backend adds. Converted back, the sum is
/// that of `dtype` itself (integers wrap around alike); for float8 it is rounded once instead of at every
/// addition.
at::ScalarType sum_dtype(at::ScalarType dtype) {
  switch (dtype) {
    case at::kBool:
    case at::kShort:
    case at::kUInt16:
      return at::kInt;
    case at::kUInt32:
    case at::kUInt64:
      return at::kLong;
    default:
      return at::isFloat8Type(dtype) ? at::kFloat : dtype;
  }
}

at::ScalarType same_dtype(at::ScalarType dtype) { return dtype; }

}  // namespace

void all_reduce(at::TensorList tensors, const ProcessGroupPtr& group, Reduction reduction,
                std::int64_t bucket_bytes) {
  constexpr const char* kName = "reef::all_reduce";
  check(kName, tensors, group, bucket_bytes);
  const bool mean = reduction == Reduction::kMean;
  for (const auto& tensor : tensors) {
    if (mean && at::isIntegralType(tensor.scalar_type(), /*includeBool=*/true)) {
      throw ConfigError(
          std::string(kName) + " was asked for the mean of " + tensor.toString() +
          ", which has no fractions: take the sum, or convert it to a floating-point dtype first.");
    }
  }
  const int size = group->getSize();
  if (size == 1) return;
  note_call(*group, kName);
  check_agreement(kName, tensors, group, mean, bucket_bytes);
  exchange(tensors, bucket_bytes, sum_dtype, [&](const at::Tensor& buffer) {
    std::vector<at::Tensor> wire = {buffer.is_complex() ? at::view_as_real(buffer) : buffer};
    run(group, kName, [&] { return group->allreduce(wire); });
    if (mean) wire.front().div_(size);
  });
}

void broadcast(at::TensorList tensors, const ProcessGroupPtr& group, int root, std::int64_t bucket_bytes) {
  constexpr const char* kName = "reef::broadcast";
  check(kName, tensors, group, bucket_bytes);
  const int size = group->getSize();
  if (root < 0 || root >= size) {
    throw ConfigError(std::string(kName) + " was given root " + std::to_string(root) + " in a world of " +
                      std::to_string(size) + ": ranks count from 0 to one less than the world size.");
  }
  if (size == 1) return;
  note_call(*group, kName);
  check_agreement(kName, tensors, group, root, bucket_bytes);
  c10d::BroadcastOptions options;
  options.rootRank = root;
  exchange(tensors, bucket_bytes, same_dtype, [&](const at::Tensor& buffer) {
    std::vector<at::Tensor> wire = {buffer.view(at::kByte)};  // bytes: a backend need not know the dtype
    run(group, kName, [&] { return group->broadcast(wire, options); });
  });
}

void barrier(const ProcessGroupPtr& group) {
  constexpr const char* kName = "reef::barrier";
  check(kName, {}, group, 1);
  note_call(*group, kName);
  c10d::BarrierOptions options;
  // Without a device c10d may pick one of CUDA's, and several ranks the same.
  const auto devices = group->getDeviceTypes();
  const bool on_cpu =
      std::any_of(devices.begin(), devices.end(), [](const auto& each) { return each.is_cpu(); });
  if (on_cpu) options.device = c10::Device(c10::kCPU);
  run(group, kName, [&] { return group->barrier(options); });
}

}  // namespace reef
