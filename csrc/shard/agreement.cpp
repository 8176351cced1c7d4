#include "shard/agreement.h"

#include <ATen/ops/from_blob.h>

#include <algorithm>
#include <bitset>
#include <mutex>
#include <optional>
#include <sstream>
#include <string>
#include <torch/csrc/distributed/c10d/ProcessGroup.hpp>

#include "distributed/bytes_over_ranks.h"
#include "distributed/slice_exchange.h"
#include "fork.h"
#include "reef/error.h"
#include "shard/flat.h"

namespace reef {
namespace {

using at::Tensor;

std::string line_of(const char* what, const std::string& name, const Tensor& tensor) {
  std::ostringstream line;
  line << what << " " << name << " of " << c10::toString(tensor.scalar_type()) << " " << tensor.sizes();
  if (!tensor.is_contiguous()) line << " with strides " << tensor.strides();
  if (tensor.requires_grad()) line << ", which requires a gradient";
  return line.str();
}

std::vector<std::string> lines_of(const Shard::Named& parameters, const Shard::Named& buffers,
                                  const ShardOptions& options) {
  std::vector<std::string> lines = {"stage " + std::to_string(static_cast<int>(options.stage)) +
                                    ", bucket_bytes " + std::to_string(options.bucket_bytes) +
                                    ", reduction " + std::to_string(static_cast<int>(options.reduction)) +
                                    ", buffers " + std::to_string(static_cast<int>(options.buffers)) +
                                    (options.sum_order == SumOrder::kNative ? ", sum_order native" : "") +
                                    (options.offload ? ", offload" : "")};
  if (const auto& resident = options.resident_bytes)
    lines.front() += ", resident_bytes " + std::to_string(*resident);
  if (options.shard_degree != 0) lines.front() += ", shard_degree " + std::to_string(options.shard_degree);
  if (const auto& mixed = options.mixed_precision) {
    lines.front() += std::string(", mixed precision of ") + c10::toString(mixed->parameters) + " and " +
                     c10::toString(mixed->sums);
  }
  for (const auto& [name, tensor] : parameters) lines.push_back(line_of("parameter", name, tensor));
  for (const auto& [name, tensor] : buffers) lines.push_back(line_of("buffer", name, tensor));
  return lines;
}

// Of every rank.
std::vector<std::string> exchanged(const std::string& own, const ProcessGroupPtr& group, c10::Device device) {
  const auto size = static_cast<std::int64_t>(own.size());
  const Tensor bytes = at::from_blob(const_cast<char*>(own.data()), {size}, at::kByte);
  std::vector<std::string> all;
  for (const Tensor& text : gather_bytes(bytes, group, device)) {
    all.emplace_back(static_cast<const char*>(text.const_data_ptr()), static_cast<std::size_t>(text.numel()));
  }
  return all;
}

constexpr int kPlaces = (SliceExchange::kNumbers - 1) / ExchangeNumbers::kExchanges;

struct Taken {
  MutexAtFork mutex{AtFork::Order::kTables};
  std::bitset<kPlaces> places;
};
Taken& taken() {
  static auto* const all = new Taken;
  return *all;
}

std::vector<std::string> split(const std::string& text) {
  std::vector<std::string> lines;
  std::istringstream stream(text);
  for (std::string line; std::getline(stream, line);) lines.push_back(line);
  return lines;
}

}  // namespace

std::optional<ExchangeNumbers> ExchangeNumbers::take() {
  const std::lock_guard lock(taken().mutex);
  for (int place = 0; place < kPlaces; ++place) {
    if (taken().places[static_cast<std::size_t>(place)]) continue;
    taken().places.set(static_cast<std::size_t>(place));
    ExchangeNumbers numbers;
    numbers.place_ = place;
    return numbers;
  }
  return std::nullopt;
}

ExchangeNumbers::~ExchangeNumbers() {
  if (place_ < 0) return;
  const std::lock_guard lock(taken().mutex);
  taken().places.reset(static_cast<std::size_t>(place_));
}

int check_agreement(const Shard::Named& parameters, const Shard::Named& buffers, const ProcessGroupPtr& group,
                    const ShardOptions& options, std::string wrong, ExchangeNumbers& numbers) {
  // Rank 0's count: others may have made other shards, in other groups.
  const bool chooses = group->getRank() == 0;
  if (chooses && wrong.empty()) {
    std::optional<ExchangeNumbers> free = ExchangeNumbers::take();
    if (free) numbers = std::move(*free);
    if (!free) {
      wrong = "there are " + std::to_string(kPlaces) +
              " shards in this process already; shard larger modules, or end some.";
    }
  }
  const int number = numbers.place();
  if (group->getSize() == 1) {
    if (!wrong.empty()) throw ConfigError(wrong);
    return ExchangeNumbers::first_at(number);
  }
  // What is wrong, what must be alike, the number.
  std::string own = wrong + "\n";
  if (wrong.empty()) {
    for (const std::string& line : lines_of(parameters, buffers, options)) own += line + "\n";
  }
  own += std::to_string(number);
  const c10::Device device = device_of(parameters, &Shard::Named::value_type::second);
  std::vector<std::vector<std::string>> all;
  for (const std::string& text : exchanged(own, group, device)) all.push_back(split(text));
  if (!wrong.empty()) throw ConfigError(wrong);
  for (std::size_t rank = 0; rank < all.size(); ++rank) {
    if (!all[rank].front().empty())
      throw ConfigError("rank " + std::to_string(rank) + ": " + all[rank].front());
  }
  const int of_first = std::stoi(all.front().back());
  for (auto& lines : all) lines = {lines.begin() + 1, lines.end() - 1};
  const std::vector<std::string>& first = all.front();
  for (std::size_t rank = 1; rank < all.size(); ++rank) {
    const std::vector<std::string>& other = all[rank];
    if (other == first) continue;
    std::size_t i = 0;
    while (i < first.size() && i < other.size() && first[i] == other[i]) ++i;
    const auto line = [&](const std::vector<std::string>& of) {
      return i < of.size() ? of[i] : "nothing more";
    };
    throw ConfigError("reef::shard was given different models or options: number " + std::to_string(i) +
                      " is " + line(first) + " on rank 0, and " + line(other) + " on rank " +
                      std::to_string(rank) + "; build the same on every rank.");
  }
  return ExchangeNumbers::first_at(of_first);
}

}  // namespace reef
