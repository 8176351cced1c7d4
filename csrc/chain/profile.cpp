#include <algorithm>
#include <cmath>
#include <cstdio>

#include "chain/terms.h"
#include "reef/bytes.h"
#include "reef/chain_profile.h"
#include "reef/error.h"

namespace reef {
namespace {

std::string number(std::size_t index) { return std::to_string(index + 1); }

[[noreturn]] void refuse(const ChainProfile& profile, std::size_t index, const std::string& what) {
  throw ConfigError("ChainProfile: stage " + number(index) + " (" + profile.stages[index].name + ") " + what +
                    "; profile the chain anew");
}

struct Row {
  std::string number, name, output, tape, forward, backward, gradient, forward_ms, retape_ms, backward_ms,
      spread;

  std::string line() const {
    char text[256];
    std::snprintf(text, sizeof text, "%4s %-24.24s %10s %10s %10s %10s %10s %9s %9s %9s %7s\n",
                  number.c_str(), name.c_str(), output.c_str(), tape.c_str(), forward.c_str(),
                  backward.c_str(), gradient.c_str(), forward_ms.c_str(), retape_ms.c_str(),
                  backward_ms.c_str(), spread.c_str());
    return text;
  }
};

std::string bytes(std::uint64_t count) { return format_bytes(static_cast<std::int64_t>(count)); }

std::string decimal(double value, const char* unit = "") {
  char text[64];
  std::snprintf(text, sizeof text, "%.2f%s", value, unit);
  return text;
}

std::string row_of(const std::string& index, const StageProfile& stage) {
  return Row{index,
             stage.name,
             bytes(stage.output_bytes),
             bytes(stage.tape_bytes),
             bytes(stage.taped_bytes),
             bytes(stage.backward_bytes),
             bytes(stage.gradient_bytes),
             decimal(stage.forward_seconds * 1e3),
             decimal(stage.retape_seconds * 1e3),
             decimal(stage.backward_seconds * 1e3),
             decimal(stage.spread * 1e2, " %")}
      .line();
}

}  // namespace

std::string ChainProfile::table() const {
  std::string text =
      Row{"", "stage", "output", "tape", "forward", "backward", "gradients", "F ms", "R ms", "B ms", "spread"}
          .line();
  StageProfile sum{"sum, and the largest peaks"};
  for (std::size_t i = 0; i < stages.size(); ++i) {
    const StageProfile& stage = stages[i];
    text += row_of(number(i), stage);
    sum.output_bytes += stage.output_bytes;
    sum.tape_bytes += stage.tape_bytes;
    sum.gradient_bytes += stage.gradient_bytes;
    sum.taped_bytes = std::max(sum.taped_bytes, stage.taped_bytes);
    sum.backward_bytes = std::max(sum.backward_bytes, stage.backward_bytes);
    sum.forward_seconds += stage.forward_seconds;
    sum.retape_seconds += stage.retape_seconds;
    sum.backward_seconds += stage.backward_seconds;
    sum.spread = std::max(sum.spread, stage.spread);
  }
  return text + row_of("", sum);
}

void check(const ChainProfile& profile) {
  if (profile.stages.empty()) throw ConfigError("ChainProfile: a chain without a stage; give at least one");
  if (!(profile.tier_speed.bytes_per_second >= 0) || !std::isfinite(profile.tier_speed.bytes_per_second)) {
    throw ConfigError("ChainProfile: a tier of " + std::to_string(profile.tier_speed.bytes_per_second) +
                      " bytes a second; give what was measured, or 0 for none");
  }
  if (!(profile.tier_speed.work_share >= 0 && profile.tier_speed.work_share <= 1)) {
    throw ConfigError("ChainProfile: transfers that take a core for " +
                      std::to_string(profile.tier_speed.work_share) + " of their time; give 0 to 1");
  }
  for (std::size_t i = 0; i < profile.stages.size(); ++i) {
    const StageProfile& stage = profile.stages[i];
    for (const double seconds : {stage.forward_seconds, stage.retape_seconds, stage.backward_seconds}) {
      if (!(seconds >= 0) || !std::isfinite(seconds))
        refuse(profile, i, "takes less than 0 seconds, or no finite time");
    }
    if (stage.tape_has_output && stage.tape_bytes < stage.output_bytes) {
      refuse(profile, i, "has an output on its tape that is larger than the tape");
    }
    const std::uint64_t input_bytes = i > 0 ? profile.stages[i - 1].output_bytes : 0;
    if (stage.forward_bytes < stage.output_bytes || stage.retape_bytes < stage.tape_bytes ||
        stage.taped_bytes < kept_bytes(stage) ||
        stage.backward_bytes + stage.tape_bytes + stage.output_bytes < input_bytes + stage.gradient_bytes) {
      refuse(profile, i, "has a peak that is below what is left of it");
    }
  }
}

}  // namespace reef
