#include "shard/sums_when_asked.h"

#include "reef/error.h"
#include "shard/shard_parts.h"

namespace reef {

SumsWhenAsked::SumsWhenAsked(Shard& shard, bool in_one_order) : shard_(shard) {
  shard.parts_->reducer->reduce_when_asked();
  if (!in_one_order && shard.parts_->gatherer) shard.parts_->gatherer->ask_at_once();
}

void SumsWhenAsked::use_parameters() { shard_.parts_->use_parameters(); }

void SumsWhenAsked::check() const {
  const Shard::Parts& parts = *shard_.parts_;
  parts.check_parameters();
  for (const auto& [name, parameter] : parts.divided.parameters) {
    const at::Tensor& gradient = parameter.grad();
    if (!gradient.defined() || gradient.layout() == c10::kStrided) continue;
    throw ConfigError("parameter " + name +
                      " has a sparse gradient, which is not reduced; make its layer dense (sparse=False).");
  }
}

void SumsWhenAsked::reduce() { shard_.parts_->reducer->reduce_own(); }
void SumsWhenAsked::abandon(const std::string& why) noexcept { shard_.parts_->reducer->abandon_own(why); }
void SumsWhenAsked::leave_out() { shard_.parts_->reducer->leave_own_out(); }
void SumsWhenAsked::settle() {
  if (shard_.parts_->gatherer) shard_.parts_->gatherer->settle();
}
bool SumsWhenAsked::answer() {
  const Shard::Parts& parts = *shard_.parts_;
  return parts.options.stage == Stage::kParameters && parts.gatherer->answer();
}
void SumsWhenAsked::tell_failed() { shard_.parts_->reducer->tell_failed(); }
bool SumsWhenAsked::has_parts() const { return reef::has_parts(shard_.parts_->options); }

}  // namespace reef
