// A simulation is what it says of itself: each action begins when the last thing that it waits for is there,
// each message occupies its link alone, and memory is the sum of what is held. And the table of
// docs/pipeline.md.
#include "reef/pipeline_simulation.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <map>
#include <random>
#include <set>
#include <string>
#include <tuple>
#include <utility>
#include <vector>

#include "reef/pipeline_generator.h"
#include "reef/pipeline_versions.h"
#include "support/config_error.h"
#include "support/pipelines.h"
#include "support/xml.h"

namespace reef {
namespace {

using test::config_error;
using test::pipeline_costs;
using Kind = PipelineAction::Kind;

bool is_gradient(Kind kind) { return kind == Kind::kBackward || kind == Kind::kInput; }

/// Costs, speeds and links that are all different; seconds are multiples of 1/64, so sums are exact.
PipelineCosts random_costs(std::mt19937_64& random, const PipelineSchedule& schedule) {
  const auto draw = [&](int least, int most) {
    return std::uniform_int_distribution<int>(least, most)(random);
  };
  PipelineCosts costs;
  for (std::uint32_t chunk = 0; chunk < schedule.chunks(); ++chunk) {
    PipelineChunkCost cost;
    cost.forward_seconds = draw(1, 64) / 64.0;
    cost.input_seconds = draw(1, 64) / 64.0;
    cost.weight_seconds = draw(1, 64) / 64.0;
    cost.output_bytes = static_cast<std::uint64_t>(draw(0, 64));
    cost.kept_bytes = static_cast<std::uint64_t>(draw(0, 1000));
    cost.kept_after_input_bytes = cost.kept_bytes * static_cast<std::uint64_t>(draw(0, 4)) / 2;
    cost.working_bytes = static_cast<std::uint64_t>(draw(0, 500));
    cost.fixed_bytes = static_cast<std::uint64_t>(draw(0, 5000));
    cost.gradient_bytes = static_cast<std::uint64_t>(draw(0, 3)) * 60 * 64;  // its parts are whole numbers
    costs.chunks.push_back(cost);
  }
  for (std::uint32_t rank = 0; rank < schedule.ranks(); ++rank) costs.speeds.push_back(1 << draw(0, 2));
  for (std::uint32_t pair = 0; pair < schedule.ranks() * schedule.ranks(); ++pair)
    costs.links.push_back({draw(0, 64) / 64.0, 64.0 * (1 << draw(0, 3)), draw(0, 16) / 64.0});
  for (int skip = draw(0, 3); skip > 0 && schedule.chunks() > 1; --skip) {
    const int last = static_cast<int>(schedule.chunks()) - 1;
    PipelineSkip& of = costs.skips.emplace_back();
    of.from = static_cast<std::uint32_t>(draw(0, last - 1));
    of.bytes = static_cast<std::uint64_t>(draw(1, 32));
    for (std::uint32_t to = of.from + 1; to < schedule.chunks(); ++to) {
      if (draw(0, 2) == 0) of.to.push_back(to);
    }
    if (of.to.empty()) of.to.push_back(static_cast<std::uint32_t>(last));
  }
  return costs;
}

/// When something is held by a rank, until before `end`.
struct Held {
  double begin, end;
  std::uint64_t bytes;
};

/// Works a simulation out once more from the times that it gives: what is where, and when.
class Oracle {
 public:
  Oracle(const PipelineCosts& costs, const PipelineSchedule& schedule, const PipelineCost& cost)
      : costs_(costs), schedule_(schedule), versions_(pipeline_versions(schedule)), held_(schedule.ranks()) {
    for (std::uint32_t rank = 0; rank < schedule.ranks(); ++rank) {
      for (std::size_t i = 0; i < schedule.actions[rank].size(); ++i) {
        const auto& [kind, chunk, micro_batch] = schedule.actions[rank][i];
        span_[{kind, chunk, micro_batch}] = {cost.begin_seconds[rank][i], cost.end_seconds[rank][i]};
      }
    }
    send_all();
    keep_all();
  }

