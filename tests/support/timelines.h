#pragma once

#include <random>
#include <string>
#include <vector>

#include "reef/timeline.h"

namespace reef::test {

/// A legal timeline and what was alive, found by adding up blocks rather than events.
struct Story {
  Timeline timeline;
  std::vector<std::vector<CategoryBytes>> alive;  ///< [device][events so far]
};

inline Story random_story(std::uint64_t seed, std::size_t devices, std::size_t events) {
  struct Block {
    std::size_t device;
    Category category;
    std::int64_t bytes;
  };
  std::mt19937_64 random(seed);
  const auto below = [&](std::uint64_t limit) { return random() % limit; };
  const auto any_category = [&] { return static_cast<Category>(below(kCategories)); };
  const auto any_block = [&] {
    const std::int64_t bytes = std::int64_t{1} << below(30);
    return Block{below(devices), any_category(), bytes + static_cast<std::int64_t>(below(1000))};
  };

  Story story;
  story.timeline.operators = {"aten::mm", "aten::mm (backward)", "aten::add_"};
  for (std::size_t i = 0; i < devices; ++i) story.timeline.devices.push_back("device:" + std::to_string(i));
  std::vector<Block> blocks;
  for (std::uint64_t i = below(5); i > 0; --i) blocks.push_back(any_block());
  story.alive.resize(devices);
  const auto count_blocks = [&] {
    for (auto& alive : story.alive) alive.emplace_back();
    for (const Block& block : blocks) story.alive[block.device].back()[block.category] += block.bytes;
  };
  count_blocks();
  for (const auto& alive : story.alive) story.timeline.start.push_back(alive.front());

  std::int64_t now = 0;
  for (std::size_t i = 0; i < events; ++i) {
    now += below(3) == 0 ? 0 : static_cast<std::int64_t>(below(100'000));  // changes may share an instant
    TimelineEvent event;
    event.nanoseconds = now;
    event.op = static_cast<std::int32_t>(below(4)) - 1;
    const std::uint64_t kind = blocks.empty() ? 0 : below(5);
    if (kind <= 1) {
      blocks.push_back(any_block());
      const Block& block = blocks.back();
      event.kind = TimelineEvent::Kind::kAllocate;
      event.device = static_cast<std::uint8_t>(block.device);
      event.category = block.category;
      event.bytes = block.bytes;
    } else {
      const std::size_t which = below(blocks.size());
      Block& block = blocks[which];
      event.device = static_cast<std::uint8_t>(block.device);
      event.category = block.category;
      if (kind == 2) {
        event.kind = TimelineEvent::Kind::kMove;
        event.from = block.category;
        event.category = block.category = any_category();
        event.bytes = block.bytes;
      } else {
        event.kind = TimelineEvent::Kind::kFree;
        event.bytes = -block.bytes;
        blocks.erase(blocks.begin() + static_cast<std::ptrdiff_t>(which));
      }
    }
    story.timeline.events.push_back(event);
    count_blocks();
  }
  story.timeline.duration_nanoseconds = now + static_cast<std::int64_t>(below(100'000));
  return story;
}

}  // namespace reef::test
