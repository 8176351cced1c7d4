#pragma once

#include <cstddef>
#include <cstdint>
#include <map>
#include <memory>
#include <string>
#include <vector>

#include "chain/price.h"
#include "reef/chain.h"

namespace reef {

/// What has been found of chains, by what they are and by the sizes of their input; what was used longest ago
/// goes when there is too much.
class KnownChains {
 public:
  using Sizes = std::vector<std::int64_t>;

  /// kStale: a run has needed more than it was given; it is to be measured once more. kFlawed: so
  /// it did after that; it is kept as it is.
  enum class State : std::uint8_t { kPriced, kMeasured, kStale, kRenewed, kFlawed };
  struct Shape {
    State state = State::kMeasured;
    std::vector<std::size_t> parts;  ///< of stages that were joined; of the stages themselves nothing is kept
    ChainProfile profile;
    std::map<std::int64_t, std::shared_ptr<const ChainPlan>> plans;  ///< by budget
    std::uint64_t used = 0;                                          ///< when, in calls
  };
  /// Chains that differ in sizes only.
  struct Kind {
    std::map<Sizes, Shape> shapes;
    bool prices = true;  ///< what was priced has held so far
    std::uint64_t used = 0;
  };

  /// The one of that name, which is new if it is not known.
  Kind& kind(const std::string& name);
  /// That, or nullptr.
  Kind* known(const std::string& name);

  /// nullptr if it is not known, or stale.
  Shape* find(Kind& kind, const Sizes& sizes);
  /// From those that were measured; nullptr if that cannot be done.
  Shape* price(Kind& kind, const Sizes& sizes);
  Shape& keep(Kind& kind, const Sizes& sizes, std::vector<std::size_t> parts, ChainProfile profile);

  /// A run has needed more than it was given. True if that is news.
  static bool failed(Kind& kind, const Sizes& sizes);

 private:
  static constexpr std::size_t kMost = 64;  // kinds; shapes of each that were measured; and that were priced
  Shape& insert(Kind& kind, const Sizes& sizes, Shape shape);

  std::map<std::string, Kind> kinds_;
  std::uint64_t calls_ = 0;
};

}  // namespace reef