  /// Gives when the action could begin at the earliest: after the one before it, and what it needs.
  double earliest(std::uint32_t rank, std::size_t index) const {
    const auto& [kind, chunk, micro_batch] = schedule_.actions[rank][index];
    double seconds = 0;
    if (index > 0) {
      const auto& [before, of, m] = schedule_.actions[rank][index - 1];
      seconds = span_.at({before, of, m}).second;
    }
    for (const auto& [made, arrival] : arrival_) {
      const auto& [gradient, from, to, m] = made;
      const bool is_needed = gradient ? is_gradient(kind) : kind == Kind::kForward;
      if (is_needed && to == chunk && m == micro_batch) seconds = std::max(seconds, arrival);
    }
    return seconds;
  }

  std::uint64_t message_bytes() const { return message_bytes_; }

  /// Gives when the last rank has sent and received what ranks of the same chunks add up, one message after
  /// another.
  double makespan() const {
    double end = 0;
    for (const auto& [place, span] : span_) end = std::max(end, span.second);
    double longest = 0;
    for (std::uint32_t rank = 0; rank < schedule_.ranks(); ++rank) {
      double seconds = 0;
      for (std::uint32_t chunk = 0; chunk < schedule_.chunks(); ++chunk) {
        std::set<std::uint32_t> ranks;
        for (const std::vector<std::uint32_t>& rank_of : schedule_.rank_of) ranks.insert(rank_of[chunk]);
        if (!ranks.contains(rank) || costs_.chunks[chunk].gradient_bytes == 0) continue;
        const double part =
            static_cast<double>(costs_.chunks[chunk].gradient_bytes) / static_cast<double>(ranks.size());
        for (const std::uint32_t other : ranks) {
          const Link& link = costs_.links[rank * schedule_.ranks() + other];
          if (other != rank)
            seconds += 2 * (link.message_seconds + part / link.bytes_per_second + link.latency_seconds);
        }
      }
      longest = std::max(longest, seconds);
    }
    return end + longest;
  }

  std::uint64_t peak_bytes(std::uint32_t rank) const {
    std::uint64_t most = 0;
    for (const Held& at : held_[rank]) {
      std::uint64_t sum = 0;
      for (const Held& held : held_[rank])
        sum += held.begin <= at.begin && at.begin < held.end ? held.bytes : 0;
      most = std::max(most, sum);
    }
    return most;
  }

 private:
  using Place = std::tuple<Kind, std::uint32_t, std::uint32_t>;
  /// Whether it is a gradient, from which chunk, to which, and the micro-batch.
  using Made = std::tuple<bool, std::uint32_t, std::uint32_t, std::uint32_t>;

  std::pair<double, double> gradient_span(std::uint32_t chunk, std::uint32_t m) const {
    const auto whole = span_.find({Kind::kBackward, chunk, m});
    return whole != span_.end() ? whole->second : span_.at({Kind::kInput, chunk, m});
  }

  void hold(std::uint32_t rank, double begin, double end, std::uint64_t bytes) {
    held_[rank].push_back({begin, end, bytes});
  }

  /// Gives what a chunk sends to another one, and its bytes: of skips an output goes to each that takes it,
  /// and a gradient to the one before of those.
  std::map<std::pair<std::uint32_t, std::uint32_t>, std::uint64_t> sent(bool gradient) const {
    std::map<std::pair<std::uint32_t, std::uint32_t>, std::uint64_t> all;
    for (std::uint32_t chunk = 0; chunk + 1 < schedule_.chunks(); ++chunk) {
      const auto pair = gradient ? std::pair(chunk + 1, chunk) : std::pair(chunk, chunk + 1);
      all[pair] += costs_.chunks[chunk].output_bytes;
    }
    for (const PipelineSkip& skip : costs_.skips) {
      for (std::size_t i = 0; i < skip.to.size(); ++i) {
        const std::uint32_t before = i == 0 ? skip.from : skip.to[i - 1];
        all[gradient ? std::pair(skip.to[i], before) : std::pair(skip.from, skip.to[i])] += skip.bytes;
      }
    }
    return all;
  }

