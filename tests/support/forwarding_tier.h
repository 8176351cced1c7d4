#pragma once

#include <cstdint>
#include <memory>
#include <optional>
#include <string>
#include <utility>

#include "reef/tier.h"

namespace reef::test {

/// Host memory, before and after whose every transfer a test may do something.
struct ForwardingTier : Tier {
  std::string name() const override { return "forwarding"; }
  std::optional<Slot> take(std::uint64_t bytes) override { return host->take(bytes); }
  void give_back(Slot slot) noexcept override { host->give_back(slot); }
  void write(Slot slot, const void* data) override {
    before();
    host->write(slot, data);
    after();
  }
  void read(Slot slot, void* data) override {
    before();
    host->read(slot, data);
    after();
  }
  TierUse use() const override { return host->use(); }

  virtual void before() {}
  virtual void after() {}

  std::shared_ptr<Tier> host = host_tier(std::uint64_t{1} << 40);
};

}  // namespace reef::test
