#include "shard/state_pieces.h"

#include <ATen/ops/cat.h>
#include <ATen/ops/empty_strided.h>

#include <algorithm>
#include <charconv>
#include <optional>
#include <sstream>

#include "reef/error.h"
#include "reef/shard_layout.h"
#include "shard/flat.h"

namespace reef {
namespace {

using at::Tensor;

// Of a tile of kShardAlignment elements, in each kind of state there is: scales of 256, 128 and 32 elements,
// codes of 4 bits, of 8 (or what is as wide as the parameter), of 8 and what their rounding lost. No two of
// them have the same number for any number of elements, but where that makes no difference.
constexpr std::int64_t kEntriesOfTile[] = {1, 2, 8, 128, 256, 384};

// Of the last tile, which has fewer elements.
std::int64_t entries_of_rest(std::int64_t of_tile, std::int64_t elements) {
  const std::int64_t paired = std::min(elements, kShardAlignment / 2);  // i and i + 128 share a byte
  switch (of_tile) {
    case 128:
      return paired;
    case 256:
      return elements;
    case 384:
      return elements + paired;
    default: {
      const std::int64_t block = kShardAlignment / of_tile;
      return (elements + block - 1) / block;
    }
  }
}

// Nothing if they are not by element.
std::optional<std::int64_t> entries_of_tile(std::int64_t elements, std::int64_t entries) {
  const std::int64_t tiles = elements / kShardAlignment;
  const std::int64_t rest = elements % kShardAlignment;
  for (const std::int64_t of_tile : kEntriesOfTile) {
    const std::int64_t all = tiles * of_tile + entries_of_rest(of_tile, rest);
    // int4_compensated: codes of 4 bits and what their rounding lost, of a tile as many as its elements.
    if (entries == all || (of_tile == 256 && entries == tiles * of_tile + 2 * entries_of_rest(128, rest)))
      return of_tile;
  }
  return std::nullopt;
}

Tensor cut(const StateSubject& subject, const std::string& key, const StatePiece& piece, const Tensor& value,
           std::int64_t first, std::int64_t last) {
  const Tensor flat = in_memory_order(subject, value);
  if (first == piece.first && last == piece.last) return flat;
  const auto of_tile = entries_of_tile(piece.last - piece.first, flat.numel());
  if (!of_tile) {
    throw ConfigError("state " + (key.empty() ? "" : key + " ") + "of " + subject.name + " has " +
                      std::to_string(flat.numel()) + " entries for " +
                      std::to_string(piece.last - piece.first) +
                      " elements, and cannot be divided; load it where the ranks are as many as they were");
  }
  const std::int64_t begin = (first - piece.first) / kShardAlignment * *of_tile;
  const std::int64_t end =
      last == piece.last ? flat.numel() : (last - piece.first) / kShardAlignment * *of_tile;
  return flat.slice(0, begin, end);
}

const c10::IValue& find(const StateSubject& subject, const StateValues& values, const std::string& key) {
  for (const auto& [name, value] : values) {
    if (name == key) return value;
  }
  throw ConfigError("pieces of " + subject.name + " have not all a state " + key +
                    "; give the pieces of one checkpoint");
}

// Codes of few bits and scales have one dimension, though they may be as many as elements.
bool has_shape(const std::string& key, const Tensor& value) {
  return value.dim() > 1 || ((value.is_floating_point() || value.is_complex()) && !key.ends_with("_scale"));
}

struct Joined {
  std::string key;
  c10::IValue value;
  bool shaped;  ///< where they are as many as elements
};

std::vector<Joined> joined(const StateSubject& subject, std::int64_t first, std::int64_t last,
                           const std::vector<StatePiece>& pieces) {
  struct Taken {
    const StatePiece* piece;
    std::int64_t last;
  };
  std::vector<Taken> taken;
  for (std::int64_t at = first; at < last || taken.empty();) {
    const auto found = std::find_if(pieces.begin(), pieces.end(), [&](const StatePiece& piece) {
      return piece.first <= at && (at < piece.last || at == last);
    });
    if (found == pieces.end()) {
      throw ConfigError("elements from " + std::to_string(at) + " on of " + subject.name +
                        " are in none of the pieces; give those of all ranks, or of rank 0 if it has all");
    }
    at = std::min(last, found->last);
    taken.push_back({&*found, at});
  }
  std::vector<Joined> values;
  for (const auto& [key, value] : *taken.front().piece->values) {
    if (!value.isTensor() || value.toTensor().dim() == 0) {
      // Of the one element, or of the parameter as a whole.
      values.push_back({key, value.isTensor() ? c10::IValue(value.toTensor().clone()) : value, false});
      continue;
    }
    std::vector<Tensor> flat;
    bool shaped = false;
    std::int64_t at = first;
    for (const auto& [piece, until] : taken) {
      const Tensor of_piece = find(subject, *piece->values, key).toTensor();
      shaped |= has_shape(key, of_piece);
      flat.push_back(cut(subject, key, *piece, of_piece, at, until));
      at = until;
    }
    values.push_back({key, at::cat(flat), shaped});
  }
  return values;
}

}  // namespace

Tensor in_memory_order(const StateSubject& subject, const Tensor& tensor) {
  const Tensor& like = subject.parameter;
  if (tensor.dim() == 1) return tensor.contiguous();
  if (tensor.sizes() != like.sizes()) return tensor.contiguous().view({-1});
  if (tensor.strides() == like.strides()) return tensor.as_strided({tensor.numel()}, {1});
  const Tensor same = at::empty_strided(like.sizes(), like.strides(), tensor.options()).copy_(tensor);
  return same.as_strided({tensor.numel()}, {1});
}

StateValues part_values(const StateSubject& subject, std::int64_t first, std::int64_t last,
                        const std::vector<StatePiece>& pieces) {
  StateValues values;
  for (auto& [key, value, shaped] : joined(subject, first, last, pieces))
    values.emplace_back(std::move(key), std::move(value));
  return values;
}

StateValues kept_values(const StateSubject& subject, std::int64_t first, std::int64_t last,
                        const std::vector<StatePiece>& pieces) {
  StateValues values;
  for (auto& [key, value, shaped] : joined(subject, first, last, pieces)) {
    if (shaped && value.toTensor().numel() == last - first)
      value = value.toTensor().view(part_shape(subject.parameter, last - first));
    values.emplace_back(std::move(key), std::move(value));
  }
  return values;
}

StateValues whole_values(const StateSubject& subject, const std::vector<StatePiece>& pieces) {
  const Tensor& like = subject.parameter;
  StateValues values;
  for (auto& [key, value, shaped] : joined(subject, 0, like.numel(), pieces)) {
    if (shaped && value.toTensor().numel() == like.numel()) {
      const Tensor flat = value.toTensor();
      value = at::empty_strided(like.sizes(), like.strides(), flat.options())
                  .copy_(flat.as_strided(like.sizes(), like.strides()));
    }
    values.emplace_back(std::move(key), std::move(value));
  }
  return values;
}

void check_by_element(const StateSubject& subject, const StatePiece& piece) {
  const Tensor& like = subject.parameter;
  const std::int64_t elements = piece.last - piece.first;
  for (const auto& [key, value] : *piece.values) {
    const auto refuse = [&, key = key](const std::string& what) {
      std::ostringstream text;
      text << "state " << (key.empty() ? "" : key + " ") << "of " << subject.name << " is " << what
           << ", and " << elements << " elements of a parameter of shape " << like.sizes()
           << " are kept for: it is not by element, so it cannot be divided; take an optimizer that steps "
              "each "
              "element by itself, or stage replicate";
      throw ConfigError(text.str());
    };
    if (value.isTensorList() ||
        (value.isList() && !value.toListRef().empty() && value.toListRef()[0].isTensor()))
      refuse("a list of tensors");
    if (!value.isTensor() || !value.toTensor().defined() || value.toTensor().dim() == 0) continue;
    const Tensor& tensor = value.toTensor();
    const bool same =
        tensor.numel() == elements && (tensor.dim() == 1 || tensor.sizes() == part_shape(like, elements) ||
                                       (elements == like.numel() && tensor.sizes() == like.sizes()));
    const bool codes = tensor.dim() == 1 && (tensor.scalar_type() == at::kByte || key.ends_with("_scale")) &&
                       entries_of_tile(elements, tensor.numel()).has_value();
    if (same || codes) continue;
    std::ostringstream shape;
    shape << "a tensor of shape " << tensor.sizes();
    refuse(shape.str());
  }
}

std::string piece_name(const std::string& parameter, std::int64_t first, std::int64_t last) {
  return parameter + "[" + std::to_string(first) + ":" + std::to_string(last) + "]";
}

PieceName parse_piece_name(const std::string& name) {
  const std::size_t open = name.rfind('[');
  PieceName whole{name};
  if (open == std::string::npos || name.back() != ']') return whole;
  PieceName piece{name.substr(0, open)};
  const char* const end = name.data() + name.size() - 1;
  const auto first = std::from_chars(name.data() + open + 1, end, piece.first);
  if (first.ec != std::errc() || first.ptr == end || *first.ptr != ':') return whole;
  const auto last = std::from_chars(first.ptr + 1, end, piece.last);
  return last.ec == std::errc() && last.ptr == end ? piece : whole;
}

}  // namespace reef
