#include "shard/together.h"

#include <ATen/ops/empty.h>
#include <ATen/ops/zeros.h>
#include <torch/csrc/jit/serialization/pickle.h>

#include <algorithm>
#include <cstring>
#include <memory>
#include <torch/csrc/distributed/c10d/ProcessGroup.hpp>

#include "distributed/bytes_over_ranks.h"
#include "distributed/slice_exchange.h"
#include "page/pinned.h"
#include "reef/error.h"

namespace reef {
namespace {

using at::Tensor;
using c10::IValue;

// A budget must not move what is read and written here without an operator.
void pin_tensors(const IValue& value, std::vector<std::unique_ptr<Pinned>>& pins) {
  if (value.isTensor() && value.toTensor().defined()) {
    pins.push_back(std::make_unique<Pinned>(value.toTensor()));
  } else if (value.isTuple()) {
    for (const IValue& one : value.toTupleRef().elements()) pin_tensors(one, pins);
  }
}

Tensor bytes_of(const IValue& value) {
  std::vector<std::unique_ptr<Pinned>> pins;
  pin_tensors(value, pins);
  const std::vector<char> bytes = torch::jit::pickle_save(value);
  const Tensor all = at::empty({static_cast<std::int64_t>(bytes.size())}, at::kByte);
  std::memcpy(all.mutable_data_ptr(), bytes.data(), bytes.size());
  return all;
}

IValue value_of(const Tensor& bytes) {
  const Pinned pinned(bytes);
  const auto* const begin = static_cast<const char*>(bytes.const_data_ptr());
  return torch::jit::pickle_load(std::vector<char>(begin, begin + bytes.numel()));
}

Tensor bytes_of(const std::string& text) {
  const Tensor bytes = at::empty({static_cast<std::int64_t>(text.size())}, at::kByte);
  if (!text.empty()) std::memcpy(bytes.mutable_data_ptr(), text.data(), text.size());
  return bytes;
}

}  // namespace

void Together::here(const std::function<void()>& work) noexcept {
  if (!failed_) here_in_any_case(work);
}

void Together::here_in_any_case(const std::function<void()>& work) noexcept {
  std::exception_ptr failed;
  std::string said;
  try {
    work();
    return;
  } catch (const std::exception& error) {
    failed = std::current_exception();
    try {
      said = message_of(error);
    } catch (const std::exception&) {
      // There is no memory even for that.
    }
  } catch (...) {
    failed = std::current_exception();
  }
  if (failed_) return;  // the first error counts
  failed_ = failed;
  said_ = said.empty() ? "out of memory" : std::move(said);  // in the string itself
}

std::vector<std::int64_t> Together::tell(std::int64_t own) {
  const auto ranks = static_cast<std::int64_t>(group_->getSize());
  if (ranks == 1) {
    if (failed_) std::rethrow_exception(failed_);
    return {own};
  }
  SliceExchange exchange(group_, 0, group_->getSize());
  Tensor told = at::zeros({ranks}, at::TensorOptions().dtype(at::kLong).device(device_));
  exchange.own_slice(told).fill_(failed_ ? -1 : own);
  exchange.tell(told);
  told = told.cpu();
  const auto* const values = told.const_data_ptr<std::int64_t>();
  std::vector<std::int64_t> all(values, values + ranks);
  const auto first = std::find_if(all.begin(), all.end(), [](std::int64_t value) { return value < 0; });
  if (first == all.end()) return all;
  const std::vector<Tensor> said = gather_bytes(bytes_of(said_), group_, device_);
  if (failed_) std::rethrow_exception(failed_);
  const auto rank = static_cast<std::size_t>(first - all.begin());
  throw ConfigError("rank " + std::to_string(rank) + ": " +
                    std::string(static_cast<const char*>(said[rank].const_data_ptr()),
                                static_cast<std::size_t>(said[rank].numel())));
}

std::vector<IValue> Together::gather(const std::function<IValue()>& own) {
  Tensor bytes;
  here([&] { bytes = bytes_of(own()); });
  const std::vector<std::int64_t> sizes = tell(bytes.defined() ? bytes.numel() : 0);
  std::vector<IValue> found;
  if (sizes.size() == 1) {
    here([&] { found.push_back(value_of(bytes)); });
    return found;
  }
  const std::int64_t most = *std::max_element(sizes.begin(), sizes.end());
  SliceExchange exchange(group_, 0, group_->getSize());
  Tensor all;
  here([&] {
    all = at::zeros({static_cast<std::int64_t>(sizes.size()) * most},
                    at::TensorOptions().dtype(at::kByte).device(device_));
    exchange.own_slice(all).narrow(0, 0, bytes.numel()).copy_(bytes);
    bytes.reset();
  });
  agree();
  exchange.tell(all);
  here([&] {
    all = all.cpu();
    std::int64_t begin = 0;
    for (const std::int64_t size : sizes) {
      found.push_back(value_of(all.narrow(0, begin, size)));
      begin += most;
    }
  });
  return found;
}

IValue Together::broadcast(const std::function<IValue()>& of_first) {
  const bool first = group_->getRank() == 0;
  Tensor bytes;
  here([&] {
    if (first) bytes = bytes_of(of_first());
  });
  const std::vector<std::int64_t> sizes = tell(bytes.defined() ? bytes.numel() : 0);
  if (sizes.size() > 1) {
    here([&] {
      bytes = first ? bytes.to(device_)
                    : at::empty({sizes.front()}, at::TensorOptions().dtype(at::kByte).device(device_));
    });
    agree();
    reef::broadcast({bytes}, group_);
  }
  IValue value;
  here([&] { value = value_of(bytes.cpu()); });
  return value;
}

void Together::agree_on(const std::string& what, const std::string& own) {
  const std::vector<IValue> all = gather([&] { return IValue(own); });
  here([&] {
    for (std::size_t rank = 1; rank < all.size(); ++rank) {
      const std::string& first = all.front().toStringRef();
      const std::string& other = all[rank].toStringRef();
      if (other == first) continue;
      throw ConfigError(what + " is " + first + " on rank 0 and " + other + " on rank " +
                        std::to_string(rank) + "; make it alike on every rank");
    }
  });
  agree();
}

void agree_with_ranks(const ProcessGroupPtr& group, c10::Device device, const std::string& failed,
                      const std::string& rule) {
  Together together(group, device);
  together.here([&] {
    if (!failed.empty()) throw ConfigError(failed);
  });
  try {
    together.agree();
  } catch (const ConfigError&) {
    if (failed.empty()) throw;  // who has failed says it in its own words
    return;
  }
  Together(group, device).agree_on("the optimizer", rule);
}

}  // namespace reef
