#include "reef/measure_link.h"

#include <ATen/ops/empty.h>
#include <ATen/ops/empty_like.h>
#include <ATen/ops/minimum.h>
#include <ATen/ops/zeros.h>

#include <chrono>
#include <torch/csrc/distributed/c10d/ProcessGroup.hpp>
#include <vector>

#include "distributed/comm_lane.h"
#include "distributed/group_tags.h"
#include "distributed/members.h"
#include "distributed/slice_exchange.h"
#include "reef/error.h"

namespace reef {
namespace {

using at::Tensor;

constexpr const char* kMeasurement = "the measurement of the link";
constexpr int kSizes = 10;
constexpr std::int64_t kLeastBytes = 1024;
constexpr int kMessages = 4;  // after each other, and together
constexpr int kRepeats = 3;
constexpr int kTries = 5;  // on a machine whose noise hides the bandwidth

// Passes messages on around all ranks.
class Circle {
 public:
  explicit Circle(SliceExchange& ranks)
      : ranks_(ranks),
        next_(ranks.all().number_behind(1)),
        before_(ranks.all().number_behind(ranks.all().count - 1)),
        sent_(at::zeros({kLeastBytes << (kSizes - 1)}, at::kByte)) {
    for (int i = 0; i < kMessages; ++i) received_.push_back(at::empty_like(sent_));
  }

  double seconds(int rounds, int messages, std::int64_t bytes) {
    ranks_.tell(at::zeros({ranks_.all().count}, at::kByte));  // all are here
    const auto begin = std::chrono::steady_clock::now();
    for (int round = 0; round < rounds; ++round) {
      const int tag = ranks_.next_tag();
      ranks_.run(kMeasurement, sent_, [&](SliceExchange::Works& works) {
        for (int i = 0; i < messages; ++i)
          works.push_back(
              ranks_.receive(received_[static_cast<std::size_t>(i)].narrow(0, 0, bytes), before_, tag));
        for (int i = 0; i < messages; ++i)
          works.push_back(ranks_.send(sent_.narrow(0, 0, bytes), next_, tag));
      });
    }
    return std::chrono::duration<double>(std::chrono::steady_clock::now() - begin).count();
  }

 private:
  SliceExchange& ranks_;
  int next_, before_;
  Tensor sent_;
  std::vector<Tensor> received_;
};

}  // namespace

LinkFit measure_link(const ProcessGroupPtr& group) {
  if (!group)
    throw ConfigError(
        "reef::measure_link was given no process group: make one with reef::init_process_group.");
  if (group->getSize() == 1)
    throw ConfigError("reef::measure_link was given a group of one rank, which has no link: start more.");
  if (!by_messages(*group, at::kCPU)) {
    throw ConfigError(
        "reef::measure_link was given a group without gloo for the CPU, whose messages it measures: make one "
        "with reef::init_process_group.");
  }
  note_call(*group, "reef::measure_link");
  const GroupTags tags = GroupTags::take(group, 1, at::kCPU);
  SliceExchange ranks(group, tags.first(), group->getSize());
  Circle circle(ranks);
  circle.seconds(kMessages, 1, kLeastBytes);  // connections, and memory that is touched for the first time
  circle.seconds(1, kMessages, kLeastBytes << (kSizes - 1));

  std::vector<LinkSample> samples;
  for (const int rounds : {kMessages, 1}) {
    for (int size = 0; size < kSizes; ++size) {
      samples.push_back({static_cast<double>(rounds), kMessages,
                         static_cast<double>(kMessages * (kLeastBytes << size)), 0});
    }
  }
  const Tensor seconds = at::empty({kRepeats, static_cast<std::int64_t>(samples.size())}, at::kDouble);
  const auto measure = [&] {
    double* each = seconds.mutable_data_ptr<double>();
    for (int repeat = 0; repeat < kRepeats; ++repeat) {
      for (const LinkSample& sample : samples) {
        const int rounds = static_cast<int>(sample.rounds);
        *each++ =
            circle.seconds(rounds, kMessages / rounds, static_cast<std::int64_t>(sample.bytes) / kMessages);
      }
    }
    ranks.largest(seconds.view({-1}));
    return seconds.amin(0);
  };
  Tensor fastest = measure();
  for (int measured = 1;; ++measured) {
    for (std::size_t i = 0; i < samples.size(); ++i) samples[i].seconds = fastest.const_data_ptr<double>()[i];
    try {
      return fit_link(samples);
    } catch (const ConfigError&) {  // alike on all ranks, which have the same samples
      if (measured == kTries) return bound_link(samples);
    }
    fastest = at::minimum(fastest, measure());
  }
}

}  // namespace reef
