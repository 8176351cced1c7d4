#include "tier.h"

#include <string>
#include <tuple>
#include <vector>

#include "bytes.h"
#include "reef/error.h"
#include "reef/tier_speed.h"

namespace reef::bind {
namespace {

DiskIo disk_io_of(const std::string& name) {
  if (name == "automatic") return DiskIo::kAutomatic;
  if (name == "threads") return DiskIo::kThreads;
  if (name == "uring") return DiskIo::kUring;
  throw ConfigError("io '" + name + "' is not \"automatic\", \"threads\" or \"uring\"");
}

}  // namespace

void register_tier(torch::Library& m) {
  static bool registered = false;
  if (std::exchange(registered, true)) return;
  m.class_<BoundTier>("Tier")
      .def("name", [](const c10::intrusive_ptr<BoundTier>& self) { return self->tier->name(); })
      .def("use", [](const c10::intrusive_ptr<BoundTier>& self) {
        const TierUse use = self->tier->use();
        std::vector<std::int64_t> counts;
        for (const std::uint64_t count :
             {use.capacity_bytes, use.used_bytes, use.peak_bytes, use.written_bytes, use.read_bytes}) {
          counts.push_back(static_cast<std::int64_t>(count));
        }
        return counts;
      });
  m.def("host_tier(int capacity_bytes) -> __torch__.torch.classes.reef.Tier",
        [](std::int64_t capacity_bytes) {
          return c10::make_intrusive<BoundTier>(host_tier(bytes_of(capacity_bytes, "the host tier")));
        });
  m.def("pinned_tier(int capacity_bytes) -> __torch__.torch.classes.reef.Tier",
        [](std::int64_t capacity_bytes) {
          return c10::make_intrusive<BoundTier>(pinned_tier(bytes_of(capacity_bytes, "the pinned tier")));
        });
  m.def(
      "disk_tier(str directory, int capacity_bytes, int block_bytes, int threads, bool direct, str io) -> "
      "__torch__.torch.classes.reef.Tier",
      [](const std::string& directory, std::int64_t capacity_bytes, std::int64_t block_bytes,
         std::int64_t threads, bool direct, const std::string& io) {
        return c10::make_intrusive<BoundTier>(
            disk_tier({.directory = directory,
                       .capacity_bytes = bytes_of(capacity_bytes, "the disk tier"),
                       .block_bytes = bytes_of(block_bytes, "a block"),
                       .threads = static_cast<int>(threads),
                       .direct = direct,
                       .io = disk_io_of(io)}));
      });
  m.def("tier_speed(__torch__.torch.classes.reef.Tier tier, str device) -> (float, float)",
        [](const c10::intrusive_ptr<BoundTier>& tier, const std::string& device) {
          const TierSpeed speed = tier_speed(tier->tier, c10::Device(device));
          return std::make_tuple(speed.bytes_per_second, speed.work_share);
        });
}

}  // namespace reef::bind
