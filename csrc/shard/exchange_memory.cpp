#include "shard/exchange_memory.h"

#include <ATen/ops/zeros_like.h>

#include <algorithm>

namespace reef {

using at::Tensor;

ExchangeMemory::ExchangeMemory(std::string method, std::vector<RememberedTensor> tensors,
                               std::vector<std::string> numbers)
    : method_(std::move(method)), tensors_(std::move(tensors)), numbers_(std::move(numbers)) {}

Tensor ExchangeMemory::tensor(std::size_t bucket, const std::string& name, std::int64_t first) const {
  const auto found = kept_.find({bucket, name, first});
  return found == kept_.end() ? Tensor() : found->second;
}

std::int64_t ExchangeMemory::number(const std::string& name) const {
  const auto found = kept_numbers_.find(name);
  return found == kept_numbers_.end() ? 0 : found->second;
}

void ExchangeMemory::remember(std::size_t bucket, const std::string& name, Tensor tensor,
                              std::int64_t first) {
  in_step_[{bucket, name, first}] = std::move(tensor);
}
void ExchangeMemory::remember(const std::string& name, std::int64_t number) {
  numbers_in_step_[name] = number;
}

void ExchangeMemory::replace(std::size_t bucket, const std::string& name, Tensor tensor) {
  if (tensor.defined()) {
    kept_[{bucket, name, 0}] = std::move(tensor);
  } else {
    kept_.erase({bucket, name, 0});
  }
}

void ExchangeMemory::leave_out(std::size_t bucket, std::int64_t first, std::int64_t elements, int slice) {
  for (const RememberedTensor& what : tensors_) {
    if (what.extent == RememberedTensor::Extent::kFactor) {
      in_step_.erase({bucket, what.name, first});
      continue;
    }
    const auto found = in_step_.find({bucket, what.name, 0});
    if (found == in_step_.end()) continue;
    const Tensor before = tensor(bucket, what.name);
    Tensor& now = found->second;
    if (!now.defined() && before.defined()) now = at::zeros_like(before);
    if (!now.defined()) continue;
    const std::int64_t begin = what.extent == RememberedTensor::Extent::kSlice ? slice * now.numel() : 0;
    const std::int64_t from = std::max(first, begin);
    const std::int64_t until = std::min(first + elements, begin + now.numel());
    if (from >= until) continue;
    const Tensor part = now.narrow(0, from - begin, until - from);
    if (before.defined()) {
      part.copy_(before.narrow(0, from - begin, until - from));
    } else {
      part.zero_();
    }
  }
}

void ExchangeMemory::keep_step() {
  for (auto& [place, tensor] : in_step_) {
    if (tensor.defined()) {
      kept_[place] = std::move(tensor);
    } else {
      kept_.erase(place);
    }
  }
  for (const auto& [name, number] : numbers_in_step_) kept_numbers_[name] = number;
  forget_step();
}

void ExchangeMemory::forget_step() {
  in_step_.clear();
  numbers_in_step_.clear();
}

void ExchangeMemory::clear() {
  forget_step();
  kept_.clear();
  kept_numbers_.clear();
}

}  // namespace reef
