#pragma once

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <map>

#include "reef/collectives.h"
#include "reef/export.h"

namespace torch::optim {
class Optimizer;
}  // namespace torch::optim
namespace torch::serialize {
class InputArchive;
class OutputArchive;
}  // namespace torch::serialize

namespace reef {

/// As torch.amp.GradScaler, whose defaults these are.
struct GradScalerOptions {
  double init_scale = 65536;
  double growth_factor = 2;
  double backoff_factor = 0.5;
  std::int64_t growth_interval = 2000;  ///< steps without an overflow, after which the scale grows
};

/// Scales losses so that gradients of 16 bits do not vanish, and leaves a step out where they overflow: on
/// all ranks of a group at once, of which each sees only its part (Micikevicius et al. 2018).
///
///     reef::GradScaler scaler({}, group);
///     scaler.scale(loss).backward();
///     scaler.unscale_(optimizer);  // only to see gradients as they are: to clip them
///     scaler.step(optimizer);
///     scaler.update();
///
/// A step that is left out changes nothing: no parameter, no state, no count of steps. Its gradients stay, to
/// be looked at or cleared. Powers of two change no bit of a gradient that neither overflows nor vanishes.
class REEF_API GradScaler {
 public:
  /// Without a group, of one process. Throws ConfigError for a scale or factor that is not positive, a growth
  /// that shrinks and a backoff that does not.
  explicit GradScaler(const GradScalerOptions& options = {}, ProcessGroupPtr group = {});

  at::Tensor scale(const at::Tensor& loss) const;
  /// Divides the gradients of the optimizer's parameters by the scale. Once between two update(). All ranks
  /// alike; sends 8 bytes a rank. Throws ConfigError for gradients that are sparse or of float16 (keep master
  /// weights), and RankFailed.
  void unscale_(torch::optim::Optimizer& optimizer);
  /// Steps the optimizer, after unscale_() if that has not been called, unless a gradient was not finite on
  /// any rank. Says whether it has. Once between two update().
  bool step(torch::optim::Optimizer& optimizer);
  /// After the steps of all optimizers: the scale for the next ones. Throws ConfigError if there were none.
  void update();

  double get_scale() const { return scale_; }
  void save(torch::serialize::OutputArchive& archive) const;
  void load(torch::serialize::InputArchive& archive);

 private:
  struct Seen {
    bool finite = true;
    bool stepped = false;
  };
  Seen& seen(torch::optim::Optimizer& optimizer);

  GradScalerOptions options_;
  ProcessGroupPtr group_;
  double scale_;
  std::int64_t growing_ = 0;  ///< steps since the last overflow or growth
  std::map<const torch::optim::Optimizer*, Seen> seen_;
};

}  // namespace reef
