#include "shard/remembered_pieces.h"

#include <ATen/ops/equal.h>
#include <ATen/ops/zeros.h>

#include <algorithm>
#include <functional>

#include "reef/error.h"

namespace reef {
namespace {

using at::Tensor;

// Those that have elements of the range, in the order of ranks.
void keep_within(std::vector<RememberedPiece>& pieces, RememberedRange range) {
  std::erase_if(pieces, [&](const RememberedPiece& piece) {
    return piece.last <= range.first || piece.first >= range.last;
  });
  std::stable_sort(pieces.begin(), pieces.end(),
                   [](const RememberedPiece& a, const RememberedPiece& b) { return a.rank < b.rank; });
}

// Of elements that the same of these pieces have.
using Visit =
    std::function<void(RememberedRange part, const std::vector<const RememberedPiece*>& that_have_it)>;
void for_each_part(const std::vector<RememberedPiece>& pieces, RememberedRange range, const Visit& visit) {
  std::vector<std::int64_t> ends = {range.last};
  for (const RememberedPiece& piece : pieces) {
    for (const std::int64_t end : {piece.first, piece.last}) {
      if (end > range.first && end < range.last) ends.push_back(end);
    }
  }
  std::sort(ends.begin(), ends.end());
  ends.erase(std::unique(ends.begin(), ends.end()), ends.end());
  std::int64_t first = range.first;
  for (const std::int64_t last : ends) {
    std::vector<const RememberedPiece*> that_have_it;
    for (const RememberedPiece& piece : pieces) {
      if (piece.first <= first && piece.last >= last) that_have_it.push_back(&piece);
    }
    visit({first, last}, that_have_it);
    first = last;
  }
}

Tensor values_of(const RememberedPiece& piece, RememberedRange part) {
  return piece.values.narrow(0, part.first - piece.first, part.last - part.first);
}

}  // namespace

Tensor share_of(const std::string& name, std::vector<RememberedPiece> pieces, RememberedRange range,
                int holder, int holders) {
  keep_within(pieces, range);
  if (pieces.empty()) return {};
  Tensor share = at::zeros({range.last - range.first}, pieces.front().values.options());
  for_each_part(pieces, range, [&](RememberedRange part, const auto& that_have_it) {
    const Tensor to = share.narrow(0, part.first - range.first, part.last - part.first);
    for (std::size_t number = 0; number < that_have_it.size(); ++number) {
      const RememberedPiece& piece = *that_have_it[number];
      if (number > 0 && that_have_it[number - 1]->rank == piece.rank) {
        throw ConfigError(name + ": elements from " + std::to_string(part.first) +
                          " on are given twice for rank " + std::to_string(piece.rank) +
                          "; give the state of each rank once");
      }
      const auto place = static_cast<int>(number);
      if (place == holder) to.copy_(values_of(piece, part));
      if (place > holder && place % holders == holder) to.add_(values_of(piece, part));
    }
  });
  return share;
}

Tensor alike_of(const std::string& name, std::vector<RememberedPiece> pieces, RememberedRange range) {
  keep_within(pieces, range);
  if (pieces.empty()) return {};
  Tensor alike = at::zeros({range.last - range.first}, pieces.front().values.options());
  for_each_part(pieces, range, [&](RememberedRange part, const auto& that_have_it) {
    if (that_have_it.empty()) {
      throw ConfigError(name + ": elements from " + std::to_string(part.first) +
                        " on are in none of the states; give those of all ranks");
    }
    alike.narrow(0, part.first - range.first, part.last - part.first)
        .copy_(values_of(*that_have_it.front(), part));
  });
  return alike;
}

Tensor exactly(const std::string& name, const Tensor& values, at::ScalarType dtype) {
  if (values.scalar_type() == dtype) return values;
  Tensor converted = values.is_complex() && !at::isComplexType(dtype) ? Tensor() : values.to(dtype);
  if (!converted.defined() || !at::equal(converted.to(values.scalar_type()), values)) {
    throw ConfigError(name + " is of " + c10::toString(values.scalar_type()) + " in the state and of " +
                      c10::toString(dtype) +
                      " here, which would round it, and what is held back would be lost: give the module and "
                      "MixedPrecision the dtypes that they had");
  }
  return converted;
}

}  // namespace reef
