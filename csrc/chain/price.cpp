#include "chain/price.h"

#include <algorithm>
#include <cmath>
#include <limits>
#include <utility>

#include "chain/terms.h"

namespace reef {
namespace {

using Sizes = std::vector<std::int64_t>;

/// How many times larger or smaller than a measured shape one may be that is priced from it alone.
constexpr double kNear = 1.3;
/// How many times larger one end of a straight line may be than the other.
constexpr double kNearEnds = 4;

double ratio(std::int64_t a, std::int64_t b) { return static_cast<double>(a) / static_cast<double>(b); }

double elements(const Sizes& sizes) {
  double all = 1;
  for (const std::int64_t size : sizes) all *= static_cast<double>(size);
  return all;
}

/// What bytes of the measured shape are at most multiplied by.
double growth(const Sizes& measured, const Sizes& sizes) {
  double by = 1;
  for (std::size_t i = 0; i < sizes.size(); ++i) by *= std::max(1.0, ratio(sizes[i], measured[i]));
  return by * by;
}

/// How far the bound may be from the truth: that, and what the measured shape has more of.
double distance(const Sizes& measured, const Sizes& sizes) {
  return growth(measured, sizes) * std::sqrt(growth(sizes, measured));
}

/// From one measured shape to another that is larger in one size and the same in the others, where it is
/// nowhere smaller than the shape in question.
struct Line {
  const ChainProfile *from, *to;
  double share;  ///< of the way
  bool is_near;
};

std::optional<Line> line(const MeasuredShape& from, const MeasuredShape& to, const Sizes& sizes) {
  std::optional<std::size_t> differs;
  double beside = 1;  // what it is larger by in the others
  for (std::size_t i = 0; i < sizes.size(); ++i) {
    if (from.sizes[i] == to.sizes[i]) {
      if (from.sizes[i] < sizes[i]) return std::nullopt;
      beside *= ratio(from.sizes[i], sizes[i]);
    } else {
      if (differs || sizes[i] < from.sizes[i] || sizes[i] > to.sizes[i]) return std::nullopt;
      differs = i;
    }
  }
  if (!differs) return std::nullopt;
  const std::int64_t begin = from.sizes[*differs], end = to.sizes[*differs];
  return Line{from.profile, to.profile, ratio(sizes[*differs] - begin, end - begin),
              beside <= kNear && ratio(end, begin) <= kNearEnds};
}

bool alike(const ChainProfile& a, const ChainProfile& b) {
  return std::equal(a.stages.begin(), a.stages.end(), b.stages.begin(), b.stages.end(),
                    [](const StageProfile& one, const StageProfile& other) {
                      return one.name == other.name && one.tape_has_input == other.tape_has_input &&
                             one.tape_has_output == other.tape_has_output;
                    });
}

/// Of the bytes that `get` gives of a profile.
class Bound {
 public:
  Bound(const std::vector<MeasuredShape>& measured, const std::vector<Line>& lines, const Sizes& sizes)
      : measured_(measured), lines_(lines), sizes_(sizes) {}

  template <class Get>
  std::uint64_t operator()(const Get& get) const {
    double least = std::numeric_limits<double>::infinity();
    for (const MeasuredShape& each : measured_) {
      least = std::min(least, growth(each.sizes, sizes_) * static_cast<double>(get(*each.profile)));
    }
    for (const Line& each : lines_) {
      const auto from = static_cast<double>(get(*each.from)), to = static_cast<double>(get(*each.to));
      least = std::min(least, from + (to - from) * each.share);
    }
    return static_cast<std::uint64_t>(std::ceil(least * (1 - 1e-12)));  // a whole number stays one
  }

 private:
  const std::vector<MeasuredShape>& measured_;
  const std::vector<Line>& lines_;
  const Sizes& sizes_;
};

// Each bound may come from another shape: what holds of a measured stage is made to hold.
void settle(StageProfile& stage, std::uint64_t input_bytes) {
  const auto raise = [](std::uint64_t& bytes, std::uint64_t least) { bytes = std::max(bytes, least); };
  if (stage.tape_has_output) raise(stage.tape_bytes, stage.output_bytes);
  raise(stage.forward_bytes, stage.output_bytes);
  raise(stage.retape_bytes, stage.tape_bytes);
  raise(stage.taped_bytes, kept_bytes(stage));
  const std::uint64_t left = input_bytes + stage.gradient_bytes;
  raise(stage.backward_bytes, left - std::min(left, stage.tape_bytes + stage.output_bytes));
}

}  // namespace

std::optional<ChainProfile> priced(const std::vector<MeasuredShape>& measured, const Sizes& sizes) {
  const auto is_empty = [](const Sizes& of) {
    return std::any_of(of.begin(), of.end(), [](std::int64_t size) { return size <= 0; });
  };
  std::vector<MeasuredShape> known;
  std::copy_if(measured.begin(), measured.end(), std::back_inserter(known), [&](const MeasuredShape& each) {
    return each.sizes.size() == sizes.size() && !is_empty(each.sizes);
  });
  if (known.empty() || is_empty(sizes)) return std::nullopt;
  const MeasuredShape nearest = *std::min_element(known.begin(), known.end(), [&](auto& a, auto& b) {
    return distance(a.sizes, sizes) < distance(b.sizes, sizes);
  });
  std::erase_if(known, [&](const MeasuredShape& each) { return !alike(*each.profile, *nearest.profile); });

  std::vector<Line> lines;
  bool is_near = distance(nearest.sizes, sizes) <= kNear;
  for (const MeasuredShape& from : known) {
    for (const MeasuredShape& to : known) {
      if (const auto between = line(from, to, sizes)) {
        is_near = is_near || between->is_near;
        lines.push_back(*between);
      }
    }
  }
  if (!is_near) return std::nullopt;

  const Bound bound(known, lines, sizes);
  const double longer = elements(sizes) / elements(nearest.sizes);
  ChainProfile profile = *nearest.profile;
  profile.state_bytes = bound([](const ChainProfile& of) { return of.state_bytes; });
  std::uint64_t input_bytes = 0;
  for (std::size_t i = 0; i < profile.stages.size(); ++i) {
    StageProfile& stage = profile.stages[i];
    for (std::uint64_t StageProfile::*bytes :
         {&StageProfile::output_bytes, &StageProfile::tape_bytes, &StageProfile::forward_bytes,
          &StageProfile::taped_bytes, &StageProfile::retape_bytes, &StageProfile::backward_bytes,
          &StageProfile::gradient_bytes}) {
      stage.*bytes = bound([&](const ChainProfile& of) { return of.stages[i].*bytes; });
    }
    for (double StageProfile::*seconds :
         {&StageProfile::forward_seconds, &StageProfile::retape_seconds, &StageProfile::backward_seconds}) {
      stage.*seconds *= longer;
    }
    settle(stage, input_bytes);
    input_bytes = stage.output_bytes;
  }
  return profile;
}

}  // namespace reef
