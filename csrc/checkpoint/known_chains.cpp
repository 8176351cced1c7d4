#include "checkpoint/known_chains.h"

#include <algorithm>
#include <utility>

namespace reef {
namespace {

// One of those for which `is` holds, if there are that many.
template <class Map, class Is>
void drop_oldest(Map& map, std::size_t most, const Is& is) {
  auto oldest = map.end();
  std::size_t count = 0;
  for (auto entry = map.begin(); entry != map.end(); ++entry) {
    if (!is(entry->second)) continue;
    ++count;
    if (oldest == map.end() || entry->second.used < oldest->second.used) oldest = entry;
  }
  if (count >= most) map.erase(oldest);
}

}  // namespace

KnownChains::Kind& KnownChains::kind(const std::string& name) {
  if (!kinds_.contains(name)) drop_oldest(kinds_, kMost, [](const Kind&) { return true; });
  Kind& found = kinds_[name];
  found.used = ++calls_;
  return found;
}

KnownChains::Kind* KnownChains::known(const std::string& name) {
  const auto found = kinds_.find(name);
  return found == kinds_.end() ? nullptr : &found->second;
}

KnownChains::Shape* KnownChains::find(Kind& kind, const Sizes& sizes) {
  const auto found = kind.shapes.find(sizes);
  if (found == kind.shapes.end() || found->second.state == State::kStale) return nullptr;
  found->second.used = ++calls_;
  return &found->second;
}

KnownChains::Shape* KnownChains::price(Kind& kind, const Sizes& sizes) {
  if (!kind.prices || kind.shapes.contains(sizes)) return nullptr;
  std::vector<MeasuredShape> measured;
  const std::vector<std::size_t>* parts = nullptr;
  for (const auto& [of, shape] : kind.shapes) {
    if (shape.state == State::kPriced || shape.state == State::kStale) continue;
    // Where stages were joined otherwise, something else depends on the sizes, too.
    if (parts != nullptr && *parts != shape.parts) return nullptr;
    parts = &shape.parts;
    measured.push_back({of, &shape.profile});
  }
  auto profile = priced(measured, sizes);
  if (!profile) return nullptr;
  return &insert(kind, sizes, {State::kPriced, *parts, std::move(*profile), {}, 0});
}

KnownChains::Shape& KnownChains::keep(Kind& kind, const Sizes& sizes, std::vector<std::size_t> parts,
                                      ChainProfile profile) {
  const auto before = kind.shapes.find(sizes);
  const bool again = before != kind.shapes.end() && before->second.state == State::kStale;
  return insert(kind, sizes,
                {again ? State::kRenewed : State::kMeasured, std::move(parts), std::move(profile), {}, 0});
}

KnownChains::Shape& KnownChains::insert(Kind& kind, const Sizes& sizes, Shape shape) {
  const bool is_priced = shape.state == State::kPriced;
  drop_oldest(kind.shapes, kMost,
              [&](const Shape& other) { return (other.state == State::kPriced) == is_priced; });
  shape.used = ++calls_;
  return kind.shapes.insert_or_assign(sizes, std::move(shape)).first->second;
}

bool KnownChains::failed(Kind& kind, const Sizes& sizes) {
  const auto found = kind.shapes.find(sizes);
  if (found == kind.shapes.end()) return false;
  switch (found->second.state) {
    case State::kPriced:
      kind.prices = false;
      std::erase_if(kind.shapes, [](const auto& entry) { return entry.second.state == State::kPriced; });
      return true;
    case State::kMeasured:
      found->second.state = State::kStale;
      return true;
    case State::kRenewed:
      found->second.state = State::kFlawed;
      return true;
    case State::kStale:
    case State::kFlawed:
      return false;
  }
  return false;
}

}  // namespace reef