  /// What a chunk has made is held where it was made until it has left, and where it is needed until it is
  /// used: an output until its chunk runs forward, a gradient until its chunk has run backward.
  void send_all() {
    std::map<Made, std::pair<double, double>> sent_and_arrival;
    std::map<std::pair<std::uint32_t, std::uint32_t>, double> link_free;
    const auto outputs = sent(false), gradients = sent(true);
    for (const PipelineMessage& message : pipeline_messages(schedule_, costs_.skips)) {
      const bool gradient = message.kind == PipelineMessage::Kind::kGradient;
      const double made = making(gradient, message.chunk, message.micro_batch).second;
      const Link& link = costs_.links[message.from * schedule_.ranks() + message.to];
      const auto bytes =
          static_cast<double>((gradient ? gradients : outputs).at({message.chunk, message.to_chunk}));
      double& free = link_free[{message.from, message.to}];
      free = std::max(free, made) + link.message_seconds + bytes / link.bytes_per_second;
      sent_and_arrival[{gradient, message.chunk, message.to_chunk, message.micro_batch}] = {
          free, free + link.latency_seconds};
    }
    std::map<std::pair<std::uint32_t, std::uint32_t>, std::uint64_t> largest;  // between ranks
    for (const bool gradient : {false, true}) {
      for (const auto& [chunks, bytes] : gradient ? gradients : outputs) {
        for (std::uint32_t m = 0; m < schedule_.micro_batches; ++m) {
          const auto [from, to] = chunks;
          const auto use = making(gradient, to, m);
          std::uint64_t& most = largest[{schedule_.rank(from, m), schedule_.rank(to, m)}];
          most = std::max(most, bytes);
          move({gradient, from, to, m}, making(gradient, from, m), schedule_.rank(from, m),
               schedule_.rank(to, m), gradient ? use.second : use.first, bytes, sent_and_arrival);
        }
      }
    }
    for (const auto& [ranks, bytes] : largest) {
      if (ranks.first != ranks.second) hold(ranks.second, 0, 1e9, 2 * bytes);
    }
  }
  /// Gives the span of the pass of a chunk that makes outputs, or gradients.
  std::pair<double, double> making(bool gradient, std::uint32_t chunk, std::uint32_t m) const {
    return gradient ? gradient_span(chunk, m) : span_.at({Kind::kForward, chunk, m});
  }

  void move(const Made& made, std::pair<double, double> making, std::uint32_t from, std::uint32_t to,
            double used, std::uint64_t bytes,
            const std::map<Made, std::pair<double, double>>& sent_and_arrival) {
    if (from == to) {
      arrival_[made] = making.second;
      return hold(to, making.first, used, bytes);
    }
    const auto [sent, arrival] = sent_and_arrival.at(made);
    arrival_[made] = arrival;
    message_bytes_ += bytes;
    hold(from, making.first, sent, bytes);
    hold(to, arrival, used, bytes);
  }

