#include "reef/compression.h"

#include <algorithm>
#include <array>
#include <charconv>
#include <cmath>
#include <limits>

#include "reef/error.h"

namespace reef {
namespace {

struct OptionRow {
  const char* name;
  StepSchedule CompressionOptions::*value;
  double least, most;
  bool above_least;         ///< and not the least itself
  bool whole;               ///< no fractions
  bool scheduled;           ///< may change with the steps
  bool below_most = false;  ///< and not the most itself
};
constexpr double kMostWhole = 9007199254740992;  // 2^53: beyond it not all whole numbers are a double
constexpr double kMostNorm = std::numeric_limits<float>::max();
constexpr std::array<OptionRow, 9> kOptions = {{
    {"density", &CompressionOptions::density, 0, 1, /*above_least=*/true, /*whole=*/false, true},
    {"bits", &CompressionOptions::bits, 2, 8, /*above_least=*/false, /*whole=*/true, true},
    {"entropy_coded", &CompressionOptions::entropy_coded, 0, 1, /*above_least=*/false, /*whole=*/true, false},
    {"rank", &CompressionOptions::rank, 1, 65536, /*above_least=*/false, /*whole=*/true, true},
    {"seed", &CompressionOptions::seed, 0, kMostWhole, /*above_least=*/false, /*whole=*/true, false},
    {"momentum", &CompressionOptions::momentum, 0, 1, /*above_least=*/false, /*whole=*/false, true,
     /*below_most=*/true},
    {"max_norm", &CompressionOptions::max_norm, 0, kMostNorm, /*above_least=*/true, /*whole=*/false, true},
    {"warmup_steps", &CompressionOptions::warmup_steps, 1, kMostWhole, /*above_least=*/false, /*whole=*/true,
     false},
    {"beta1", &CompressionOptions::beta1, 0, 1, /*above_least=*/false, /*whole=*/false, false,
     /*below_most=*/true},
}};

struct MethodRow {
  Compression compression;
  const char* name;
  std::vector<std::string> options;  ///< that it takes
};
const std::vector<MethodRow>& methods() {
  static const std::vector<MethodRow> all = {
      {Compression::kNone, "none", {}},
      {Compression::kAuto, "auto", {"density", "bits", "rank", "seed"}},
      {Compression::kBFloat16, "bfloat16", {}},
      {Compression::kFloat16, "float16", {}},
      {Compression::kQsgd, "qsgd", {"bits", "entropy_coded", "seed"}},
      {Compression::kSign, "sign", {}},
      {Compression::kPowerSgd, "powersgd", {"rank", "seed"}},
      {Compression::kPowerSgdAlternating, "powersgd_alternating", {"rank", "seed"}},
      {Compression::kTopK, "topk", {"density"}},
      {Compression::kGTopK, "gtopk", {"density"}},
      {Compression::kGTopKTree, "gtopk_tree", {"density"}},
      {Compression::kOkTopK, "oktopk", {"density"}},
      {Compression::kDgc, "dgc", {"density", "momentum", "max_norm"}},
      {Compression::kOneBitAdam, "one_bit_adam", {"warmup_steps", "beta1"}},
  };
  return all;
}

const MethodRow& row_of(Compression compression) {
  return *std::find_if(methods().begin(), methods().end(),
                       [&](const MethodRow& row) { return row.compression == compression; });
}

// Numbers that differ have texts that do.
std::string number_text(double value) {
  std::array<char, 32> text{};
  return {text.data(), std::to_chars(text.data(), text.data() + text.size(), value).ptr};
}

void check_value(const OptionRow& option, double value) {
  const bool in_range = std::isfinite(value) &&
                        (option.below_most ? value < option.most : value <= option.most) &&
                        (option.above_least ? value > option.least : value >= option.least);
  if (in_range && (!option.whole || value == std::floor(value))) return;
  throw ConfigError("reef::shard was given the compression option " + std::string(option.name) + " " +
                    number_text(value) + ": give " + (option.whole ? "a whole number " : "a number ") +
                    (option.above_least ? "above " : "from ") + number_text(option.least) +
                    (option.below_most    ? " to less than "
                     : option.above_least ? ", at most "
                                          : " to ") +
                    number_text(option.most) + ".");
}

}  // namespace

StepSchedule::StepSchedule(std::vector<Entry> entries) : entries_(std::move(entries)) {
  bool in_order = !entries_.empty() && entries_.front().first == 0;
  for (std::size_t i = 1; i < entries_.size(); ++i)
    in_order = in_order && entries_[i - 1].first < entries_[i].first;
  if (!in_order)
    throw ConfigError(
        "reef::StepSchedule was given entries of which the first is not of step 0, or whose steps do not "
        "increase: give pairs of a step and a value, {{0, 0.25}, {100, 0.001}}.");
}

double StepSchedule::at(std::int64_t step, double otherwise) const {
  double value = otherwise;
  for (const auto& [first, of_entry] : entries_) {
    if (first <= step) value = of_entry;
  }
  return value;
}

bool compresses_on_devices(Compression compression) {
  switch (compression) {
    case Compression::kBFloat16:
    case Compression::kFloat16:
    case Compression::kTopK:
    case Compression::kGTopK:
    case Compression::kGTopKTree:
    case Compression::kOkTopK:
    case Compression::kDgc:
      return true;
    default:
      return false;
  }
}

bool has_momentum(Compression compression) { return compression == Compression::kDgc; }

const char* name_of(Compression compression) { return row_of(compression).name; }

Compression compression_named(const std::string& name) {
  std::string all;
  for (const MethodRow& row : methods()) {
    if (row.name == name) return row.compression;
    all += (all.empty() ? "\"" : ", \"") + std::string(row.name) + "\"";
  }
  throw ConfigError("compression '" + name + "' is none of " + all);
}

void check_compression(Compression compression, const CompressionOptions& options) {
  const std::vector<std::string>& taken = row_of(compression).options;
  for (const OptionRow& option : kOptions) {
    const StepSchedule& given = options.*option.value;
    if (!given.has_value()) continue;
    if (std::find(taken.begin(), taken.end(), option.name) == taken.end()) {
      throw ConfigError("reef::shard was given the compression option " + std::string(option.name) +
                        ", which compression " + name_of(compression) + " does not take: leave it out.");
    }
    if (!option.scheduled && given.entries().size() > 1) {
      throw ConfigError("reef::shard was given the compression option " + std::string(option.name) +
                        " with a schedule: give one number for all steps.");
    }
    for (const auto& [step, value] : given.entries()) check_value(option, value);
  }
  if (compression == Compression::kOneBitAdam && !options.warmup_steps.has_value()) {
    throw ConfigError(
        "reef::shard was given compression one_bit_adam without warmup_steps: give the steps before ranks "
        "exchange momentum, 15 to 20 percent of all.");
  }
}

CompressionOptions options_taken(Compression compression, const CompressionOptions& options) {
  CompressionOptions taken;
  for (const std::string& name : row_of(compression).options) {
    const auto option = std::find_if(kOptions.begin(), kOptions.end(),
                                     [&](const OptionRow& each) { return each.name == name; });
    taken.*option->value = options.*option->value;
  }
  return taken;
}

std::string compression_text(Compression compression, const CompressionOptions& options) {
  std::string text = name_of(compression);
  for (const OptionRow& option : kOptions) {
    const StepSchedule& given = options.*option.value;
    if (!given.has_value()) continue;
    text += std::string(" with ") + option.name;
    for (const auto& [step, value] : given.entries())
      text += (step == 0 ? " " : ", from step " + std::to_string(step) + " on ") + number_text(value);
  }
  return text;
}

void set_compression_option(CompressionOptions& options, const std::string& name, StepSchedule value) {
  for (const OptionRow& option : kOptions) {
    if (option.name != name) continue;
    options.*option.value = std::move(value);
    return;
  }
  throw ConfigError("reef::shard was given the compression option '" + name + "', which there is not.");
}

}  // namespace reef
