#pragma once

// Work that takes exactly as long as it is told: what is measured with it does not drift with the machine.

#include <torch/torch.h>

#include <algorithm>
#include <chrono>
#include <cstdint>
#include <map>
#include <memory>
#include <mutex>
#include <optional>
#include <string>
#include <thread>
#include <utility>

#include "reef/chain.h"
#include "reef/tier.h"

namespace reef::bench {

/// Host memory behind a link of so many bytes a second, one transfer at a time.
class PacedTier final : public Tier {
 public:
  explicit PacedTier(double bytes_per_second) : bytes_per_second_(bytes_per_second) {}

  std::string name() const override { return "paced host"; }
  std::optional<Slot> take(std::uint64_t bytes) override {
    const std::optional<Slot> slot = host_->take(bytes);
    const std::lock_guard lock(mutex_);
    if (slot) bytes_[*slot] = bytes;
    return slot;
  }
  void give_back(Slot slot) noexcept override { host_->give_back(slot); }
  void write(Slot slot, const void* data) override {
    const Clock::time_point until = sent(slot);
    host_->write(slot, data);
    std::this_thread::sleep_until(until);
  }
  void read(Slot slot, void* data) override {
    const Clock::time_point until = sent(slot);
    host_->read(slot, data);
    std::this_thread::sleep_until(until);
  }
  TierUse use() const override { return host_->use(); }

 private:
  using Clock = std::chrono::steady_clock;
  // When the link is through with it.
  Clock::time_point sent(Slot slot) {
    const std::lock_guard lock(mutex_);
    const std::chrono::duration<double> taken(static_cast<double>(bytes_.at(slot)) / bytes_per_second_);
    free_at_ = std::max(free_at_, Clock::now()) + std::chrono::duration_cast<Clock::duration>(taken);
    return free_at_;
  }

  double bytes_per_second_;
  std::shared_ptr<Tier> host_ = host_tier(std::uint64_t{1} << 40);
  std::mutex mutex_;
  std::map<Slot, std::uint64_t> bytes_;
  Clock::time_point free_at_{};
};

/// A stage whose passes take at least as long as they are told: the same operators on the same bytes, then
/// the wait for a device of that speed.
class PacedStage {
 public:
  PacedStage(Chain::Stage stage, const StageProfile& profile, double slower)
      : stage_(std::move(stage)),
        forward_(slower * profile.forward_seconds),
        retape_(slower * profile.retape_seconds),
        backward_(std::make_shared<Backward>(slower * profile.backward_seconds)) {}

  at::Tensor operator()(const at::Tensor& input) const {
    const auto begun = Clock::now();
    try {
      const at::Tensor x = Edge::apply(input, backward_.get(), false);
      const at::Tensor output = Edge::apply(stage_(x), backward_.get(), true);
      wait(begun, forward_);
      return output;
    } catch (...) {  // the tape is whole
      wait(begun, retape_);
      throw;
    }
  }

 private:
  using Clock = std::chrono::steady_clock;
  using Seconds = std::chrono::duration<double>;
  static void wait(Clock::time_point begun, Seconds taken) {
    std::this_thread::sleep_until(begun + std::chrono::duration_cast<Clock::duration>(taken));
  }

  struct Backward {
    explicit Backward(double seconds) : taken(seconds) {}
    Seconds taken;
    Clock::time_point begun{};
  };

  /// The identity, at a stage's output and input: where its backward pass begins and ends.
  struct Edge : torch::autograd::Function<Edge> {
    static at::Tensor forward(torch::autograd::AutogradContext* context, const at::Tensor& x,
                              Backward* backward, bool begins) {
      context->saved_data["backward"] = reinterpret_cast<std::int64_t>(backward);
      context->saved_data["begins"] = begins;
      if (begins) context->save_for_backward({at::empty({1})});
      return x.view_as(x);
    }
    static torch::autograd::tensor_list backward(torch::autograd::AutogradContext* context,
                                                 const torch::autograd::tensor_list& gradients) {
      auto* const backward = reinterpret_cast<Backward*>(context->saved_data["backward"].toInt());
      if (context->saved_data["begins"].toBool()) {
        context->get_saved_variables();  // with it the whole tape comes, which is not this stage's time
        backward->begun = Clock::now();
      } else {
        wait(backward->begun, backward->taken);
      }
      return {gradients[0], at::Tensor(), at::Tensor()};
    }
  };

  Chain::Stage stage_;
  Seconds forward_, retape_;
  std::shared_ptr<Backward> backward_;
};

/// `chain`, each of whose stages takes `slower` times as long as `profile` says.
inline Chain paced(const Chain& chain, const ChainProfile& profile, double slower) {
  Chain all;
  for (std::size_t i = 0; i < chain.size(); ++i) {
    const auto stage = [chain, i](const at::Tensor& x) { return chain.run(i, x); };
    all.add(chain.name(i), PacedStage(stage, profile.stages[i], slower));
  }
  return all;
}

}  // namespace reef::bench
