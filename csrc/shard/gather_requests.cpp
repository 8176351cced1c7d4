#include "shard/gather_requests.h"

#include <sstream>
#include <torch/csrc/distributed/c10d/ProcessGroup.hpp>
#include <torch/csrc/distributed/c10d/Store.hpp>
#include <utility>

namespace reef {

GatherRequests::GatherRequests(const ProcessGroupPtr& group, const std::string& name, int ranks)
    : store_(group->getSize() > 1 ? group->getStore() : nullptr),
      ranks_(ranks),
      prefix_("reef/gathers/" + name + '/') {}

GatherRequests::~GatherRequests() = default;

std::string GatherRequests::key(const std::string& what) const {
  return prefix_ + std::to_string(step_) + '/' + std::to_string(part_) + '/' + what;
}

void GatherRequests::begin_step(std::int64_t step) {
  if (step == step_) return;
  forget_before_last();
  step_ = step;
}

void GatherRequests::begin_part() {
  forget_before_last();
  ++part_;
}

void GatherRequests::forget_before_last() {
  for (const std::string& old : made_before_) store_->deleteKey(old);
  made_before_ = std::exchange(made_, {});
  taken_ = 0;
}

void GatherRequests::make(const Request& request) {
  if (!std::exchange(has_made_, true)) store_->set(prefix_ + "asked", "");
  const std::int64_t number = store_->add(key("made"), 1);
  const std::string own = key(std::to_string(number));
  store_->set(own, std::to_string(request.bucket) + ' ' + std::to_string(request.count));
  made_.push_back(own);
  if (number == 1) made_.push_back(key("made"));
}

std::vector<GatherRequests::Request> GatherRequests::take() {
  std::vector<Request> requests;
  if (!store_->check({key("made")})) return requests;
  for (const std::int64_t made = store_->add(key("made"), 0); taken_ < made; ++taken_) {
    std::istringstream text(store_->get_to_str(key(std::to_string(taken_ + 1))));
    Request& request = requests.emplace_back();
    text >> request.bucket >> request.count;
  }
  return requests;
}

void GatherRequests::tell_failed() {
  store_->set(key("failed"), "");
  made_.push_back(key("failed"));
}

bool GatherRequests::has_failed() const { return store_->check({key("failed")}); }

bool GatherRequests::were_made() const { return has_made_ || store_->check({prefix_ + "asked"}); }
void GatherRequests::make_no_more() { store_->add(prefix_ + "ended", 1); }
bool GatherRequests::all_make_no_more() const { return store_->add(prefix_ + "ended", 0) == ranks_; }

}  // namespace reef
