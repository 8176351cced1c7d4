#pragma once

#include <memory>
#include <mutex>
#include <string>
#include <vector>

#include "reef/export.h"
#include "reef/optim.h"

namespace reef::optim {

/// While it lives, a parameter is stepped as soon as backward has its gradient, and the gradient is freed: of
/// all gradients, few are there at a time. Parameters, states and errors after step() are bit for bit what
/// they are without it.
///
///     reef::optim::AdamW optimizer(model->parameters(), 1e-3);
///     reef::optim::GradientRelease release(optimizer);
///     ...
///     loss.backward();   // steps
///     optimizer.step();  // steps what backward has not, and reports
///
/// So whatever looks at all gradients before the step (clipping by their norm, reducing them over ranks)
/// finds none, and options such as lr count as they are during backward. Sums of several backward passes are
/// final after the last of `accumulate`; gradients are kept until then.
class REEF_API GradientRelease {
 public:
  /// The optimizer must stay where it is, and outlive this. Parameters that need a gradient now are released;
  /// others, and groups added later, wait for step(). Throws ConfigError if accumulate < 1, or if the
  /// optimizer's gradients are being released already.
  explicit GradientRelease(Optimizer& optimizer, int accumulate = 1);
  ~GradientRelease();
  GradientRelease(const GradientRelease&) = delete;
  GradientRelease& operator=(const GradientRelease&) = delete;

 private:
  friend class Optimizer;
  class Hook;
  struct Watched;

  void ready(Watched& watched);
  std::vector<Optimizer::Stepped> end_step();  ///< what was stepped since the last

  Optimizer& optimizer_;
  int accumulate_;
  std::mutex mutex_;
  std::vector<std::shared_ptr<Watched>> watched_;
  std::vector<Optimizer::Stepped> stepped_;
};

}  // namespace reef::optim
