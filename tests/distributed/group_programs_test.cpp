// Programs of messages, collectives and subgroups, made at random from a seed that all ranks share, each
// held against what every rank works out by itself. Run as several ranks by tests/support/ranks.py.
#include <algorithm>
#include <cstdlib>
#include <optional>
#include <random>
#include <sstream>
#include <torch/csrc/distributed/c10d/ProcessGroup.hpp>

#include "messages.h"
#include "reef/collectives.h"
#include "reef/point_to_point.h"
#include "reef/subgroup.h"

namespace reef {
namespace {

using messages::config_error;
using messages::rank;
using messages::same;
using messages::size;
using messages::value;
using messages::world;
using Ranks = std::vector<std::int64_t>;

constexpr int kPrograms = 250;  // for each number of ranks
constexpr int kSteps = 25;

const std::vector<at::ScalarType> kDtypes = {at::kFloat, at::kBFloat16,     at::kLong,          at::kBool,
                                             at::kByte,  at::kComplexFloat, at::kFloat8_e4m3fn, at::kDouble};

class Program {
 public:
  explicit Program(unsigned seed) : random_(seed), seed_(seed) {
    Ranks all;
    for (int each = 0; each < size(); ++each) all.push_back(each);
    groups_.push_back({world(), all});
  }

  void run() {
    for (int step = 0; step < kSteps; ++step) {
      switch (draw(10)) {
        case 0:
          make_subgroup();
          break;
        case 1:
          drop_subgroup();
          break;
        case 2:
          sum();
          break;
        case 3:
          spread();
          break;
        case 4:
          disagree();
          break;
        case 5:
          own_message();
          break;
        case 6:
          settle();
          break;
        default:
          message();
          break;
      }
      ASSERT_FALSE(::testing::Test::HasFailure()) << "program " << seed_ << ": " << done_.str();
    }
    settle();
    ASSERT_FALSE(::testing::Test::HasFailure()) << "program " << seed_ << ": " << done_.str();
  }

 private:
  /// Of every rank, also of those that are not in it.
  struct Known {
    ProcessGroupPtr group;
    Ranks ranks;
  };
  struct Pending {
    Message message;
    at::Tensor expected;  ///< undefined: it was sent
  };

  int draw(int below) { return static_cast<int>(random_() % static_cast<unsigned>(below)); }
  std::vector<std::int64_t> draw_sizes() {
    std::vector<std::int64_t> sizes(static_cast<std::size_t>(draw(4)));
    for (auto& each : sizes) each = draw(6);
    return sizes;
  }
  at::ScalarType draw_dtype() {
    return kDtypes[static_cast<std::size_t>(draw(static_cast<int>(kDtypes.size())))];
  }
  Known& draw_group() { return groups_[static_cast<std::size_t>(draw(static_cast<int>(groups_.size())))]; }
  std::int64_t next_value() { return seed_ * 1000 + ++values_; }

  void make_subgroup() {
    const Known of = draw_group();
    Ranks inner(of.ranks.size());
    for (std::size_t i = 0; i < inner.size(); ++i) inner[i] = static_cast<std::int64_t>(i);
    std::shuffle(inner.begin(), inner.end(), random_);
    inner.resize(1 + static_cast<std::size_t>(draw(static_cast<int>(inner.size()))));
    Known made;
    for (const auto each : inner) made.ranks.push_back(of.ranks[static_cast<std::size_t>(each)]);
    done_ << "subgroup " << c10::IntArrayRef(made.ranks) << "; ";
    if (of.group) made.group = subgroup(of.group, inner);
    const bool member = std::find(made.ranks.begin(), made.ranks.end(), rank()) != made.ranks.end();
    EXPECT_EQ(made.group != nullptr, member);
    groups_.push_back(made);
  }

  void drop_subgroup() {
    if (groups_.size() == 1) return;
    done_ << "drop; ";
    groups_.erase(groups_.begin() + 1 + draw(static_cast<int>(groups_.size()) - 1));
  }

  void sum() {
    Known& in = draw_group();
    const auto sizes = draw_sizes();
    const auto seed = next_value();
    done_ << "sum in " << c10::IntArrayRef(in.ranks) << "; ";
    if (!in.group) return;
    at::Tensor expected = at::zeros(sizes, at::kLong);
    for (const auto each : in.ranks) expected += value(seed + each, sizes, at::kByte).to(at::kLong);
    const at::Tensor own = value(seed + rank(), sizes, at::kByte).to(at::kLong);
    all_reduce({own}, in.group);
    EXPECT_TRUE(same(own, expected));
  }

  void spread() {
    Known& in = draw_group();
    const int root = draw(static_cast<int>(in.ranks.size()));
    const auto sizes = draw_sizes();
    const auto dtype = draw_dtype();
    const auto seed = next_value();
    done_ << "broadcast in " << c10::IntArrayRef(in.ranks) << "; ";
    if (!in.group) return;
    const at::Tensor own = value(seed + rank(), sizes, dtype);
    broadcast({own}, in.group, root);
    EXPECT_TRUE(same(own, value(seed + in.ranks[static_cast<std::size_t>(root)], sizes, dtype)));
  }