  void keep_all() {
    for (const auto& [place, span] : span_) {
      const auto& [kind, chunk, m] = place;
      const PipelineChunkCost& cost = costs_.chunks[chunk];
      const std::uint32_t rank = schedule_.rank(chunk, m);
      hold(rank, span.first, span.second, cost.working_bytes);
      const std::uint64_t always = std::min(cost.kept_bytes, cost.kept_after_input_bytes);
      if (kind == Kind::kForward)
        hold(rank, span.first, gradient_span(chunk, m).second, cost.kept_bytes - always);
      if (kind == Kind::kBackward || kind == Kind::kWeight)
        hold(rank, span_.at({Kind::kForward, chunk, m}).first, span.second, always);
      if (kind == Kind::kWeight)
        hold(rank, gradient_span(chunk, m).first, span.second, cost.kept_after_input_bytes - always);
    }
    std::set<std::pair<std::uint32_t, std::uint32_t>> chunks;  // of ranks
    for (std::uint32_t chunk = 0; chunk < schedule_.chunks(); ++chunk) {
      for (const std::vector<std::uint32_t>& rank_of : schedule_.rank_of)
        chunks.insert({rank_of[chunk], chunk});
    }
    for (const auto& [rank, chunk] : chunks) {
      hold(rank, 0, 1e9, costs_.chunks[chunk].fixed_bytes);
      const bool is_shared =
          std::any_of(chunks.begin(), chunks.end(), [&, own = rank, number = chunk](const auto& other) {
            return other.first != own && other.second == number;
          });
      if (is_shared) hold(rank, 0, 1e9, costs_.chunks[chunk].gradient_bytes);
      hold(rank, 0, 1e9, (most_versions(rank, chunk) - 1) * costs_.chunks[chunk].gradient_bytes);
    }
  }

  /// Gives the most versions of a chunk's weights that are there at once: the newest, and older ones that
  /// this pass or a later one uses.
  std::uint64_t most_versions(std::uint32_t rank, std::uint32_t chunk) const {
    if (schedule_.versions.kind == PipelineVersionRule::Kind::kFlush) return 1;
    const std::vector<PipelineAction>& actions = schedule_.actions[rank];
    std::uint32_t newest = 0;
    std::size_t most = 1;
    for (std::size_t now = 0; now < actions.size(); ++now) {
      std::set<std::uint32_t> alive = {newest};
      for (std::size_t later = now; later < actions.size(); ++later) {
        const auto& [kind, of, m] = actions[later];
        if (of != chunk || kind == Kind::kUpdate) continue;
        const PipelineVersion& used = versions_.of[chunk][m];
        const std::uint32_t version = kind == Kind::kForward ? used.forward : used.backward;
        if (version < newest) alive.insert(version);
      }
      most = std::max(most, alive.size());
      if (actions[now].kind == Kind::kUpdate && actions[now].chunk == chunk) ++newest;
    }
    return most;
  }

