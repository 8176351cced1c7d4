// What a part of the outer steps keeps, as data, and taken over from data.
#include <ATen/core/grad_mode.h>
#include <ATen/ops/empty_like.h>

#include <algorithm>
#include <optional>
#include <utility>

#include "reef/error.h"
#include "reef/ledger.h"
#include "shard/outer_part.h"
#include "tier/hash.h"

namespace reef {
namespace {

using at::Tensor;
using Extent = RememberedTensor::Extent;

constexpr const char* kParameter = "parameter";
constexpr const char* kStart = "start";
constexpr const char* kMomentum = "momentum";
constexpr const char* kTravelling = "travelling";
constexpr const char* kNext = "; give what state() has given on this rank";

std::string bucket_name(const std::string& prefix, std::size_t bucket) {
  return prefix + "bucket " + std::to_string(bucket);
}
std::string exchange_name(const std::string& prefix) { return prefix + "exchange"; }

/// Of one name of a state: every value is asked for once.
class Given {
 public:
  Given(std::string name, const StateValues& values) : name_(std::move(name)), values_(values) {}

  std::optional<c10::IValue> find(const std::string& key) {
    const auto found =
        std::find_if(values_.begin(), values_.end(), [&](const auto& one) { return one.first == key; });
    if (found == values_.end()) return std::nullopt;
    ++known_;
    return found->second;
  }
  // A copy, of this dtype and so many elements in this shape, where `like` is; undefined, if there is none.
  Tensor copy(const std::string& key, const Tensor& like, Category category) {
    const auto found = find(key);
    if (!found) return {};
    const bool fits = found->isTensor() && found->toTensor().sizes() == like.sizes() &&
                      found->toTensor().scalar_type() == like.scalar_type();
    if (!fits)
      throw ConfigError("the state that is loaded has a " + key + " of " + name_ +
                        " that has another shape or dtype than here" + kNext);
    const CategoryScope scope(category);
    return at::empty_like(like, like.options().requires_grad(false)).copy_(found->toTensor());
  }
  Tensor need(const std::string& key, const Tensor& like, Category category) {
    const Tensor found = copy(key, like, category);
    if (!found.defined())
      throw ConfigError("the state that is loaded has no " + key + " of " + name_ + kNext);
    return found;
  }
  void check_all_known() const {
    if (known_ != values_.size())
      throw ConfigError("the state that is loaded has something of " + name_ + " that is not kept here" +
                        kNext);
  }

 private:
  const std::string name_;
  const StateValues& values_;
  std::size_t known_ = 0;
};

}  // namespace

NamedState OuterPart::state(const std::string& prefix) const {
  NamedState all;
  for (std::size_t item = 0; item < parameters_.size(); ++item) {
    auto& values = all.emplace_back(parameters_[item].name, StateValues{}).second;
    values.emplace_back(kParameter, parameters_[item].own.detach());
    if (!rule_.is_mean) values.emplace_back(kStart, start_[item]);
    if (momentum_[item].defined()) values.emplace_back(kMomentum, momentum_[item]);
  }
  const ExchangeMemory& memory = exchange_->memory();
  for (std::size_t bucket = 0; bucket < places_.size(); ++bucket) {
    auto& values = all.emplace_back(bucket_name(prefix, bucket), StateValues{}).second;
    if (under_way()) values.emplace_back(kTravelling, travelling_[bucket]->tensor());
    for (const RememberedTensor& what : memory.tensors()) {
      if (const Tensor kept = memory.tensor(bucket, what.name); kept.defined())
        values.emplace_back(what.name, kept);
    }
  }
  auto& numbers = all.emplace_back(exchange_name(prefix), StateValues{}).second;
  for (const std::string& name : memory.numbers()) numbers.emplace_back(name, memory.number(name));
  return all;
}

std::uint64_t digest_of(const Tensor& tensor) {
  const Pinned bytes(tensor.cpu().contiguous());
  return hash_bytes(bytes.tensor().const_data_ptr(), bytes.tensor().nbytes());
}

std::uint64_t OuterPart::digest(const NamedState& state) {
  std::uint64_t sum = 0;
  for (const auto& [name, values] : state) {
    for (const auto& [key, value] : values) {
      if (key != kStart && key != kMomentum && key != kTravelling) continue;
      sum = 31 * sum + digest_of(value.toTensor());
    }
  }
  return sum;
}

std::function<void()> OuterPart::prepared(const NamedState& state, const std::string& prefix) {
  const at::NoGradGuard no_grad;
  const auto of_name = [&](const std::string& name) {
    const auto found =
        std::find_if(state.begin(), state.end(), [&](const auto& one) { return one.first == name; });
    if (found == state.end()) throw ConfigError("the state that is loaded has nothing of " + name + kNext);
    return Given(name, found->second);
  };
  std::vector<Tensor> own, start, momentum;
  for (const auto& [name, tensor] : parameters_) {
    Given given = of_name(name);
    own.push_back(given.need(kParameter, tensor, Category::kOther));
    if (!rule_.is_mean) start.push_back(given.need(kStart, tensor, Category::kOptimizerState));
    momentum.push_back(given.copy(kMomentum, tensor, Category::kOptimizerState));
    given.check_all_known();
    if (momentum.back().defined() != momentum.front().defined())
      throw ConfigError("the state that is loaded has a momentum of some parameters, and none of " + name +
                        kNext);
  }
  std::vector<std::shared_ptr<Pinned>> travelling;
  std::vector<std::pair<std::pair<std::size_t, std::string>, Tensor>> remembered;
  const ExchangeMemory& memory = exchange_->memory();
  for (std::size_t bucket = 0; bucket < places_.size(); ++bucket) {
    Given given = of_name(bucket_name(prefix, bucket));
    const Tensor flat = flat_memory(bucket);
    const Tensor came = given.copy(kTravelling, flat, Category::kCommunication);
    if (came.defined()) travelling.push_back(std::make_shared<Pinned>(came));
    for (const RememberedTensor& what : memory.tensors()) {
      const bool all = what.extent == Extent::kBucket;
      const Tensor like = all ? flat : exchange_->ranks().own_slice(flat);
      if (const Tensor kept = given.copy(what.name, like, Category::kCommunication); kept.defined())
        remembered.push_back({{bucket, what.name}, kept});
    }
    given.check_all_known();
  }
  if (!travelling.empty() && travelling.size() != places_.size())
    throw ConfigError("the state that is loaded has some of the buckets that are under way" +
                      std::string(kNext));
  std::vector<std::pair<std::string, std::int64_t>> numbers;
  Given of_exchange = of_name(exchange_name(prefix));
  for (const std::string& name : memory.numbers()) {
    const auto number = of_exchange.find(name);
    if (!number || !number->isInt())
      throw ConfigError("the state that is loaded has no number " + name + " of the exchange" + kNext);
    numbers.emplace_back(name, number->toInt());
  }
  of_exchange.check_all_known();

  return [=, this] {
    const at::NoGradGuard taken_no_grad;
    for (std::size_t item = 0; item < own.size(); ++item) parameters_[item].own.copy_(own[item]);
    start_ = start;
    momentum_ = momentum;
    travelling_ = travelling;
    ticket_ = 0;
    ExchangeMemory& to = exchange_->memory();
    to.clear();
    for (const auto& [place, tensor] : remembered) to.remember(place.first, place.second, tensor);
    for (const auto& [name, number] : numbers) to.remember(name, number);
    to.keep_step();
  };
}

}  // namespace reef