  struct Ends {
    Known* in = nullptr;
    int from = 0, to = 0;
  };
  std::optional<Ends> draw_ends() {
    Known& in = draw_group();
    const int count = static_cast<int>(in.ranks.size());
    const int from = draw(count);
    const int to = draw(count);
    if (from == to) return std::nullopt;
    done_ << from << " to " << to << " in " << c10::IntArrayRef(in.ranks) << ", ";
    return Ends{&in, from, to};
  }

  void message() {
    const auto ends = draw_ends();
    const auto sizes = draw_sizes();
    const auto dtype = draw_dtype();
    const auto seed = next_value();
    const int tag = draw(3);
    const bool send_waits = draw(2) == 0;
    const bool receive_waits = draw(2) == 0;
    const bool into = draw(2) == 0;
    const bool turned = draw(2) == 0 && sizes.size() == 2;
    if (!ends || !ends->in->group) return;
    done_ << "message " << send_waits << receive_waits << into << "; ";
    const auto& group = ends->in->group;
    const at::Tensor expected = value(seed, sizes, dtype);
    if (group->getRank() == ends->from) {
      const at::Tensor sent = turned ? expected.t().contiguous().t() : expected;
      if (send_waits) {
        send(sent, ends->to, group, tag);
      } else {
        pending_.push_back({isend(sent, ends->to, group, tag), {}});
      }
    } else if (group->getRank() == ends->to) {
      const at::Tensor place = turned ? at::empty({sizes[1], sizes[0]}, dtype).t() : at::empty(sizes, dtype);
      if (receive_waits && into) {
        receive_into(place, ends->from, group, tag);
        EXPECT_TRUE(same(place, expected));
      } else if (receive_waits) {
        EXPECT_TRUE(same(receive(ends->from, group, tag), expected));
      } else if (into) {
        pending_.push_back({ireceive_into(place, ends->from, group, tag), expected});
      } else {
        pending_.push_back({ireceive(ends->from, group, tag), expected});
      }
    }
  }

  /// A shape or a tag that the other side does not mean.
  void disagree() {
    const auto ends = draw_ends();
    const bool by_tag = draw(2) == 0;
    const auto seed = next_value();
    if (!ends || !ends->in->group) return;
    done_ << "disagree " << by_tag << "; ";
    const auto& group = ends->in->group;
    const at::Tensor sent = value(seed, {3, 2}, at::kFloat);
    std::string text = "Float [3, 2]";
    if (group->getRank() == ends->from) {
      text = config_error([&] { send(sent, ends->to, group, 1); });
    } else if (group->getRank() == ends->to) {
      text = config_error([&] {
        if (by_tag) {
          receive(ends->from, group, 2);
        } else {
          receive_into(at::empty({2, 3}), ends->from, group, 1);
        }
      });
    }
    EXPECT_NE(text.find("Float [3, 2]"), std::string::npos) << text;
  }

  /// A message of the program's own, by c10d, with any tag that is left to it.
  void own_message() {
    const auto ends = draw_ends();
    const int tag = draw(2) == 0 ? draw(4) : (1 << 28) - 1 - draw(4);
    const auto seed = next_value();
    if (!ends || !ends->in->group) return;
    done_ << "own; ";
    const auto& group = ends->in->group;
    std::vector<at::Tensor> tensors = {value(seed, {5}, at::kFloat)};
    if (group->getRank() == ends->from) group->send(tensors, ends->to, tag)->wait();
    if (group->getRank() == ends->to) {
      std::vector<at::Tensor> place = {at::empty({5})};
      group->recv(place, ends->from, tag)->wait();
      EXPECT_TRUE(same(place.front(), tensors.front()));
    }
  }

  /// What is under way, in any order.
  void settle() {
    std::mt19937 of_this_rank(seed_ + static_cast<unsigned>(rank()));
    std::shuffle(pending_.begin(), pending_.end(), of_this_rank);
    for (const auto& [message, expected] : pending_) {
      const at::Tensor came = message.wait();
      EXPECT_TRUE(!expected.defined() || same(came, expected));
    }
    pending_.clear();
  }

  std::mt19937 random_;
  unsigned seed_;
  std::int64_t values_ = 0;
  std::vector<Known> groups_;
  std::vector<Pending> pending_;
  std::ostringstream done_;
};

TEST(GroupPrograms, AgreeWithWhatEachRankWorksOut) {
  if (size() == 1) GTEST_SKIP();
  const char* const one = std::getenv("REEF_GROUP_PROGRAM");  // to run one that failed
  for (unsigned seed = 1; seed <= kPrograms; ++seed) {
    if (one != nullptr && std::atoi(one) != static_cast<int>(seed)) continue;
    Program(seed * 10 + static_cast<unsigned>(size())).run();
    if (HasFatalFailure()) return;
  }
}

}  // namespace
}  // namespace reef
