// One pass of backward: gradients arrive in torch's buckets and travel in the hook's own.
#include <ATen/ops/full.h>
#include <ATen/ops/zeros.h>

#include <limits>
#include <torch/csrc/distributed/c10d/ProcessGroup.hpp>
#include <utility>

#include "distributed/members.h"
#include "reef/error.h"
#include "reef/ledger.h"
#include "shard/ddp_hook.h"

namespace reef {

using at::Tensor;

void DdpHook::Parts::refuse(const std::string& what) const {
  throw ConfigError("rank " + std::to_string(divided.group->getRank()) + ": " + what);
}

void DdpHook::Parts::take(const Tensor& buffer, c10::ArrayRef<Tensor> given, bool is_last) {
  if (during == During::kFailed) std::rethrow_exception(error);
  if (during == During::kWhole)
    refuse("a gradient has come to reef::DdpHook, and the pass before it has not ended: call end_pass().");
  try {
    if (during == During::kNoPass) begin_pass();
    put(buffer, given);
    for (; next_bucket < to_come.size() && to_come[next_bucket] == 0; ++next_bucket)
      line_of(next_bucket).lane->submit([this, bucket = next_bucket] { run(bucket); });
    if (come == items.size()) {
      finish();
    } else if (is_last) {
      refuse("backward has ended for reef::DdpHook with gradients of " + std::to_string(come) + " of " +
             std::to_string(items.size()) + " parameters: make it of those that the wrapper reduces.");
    }
  } catch (...) {
    during = During::kFailed;
    error = std::current_exception();
    note_shard_ends(*divided.group, name);  // for those that wait for this rank
    throw;
  }
}

void DdpHook::Parts::begin_pass() {
  during = During::kPass;
  ++step;
  note_call(*divided.group, "the backward pass of step " + std::to_string(step), name);
  for (const Line& line : lines) line.exchange->begin_step(step);
}

void DdpHook::Parts::put(const Tensor& buffer, c10::ArrayRef<Tensor> given) {
  if (buffer.layout() != at::kStrided || buffer.dim() != 1 || !buffer.is_contiguous() || !buffer.is_cpu()) {
    refuse(
        "reef::DdpHook was given a bucket that is sparse, or not flat memory on the CPU: give dense "
        "gradients.");
  }
  // By its memory alone: lanes must not be the last that have a tensor which Python knows.
  buffers.push_back(std::make_unique<Pinned>(alias(buffer, 0, buffer.numel())));
  std::int64_t offset = 0;
  for (const Tensor& parameter : given) {
    const auto found = item_of.find(parameter.unsafeGetTensorImpl());
    if (found == item_of.end()) {
      refuse(
          "a bucket has the gradient of a parameter that reef::DdpHook was not given: make the wrapper and "
          "the hook when the module has its parameters.");
    }
    Item& item = items[found->second];
    const std::string& of = divided.parameters[found->second].name;
    if (item.has_come) {
      refuse("the gradient of parameter " + of +
             " has come to reef::DdpHook twice in one pass, or the pass "
             "before was left before its end: make the wrapper and the hook anew.");
    }
    if (buffer.scalar_type() != parameter.scalar_type() || offset + parameter.numel() > buffer.numel()) {
      refuse("the gradient of parameter " + of +
             " has come to reef::DdpHook in another dtype or size than the "
             "parameter's: keep both as they were.");
    }
    item.has_come = true;
    item.is_seen = same_storage(parameter.grad(), buffer);
    item.values = alias(buffer, offset, parameter.numel());
    --to_come[item.bucket];
    ++come;
    offset += parameter.numel();
  }
  if (offset != buffer.numel() || given.empty()) {
    refuse("reef::DdpHook was given a bucket that has other elements than its parameters: give both alike.");
  }
}

// Exchanges one bucket. Runs on a lane.
void DdpHook::Parts::run(std::size_t bucket) {
  const CategoryScope communication(Category::kCommunication);
  const at::ScalarType dtype = dtype_of_sums(places[bucket].front().item);
  const Pinned flat(at::zeros({divided.layout.elements(bucket)}, dtype));
  const auto each = [&](const auto& visit) {
    for (const FlatPlace& place : places[bucket]) {
      const Tensor& values = items[place.item].values;
      visit(values, alias(flat.tensor(), place.offset, values.numel()));
    }
  };
  each([](const Tensor& values, const Tensor& place) { place.copy_(values); });
  GradientExchange& exchange = exchange_of(bucket);
  const GradientBucket whole{bucket, flat.tensor(), flat.tensor(), places[bucket]};
  if (search) {
    search->exchange(exchange, whole);
  } else {
    exchange.exchange(whole);
  }
  each([](const Tensor& values, const Tensor& place) { values.copy_(place); });
}

// A rank that has failed within the pass does not come here, and will not, so those that wait are told.
void DdpHook::Parts::finish() {
  note_call(*divided.group, "the end of the backward pass of step " + std::to_string(step), name);
  for (const Line& line : lines) line.lane->wait_all();
  if (search) look_for_nonfinite();
  for (Item& item : items) item.values.reset();
  buffers.clear();
  during = During::kWhole;
}

// A pass in which something was not finite is void on all ranks: its gradients are NaN.
void DdpHook::Parts::look_for_nonfinite() {
  const auto largest = [&](const Tensor& values) {
    lines[0].lane->submit([&] { lines[0].exchange->ranks().largest(values); });
    lines[0].lane->wait_all();
    return values;
  };
  is_void = largest(at::full({1}, search->any() ? 1 : 0, at::kByte)).item<std::uint8_t>() != 0;
  nonfinite.clear();
  if (!is_void) return;
  std::vector<std::string> names;
  for (const ReducedParameter& one : divided.parameters) names.push_back(one.name);
  nonfinite = search->of_all_ranks(names, lines[0].exchange->ranks(), largest);
  for (Item& item : items) item.values.fill_(std::numeric_limits<double>::quiet_NaN());
}

void DdpHook::Parts::end_pass(const std::optional<Tensor>& used) {
  if (during != During::kWhole) return;
  if (used) {
    const auto count = static_cast<std::int64_t>(items.size());
    if (used->numel() != count) {
      refuse("reef::DdpHook was told of " + std::to_string(used->numel()) +
             " parameters whether they were used, and has " + std::to_string(count) +
             ": make it of those that the wrapper reduces.");
    }
    const Tensor ranks = used->to(at::kCPU, at::kLong).contiguous();
    for (std::size_t i = 0; i < items.size(); ++i) {
      if (items[i].is_seen || ranks.const_data_ptr<std::int64_t>()[items.size() - 1 - i] != 0) continue;
      const std::size_t bucket = items[i].bucket;
      exchange_of(bucket).leave_out(bucket, flat_place_of(i).offset, divided.parameters[i].tensor.numel());
    }
  }
  end_step(/*used=*/!is_void);
  for (Item& item : items) item.has_come = false;
  for (std::size_t bucket = 0; bucket < to_come.size(); ++bucket) to_come[bucket] = places[bucket].size();
  next_bucket = 0;
  come = 0;
  during = During::kNoPass;
}

void DdpHook::Parts::end_step(bool used) {
  for (const Line& line : lines) line.exchange->end_step(used);
}

// What is remembered is that of a step that has ended.
void DdpHook::Parts::rest() {
  if (during == During::kNoPass) return;
  if (during != During::kFailed) {
    refuse(
        "the state of reef::DdpHook was asked for in the middle of a pass, or after one that was left before "
        "its end: ask when backward is over.");
  }
  for (const Line& line : lines) line.lane->drain();
  end_step(/*used=*/false);
}

}  // namespace reef
