#pragma once

#include <optional>
#include <string>
#include <utility>

#include "reef/shard.h"

namespace reef {

/// The gatherer's exchange, and those of the reducer's two lines: kExchanges numbers of exchanges that nobody
/// else has while this lives. Rank 0 chooses them.
class ExchangeNumbers {
 public:
  static constexpr int kExchanges = 3;

  ExchangeNumbers() = default;
  ~ExchangeNumbers();
  ExchangeNumbers(ExchangeNumbers&& other) noexcept : place_(std::exchange(other.place_, -1)) {}
  ExchangeNumbers& operator=(ExchangeNumbers&& other) noexcept {
    std::swap(place_, other.place_);
    return *this;
  }
  ExchangeNumbers(const ExchangeNumbers&) = delete;
  ExchangeNumbers& operator=(const ExchangeNumbers&) = delete;

  /// Takes numbers that are free on this rank; nothing, if all are in use.
  static std::optional<ExchangeNumbers> take();
  int place() const { return place_; }
  /// Number 0 is the one with which ranks agree.
  static int first_at(int place) { return 1 + place * kExchanges; }

 private:
  int place_ = -1;
};

/// Throws ConfigError, with the same sentence on every rank, if the ranks' models differ: the first parameter
/// or buffer, by position, whose name, dtype, shape, layout or need of a gradient is another, or the first
/// option. `wrong` is what one rank alone has found wrong, if anything: it is thrown on all. Gives the number
/// of the first exchange that is the shard's own, the same on every rank; `numbers` has it on rank 0.
int check_agreement(const Shard::Named& parameters, const Shard::Named& buffers, const ProcessGroupPtr& group,
                    const ShardOptions& options, std::string wrong, ExchangeNumbers& numbers);

}  // namespace reef
