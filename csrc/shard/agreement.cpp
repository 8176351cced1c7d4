#include "shard/agreement.h"

#include <algorithm>
#include <sstream>
#include <string>
#include <torch/csrc/distributed/c10d/ProcessGroup.hpp>

#include "distributed/bytes_over_ranks.h"
#include "distributed/members.h"
#include "distributed/tag_space.h"
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
  std::vector<std::string> lines = {options_text(options)};
  for (const auto& [name, tensor] : parameters) lines.push_back(line_of("parameter", name, tensor));
  for (const auto& [name, tensor] : buffers) lines.push_back(line_of("buffer", name, tensor));
  return lines;
}

constexpr int kExchanges = 3;

}  // namespace

std::string options_text(const ShardOptions& options) {
  std::ostringstream text;
  text << "stage " << static_cast<int>(options.stage) << ", bucket_bytes " << options.bucket_bytes
       << ", reduction " << static_cast<int>(options.reduction) << ", buffers "
       << static_cast<int>(options.buffers);
  if (options.sum_order == SumOrder::kNative) text << ", sum_order native";
  if (options.compression != Compression::kNone)
    text << ", compression " << compression_text(options.compression, options.compression_options);
  if (options.offload) text << ", offload";
  for (const ExchangeClass each : options.allow) text << ", allow " << name_of(each);
  if (options.resident_bytes) text << ", resident_bytes " << *options.resident_bytes;
  if (options.shard_degree != 0) text << ", shard_degree " << options.shard_degree;
  if (const auto& mixed = options.mixed_precision)
    text << ", mixed precision of " << c10::toString(mixed->parameters) << " and "
         << c10::toString(mixed->sums);
  return text.str();
}

std::string shard_name(int first_exchange) {
  return "shard " + std::to_string((first_exchange - TagSpace::kFirstFree) / kExchanges + 1);
}

int check_agreement(const std::string& caller, const Shard::Named& parameters, const Shard::Named& buffers,
                    const ProcessGroupPtr& group, const ShardOptions& options, std::string wrong,
                    GroupTags& numbers) {
  const c10::Device of_first = device_of(parameters, &Shard::Named::value_type::second);
  const c10::Device device = of_first.is_meta() ? c10::Device(c10::kCPU) : of_first;  // to say what is wrong
  if (group->getSize() == 1) {
    if (!wrong.empty()) throw ConfigError(wrong);
    numbers = GroupTags::take(group, kExchanges, device);
    return numbers.first();
  }
  note_call(*group, caller);
  // What is wrong, what must be alike.
  std::string own = wrong + "\n";
  if (wrong.empty()) {
    for (const std::string& line : lines_of(parameters, buffers, options)) own += line + "\n";
  }
  std::vector<std::vector<std::string>> all;
  for (const std::string& text : gather_texts(own, group, device)) all.push_back(lines_of(text));
  if (!wrong.empty()) throw ConfigError(wrong);
  for (std::size_t rank = 0; rank < all.size(); ++rank) {
    if (!all[rank].front().empty())
      throw ConfigError("rank " + std::to_string(rank) + ": " + all[rank].front());
  }
  for (auto& lines : all) lines.erase(lines.begin());
  const std::vector<std::string>& first = all.front();
  for (std::size_t rank = 1; rank < all.size(); ++rank) {
    const std::vector<std::string>& other = all[rank];
    if (other == first) continue;
    std::size_t i = 0;
    while (i < first.size() && i < other.size() && first[i] == other[i]) ++i;
    const auto line = [&](const std::vector<std::string>& of) {
      return i < of.size() ? of[i] : "nothing more";
    };
    throw ConfigError(caller + " was given different models or options: number " + std::to_string(i) +
                      " is " + line(first) + " on rank 0, and " + line(other) + " on rank " +
                      std::to_string(rank) + "; build the same on every rank.");
  }
  numbers = GroupTags::take(group, kExchanges, device);
  return numbers.first();
}

}  // namespace reef
