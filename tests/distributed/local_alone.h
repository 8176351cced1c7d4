#pragma once

#include <memory>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "reef/local_updates.h"
#include "shard/outer_schedule.h"
#include "shard_net.h"

// What the tests of LocalUpdates train, and what one process gets that takes all ranks' steps and outer
// steps.
namespace reef::shard_tests {

struct Row {
  std::int64_t steps, parts, overlap;
  double mixing, lr, momentum;
  bool nesterov;
  int finished = -1;  ///< after so many steps

  bool is_mean() const { return lr == 1 && momentum == 0; }
  LocalUpdatesOptions options() const {
    return {.local_steps = steps,
            .outer_lr = lr,
            .outer_momentum = momentum,
            .nesterov = nesterov,
            .parts = parts,
            .overlap_steps = overlap,
            .mixing = mixing};
  }
  std::string text() const {
    return std::to_string(steps) + " steps in " + std::to_string(parts) + " parts, " +
           std::to_string(overlap) + " later, mixing " + std::to_string(mixing) + ", rate " +
           std::to_string(lr) + ", momentum " + std::to_string(momentum) + (nesterov ? " nesterov" : "") +
           ", finished " + std::to_string(finished);
  }
};

/// Whose losses stay finite, whatever an outer step does.
inline const std::vector<Case> kInner = {
    {"momentum",
     [](std::vector<Tensor> all) {
       return std::make_shared<torch::optim::SGD>(all, torch::optim::SGDOptions(0.01).momentum(0.9));
     }},
    {"torch AdamW", [](std::vector<Tensor> all) {
       return std::make_shared<torch::optim::AdamW>(all, torch::optim::AdamWOptions(1e-3));
     }}};

inline std::vector<Tensor> trained(const Net& net) {
  std::vector<Tensor> all;
  for (const Tensor& parameter : parameters_of(net)) {
    if (parameter.requires_grad()) all.push_back(parameter);
  }
  return all;
}

/// All copies' nets in one process, which take their steps one after another, and torch's own SGD as the
/// outer optimizer. `ranks_of_copy`: whose gradients a copy adds up.
class Alone {
 public:
  Alone(const Row& row, const Case& tested, int copies, int ranks_of_copy, Ranks ranks = Ranks::kDiffer)
      : row_(row), ranks_of_copy_(ranks_of_copy), ranks_(ranks) {
    for (int copy = 0; copy < copies; ++copy) {
      nets.emplace_back(7);
      optimizers_.push_back(tested.make(parameters_of(nets.back())));
    }
    std::vector<std::int64_t> elements;
    for (const Tensor& parameter : trained(nets.front())) {
      elements.push_back(parameter.numel());
      start_.push_back(parameter.detach().clone());
    }
    ends_ = cut_into_parts(elements, static_cast<std::size_t>(row.parts));
    sent_.resize(ends_.size());
    momentum_.resize(start_.size());
  }

  void step(int number) {
    for (std::size_t copy = 0; copy < nets.size(); ++copy) {
      optimizers_[copy]->zero_grad();
      for (int of = 0; of < ranks_of_copy_; ++of) {
        const int rank_of = static_cast<int>(copy) * ranks_of_copy_ + of;
        nets[copy]->forward(batch(ranks_, rank_of, number)).backward();
      }
      for (const Tensor& parameter : trained(nets[copy])) {
        if (ranks_of_copy_ > 1 && parameter.grad().defined()) parameter.grad().div_(ranks_of_copy_);
      }
      optimizers_[copy]->step();
    }
    ++step_;
    for (std::size_t part = 0; part < ends_.size(); ++part) {
      const std::int64_t since = step_ - offset(part) - row_.overlap;
      if (row_.overlap > 0 && since >= 0 && since % row_.steps == 0) apply(part, row_.mixing);
    }
    for (std::size_t part = 0; part < ends_.size(); ++part) {
      const std::int64_t since = step_ - offset(part);
      if (since < 0 || since % row_.steps != 0) continue;
      send(part);
      if (row_.overlap == 0) apply(part, row_.mixing);
    }
  }

  void finish() {
    for (std::size_t part = 0; part < ends_.size(); ++part) {
      if (sent_[part]) apply(part, row_.mixing);
      if (differs(part)) {
        send(part);
        apply(part, 0);
      }
    }
    step_ = 0;
  }

  std::vector<Net> nets;

 private:
  std::int64_t offset(std::size_t part) const {
    return row_.steps * static_cast<std::int64_t>(part + 1) / row_.parts;
  }
  std::size_t first(std::size_t part) const { return part == 0 ? 0 : ends_[part - 1]; }
  // Some copy has made something of its own.
  bool differs(std::size_t part) const {
    return step_ > 0 && (step_at_.size() <= part || step_at_[part] != step_ || row_.mixing != 0);
  }
  void send(std::size_t part) {
    const torch::NoGradGuard no_grad;
    std::vector<Tensor> means;
    for (std::size_t i = first(part); i < ends_[part]; ++i) {
      Tensor sum;
      for (const Net& net : nets) {
        const Tensor own = trained(net)[i].detach();
        const Tensor value = row_.is_mean() ? own : start_[i].detach() - own;
        sum = sum.defined() ? sum + value : value.clone();
      }
      means.push_back(sum / static_cast<std::int64_t>(nets.size()));
    }
    sent_[part] = means;
  }
  void apply(std::size_t part, double mixing) {
    const torch::NoGradGuard no_grad;
    for (std::size_t i = first(part); i < ends_[part]; ++i) {
      const Tensor& came = (*sent_[part])[i - first(part)];
      if (row_.is_mean()) {
        start_[i] = came;
        continue;
      }
      Tensor of_step = came;
      if (row_.momentum > 0) {
        momentum_[i] = momentum_[i].defined() ? row_.momentum * momentum_[i] + came : came;
        of_step = row_.nesterov ? row_.momentum * momentum_[i] + came : momentum_[i];
      }
      start_[i] = start_[i] - row_.lr * of_step;
    }
    for (const Net& net : nets) {
      for (std::size_t i = first(part); i < ends_[part]; ++i) {
        Tensor own = trained(net)[i];
        own.copy_(mixing == 0 ? start_[i] : own * mixing + start_[i] * (1 - mixing));
      }
    }
    sent_[part].reset();
    step_at_.resize(ends_.size(), -1);
    step_at_[part] = step_;
  }

  const Row row_;
  const int ranks_of_copy_;
  const Ranks ranks_;
  std::vector<Optimizer> optimizers_;
  std::vector<Tensor> start_, momentum_;
  std::vector<std::size_t> ends_;
  std::vector<std::optional<std::vector<Tensor>>> sent_;
  std::vector<std::int64_t> step_at_;
  std::int64_t step_ = 0;
};

/// A step of this rank's batch, and what comes after it.
inline void step(Net net, torch::optim::Optimizer& optimizer, LocalUpdates& updates, int number,
                 Ranks ranks = Ranks::kDiffer) {
  optimizer.zero_grad();
  net->forward(batch(ranks, rank(), number)).backward();
  optimizer.step();
  updates.step();
}

}  // namespace reef::shard_tests