  const PipelineCosts& costs_;
  const PipelineSchedule& schedule_;
  PipelineVersions versions_;
  std::map<Place, std::pair<double, double>> span_;
  std::map<Made, double> arrival_;
  std::uint64_t message_bytes_ = 0;
  std::vector<std::vector<Held>> held_;
};

TEST(PipelineSimulation, EachActionBeginsWhenItCanAndBytesAreWhatIsHeld) {
  std::mt19937_64 random(1);
  std::size_t runs = 0;
  for (const PipelineGenerator& generator : pipeline_generators()) {
    for (int i = 0; i < 40; ++i) {
      const auto draw = [&](std::uint32_t most) { return 1 + static_cast<std::uint32_t>(random() % most); };
      PipelineShape shape{
          draw(5), draw(12), generator.name.find("interleaved") == 0 ? draw(3) : 0, {draw(3)}};
      const auto divisions = test::every_ranks_per_chunk(shape.ranks);
      PipelineShape divided = shape;
      divided.ranks_per_chunk = divisions[random() % divisions.size()];
      if (i % 2 == 1 && config_error([&] { pipeline_schedule(generator.name, divided); }).empty())
        shape = divided;
      PipelineSchedule schedule;
      if (!config_error([&] { schedule = pipeline_schedule(generator.name, shape); }).empty()) continue;
      const PipelineCosts costs = random_costs(random, schedule);
      const PipelineCost cost = simulate(costs, schedule);
      const Oracle oracle(costs, schedule, cost);
      for (std::uint32_t rank = 0; rank < schedule.ranks(); ++rank) {
        const std::string told = schedule.name + "\n" + schedule.text();
        for (std::size_t action = 0; action < schedule.actions[rank].size(); ++action)
          ASSERT_EQ(cost.begin_seconds[rank][action], oracle.earliest(rank, action)) << told;
        ASSERT_EQ(cost.ranks[rank].peak_bytes, oracle.peak_bytes(rank)) << "rank " << rank << " of " << told;
      }
      EXPECT_NEAR(cost.makespan_seconds, oracle.makespan(), 1e-9) << schedule.json();
      EXPECT_EQ(cost.message_bytes, oracle.message_bytes());
      EXPECT_EQ(cost.messages, pipeline_messages(schedule, costs.skips).size());
      ++runs;
    }
  }
  EXPECT_GT(runs, 400U);
}

struct TableRow {
  const char* name;
  std::vector<std::uint32_t> hops;
  std::vector<double> ratios;  ///< of the makespan to that without idle time, for links of 0, 1/2, 1 and 2 F
};

/// Times of F, I and W of a rank are equal, and each message occupies its link.
void expect_table(std::uint32_t ranks, std::uint32_t micro_batches, const std::vector<TableRow>& rows) {
  for (const TableRow& row : rows) {
    const std::vector<double> links{0, 1, 2, 4};
    for (std::size_t i = 0; i < links.size(); ++i) {
      const bool looped =
          std::string(row.name).find("interleaved") == 0 || row.name == std::string("breadth_first");
      const PipelineShape shape{ranks, micro_batches, looped ? 2U : 0U, row.hops};
      const PipelineSchedule schedule = pipeline_schedule(row.name, shape);
      const double each = schedule.chunks() > ranks ? 1 : 2;
      PipelineCosts costs = pipeline_costs(schedule.chunks(), {each, each, each});
      costs.links = {test::occupied_for(links[i])};
      const double ratio = simulate(costs, schedule).makespan_seconds / (6.0 * micro_batches);
      EXPECT_NEAR(ratio, row.ratios[i], 0.0005001) << row.name << " links " << links[i];
    }
  }
}

TEST(PipelineSimulation, TheTableOfTheDocs) {
  expect_table(4, 16,
               {{"gpipe", {}, {1.188, 1.250, 1.312, 1.750}},
                {"1f1b", {1}, {1.188, 1.479, 1.771, 2.354}},
                {"1f1b", {2}, {1.188, 1.250, 1.312, 1.562}},
                {"1f1b", {3}, {1.188, 1.250, 1.312, 1.438}},
                {"interleaved", {}, {1.094, 1.240, 1.573, 2.375}},
                {"breadth_first", {}, {1.094, 1.156, 1.542, 2.958}},
                {"zero_bubble", {1}, {1.062, 1.188, 1.479, 2.062}},
                {"zero_bubble", {2}, {1.062, 1.094, 1.125, 1.375}},
                {"interleaved_zero_bubble", {}, {1.031, 1.375, 1.938, 3.062}},
                {"zbv", {}, {1.031, 1.177, 1.365, 2.219}},
                {"chimera", {}, {1.208, 1.406, 1.604, 2.125}},
                {"dualpipe", {}, {1.021, 1.094, 1.167, 1.500}},
                {"dualpipev", {}, {1.031, 1.208, 1.562, 2.417}}});
  expect_table(8, 32,
               {{"1f1b", {1}, {1.219, 1.573, 1.927, 2.635}},
                {"zero_bubble", {1}, {1.073, 1.219, 1.573, 2.281}},
                {"zbv", {}, {1.036, 1.214, 1.432, 2.359}},
                {"chimera", {}, {1.312, 1.599, 1.885, 2.458}}});
}

TEST(PipelineSimulation, LatencyIsNotBandwidth) {
  const PipelineSchedule schedule = pipeline_schedule("gpipe", {4, 16});
  PipelineCosts costs = pipeline_costs(4, {2, 2, 2});
  costs.links = {test::late_by(4)};
  EXPECT_EQ(simulate(costs, schedule).makespan_seconds, 19 * 6 + 2 * 3 * 4);
  costs.links = {test::occupied_for(4)};
  EXPECT_EQ(simulate(costs, schedule).makespan_seconds,
            168);  // forward passes come faster than the link takes them
}

TEST(PipelineSimulation, WithoutABarrierAPeriodMayHaveNoIdleTime) {
  const PipelineCosts costs = pipeline_costs(4, {2, 2, 2});
  EXPECT_EQ(pipeline_period_seconds(costs, pipeline_schedule("zero_bubble", {4, 16, 1, {2}})), 16 * 6);
  EXPECT_GT(simulate(costs, pipeline_schedule("zero_bubble", {4, 16, 1, {2}})).makespan_seconds, 16 * 6);
  EXPECT_GT(pipeline_period_seconds(costs, pipeline_schedule("gpipe", {4, 16})), 16 * 6);
}

TEST(PipelineSimulation, TheSlowestRankAndTheSlowestLinkAreThoseGiven) {
  const PipelineSchedule schedule = pipeline_schedule("1f1b", {2, 2});
  PipelineCosts costs = pipeline_costs(2, {2, 1, 1});
  costs.speeds = {1, 0.5};
  EXPECT_EQ(simulate(costs, schedule).makespan_seconds, 2 + 2 * 8 + 2);
  costs.chunks[0].output_bytes = 10;
  costs.links = {{}, {0, 5, 0}, {7, 10, 0}, {}};  // 2 s there, 1 s and 7 s of latency back
  EXPECT_EQ(simulate(costs, schedule).makespan_seconds, 2 + 2 + 2 * 8 + 8 + 2);
}

TEST(PipelineSimulation, CostsThatDoNotFitAreRefused) {
  const PipelineSchedule schedule = pipeline_schedule("1f1b", {2, 2});
  const auto refused = [&](const auto& change) {
    PipelineCosts costs = pipeline_costs(2, {1, 1, 1});
    change(costs);
    return config_error([&] { simulate(costs, schedule); });
  };
  EXPECT_NE(refused([](PipelineCosts& c) { c.chunks.pop_back(); }).find("of 1 chunks"), std::string::npos);
  EXPECT_NE(refused([](PipelineCosts& c) { c.speeds = {1}; }).find("1 speeds for 2 ranks"),
            std::string::npos);
  EXPECT_NE(refused([](PipelineCosts& c) {
              c.speeds = {1, 0};
            }).find("rank 1 has a speed"),
            std::string::npos);
  EXPECT_NE(refused([](PipelineCosts& c) { c.links.resize(3); }).find("3 links between 2 ranks"),
            std::string::npos);
  EXPECT_NE(refused([](PipelineCosts& c) { c.links = {Link{}}; }), "");
  EXPECT_NE(refused([](PipelineCosts& c) { c.chunks[1].weight_seconds = -1; }).find("passes of chunk 1"),
            std::string::npos);
  EXPECT_NE(refused([](PipelineCosts& c) { c.chunks[1].forward_seconds = std::nan(""); }), "");
}

TEST(PipelineSimulation, TheChartIsXmlWithABarForEachAction) {
  for (const char* name : {"1f1b", "zbv", "chimera", "pipedream"}) {
    const PipelineSchedule schedule = pipeline_schedule(name, {4, 8});
    const std::string chart = pipeline_chart(pipeline_costs(schedule.chunks(), {1, 1, 1}), schedule, "a < b");
    std::multiset<std::string> bars, actions;
    for (const test::XmlElement& element : test::parse_xml(chart)) {
      if (element.name == "title" && element.text != "a < b") bars.insert(element.text);
    }
    for (const std::vector<PipelineAction>& of_rank : schedule.actions) {
      for (const PipelineAction& action : of_rank) actions.insert(action.text());
    }
    EXPECT_EQ(bars, actions) << name;
  }
}

}  // namespace
}  // namespace reef
