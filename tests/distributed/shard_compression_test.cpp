// ShardOptions::compression: what is held back of gradients is remembered, saved, loaded by other ranks and
// counted.
#include <functional>
#include <map>
#include <sstream>
#include <string>
#include <utility>
#include <vector>

#include "distributed/through_file.h"
#include "reef/error.h"
#include "reef/optimizer_state.h"
#include "shard_net.h"

namespace reef::shard_tests {
namespace {

using Communication = OptimizerState::Communication;
constexpr const char* kOtherName = "tokens.weight";  // of "tied", which comes first

struct Row {
  Stage stage;
  int degree;
  Compression method = Compression::kBFloat16;
  ShardOptions options(std::int64_t bucket_bytes = 5000) const {
    return {.stage = stage, .bucket_bytes = bucket_bytes, .compression = method, .shard_degree = degree};
  }
  bool has_copies() const { return degree != 0 && degree < size(); }
  std::string text() const {
    return std::string(name_of(method)) + ", stage " + std::to_string(static_cast<int>(stage)) + " among " +
           std::to_string(degree) + " on rank " + std::to_string(rank());
  }
};
std::vector<Row> rows(Compression method = Compression::kBFloat16) {
  std::vector<Row> all;
  for (const Stage stage : kStages) {
    all.push_back({stage, 0, method});
    if (stage != Stage::kReplicate && size() == 4) all.push_back({stage, 2, method});
  }
  return all;
}
constexpr Compression kMethods[] = {Compression::kBFloat16, Compression::kSign, Compression::kPowerSgd};
std::vector<Row> rows_of_all() {
  std::vector<Row> all;
  for (const Compression method : kMethods)
    for (const Row& row : rows(method)) all.push_back(row);
  return all;
}

using Values = std::map<std::string, Tensor>;

/// What all ranks do in one process, by parameter. A parameter that no rank uses is left out of a step.
class Oracle {
 public:
  explicit Oracle(const Row& row) : row_(row) {}
  void step(Net net, torch::optim::Optimizer& optimizer, int step) {
    std::vector<Values> of_ranks;
    for (int of = 0; of < size(); ++of) {
      optimizer.zero_grad();
      net->forward(batch(ranks_at(row_.stage), of, step)).backward();
      for (const auto& item : net->named_parameters()) {
        if (of == 0) of_ranks.resize(static_cast<std::size_t>(size()));
        if (item.value().grad().defined())
          of_ranks[static_cast<std::size_t>(of)][item.key()] = item.value().grad().clone();
      }
    }
    optimizer.zero_grad();
    for (const auto& item : net->named_parameters()) {
      if (item.key() != kOtherName) item.value().mutable_grad() = gradient(item.key(), of_ranks);
    }
    optimizer.step();
  }
  Values residuals, of_sums;  ///< by rank, or copy, and name

 private:
  Tensor gradient(const std::string& name, const std::vector<Values>& of_ranks) {
    Tensor like;
    for (const Values& values : of_ranks) {
      if (const auto one = values.find(name); one != values.end()) like = one->second;
    }
    if (!like.defined()) return {};
    std::vector<Tensor> addends;
    for (int of = 0; of < size(); ++of) {
      const Values& values = of_ranks[static_cast<std::size_t>(of)];
      const auto one = values.find(name);
      const Tensor own = one == values.end() ? torch::zeros_like(like) : one->second.clone();
      if (row_.has_copies() && of % row_.degree != 0) {
        addends.back() += own;
      } else {
        addends.push_back(own);
      }
    }
    Tensor sum;
    for (std::size_t i = 0; i < addends.size(); ++i) {
      const Tensor sent =
          size() == 1 ? addends[i] : rounded(addends[i], residuals[std::to_string(i) + " " + name]);
      sum = sum.defined() ? sum + sent : sent.clone();
    }
    if (row_.stage == Stage::kReplicate && size() > 1) sum = rounded(sum, of_sums[name]);
    return sum / size();
  }
  static Tensor rounded(const Tensor& values, Tensor& residual) {
    const Tensor all = residual.defined() ? values + residual : values;
    const Tensor sent = all.to(at::kBFloat16).to(at::kFloat);
    residual = all - sent;
    return sent;
  }
  const Row row_;
};

/// Steps [first, last) of this rank's batches.
void train(Net net, Row row, torch::optim::Optimizer& optimizer, int first, int last) {
  for (int step = first; step < last; ++step) {
    optimizer.zero_grad();
    net->forward(batch(ranks_at(row.stage), rank(), step)).backward();
    optimizer.step();
  }
}

/// Of all ranks and names, by the elements of whole parameters: what is held back altogether.
Values total_of(const Communication& all, const Net& net) {
  Values total;
  for (const auto& [rank, values] : all.of_ranks) {
    for (const auto& [name, of_name] : values) {
      const std::size_t open = name.find('[');
      const std::string parameter = name.substr(0, open);
      const Tensor like = net->named_parameters()[parameter];
      Tensor& sum = total[parameter];
      if (!sum.defined()) sum = torch::zeros({like.numel()});
      const std::int64_t first = open == std::string::npos ? 0 : std::stoll(name.substr(open + 1));
      for (const auto& [key, value] : of_name) {
        if (key != "residual" && key != "residual_of_sum") continue;
        sum.slice(0, first, first + value.toTensor().numel()) += value.toTensor().reshape({-1});
      }
    }
  }
  return total;
}
/// `rounds`: shares have been added up that are no whole numbers.
void expect_equal(const Values& found, const Values& expected, bool rounds, const std::string& text) {
  EXPECT_EQ(found.size(), expected.size()) << text;
  for (const auto& [name, values] : expected) {
    const auto one = found.find(name);
    ASSERT_NE(one, found.end()) << text << ", " << name;
    EXPECT_TRUE(rounds ? torch::allclose(one->second, values, 1e-5, 1e-5) : torch::equal(one->second, values))
        << text << ", " << name;
  }
}
/// The same bits, by rank, name and key.
void expect_same_bits(const Communication& found, const Communication& expected, const std::string& text) {
  EXPECT_EQ(found.method, expected.method) << text;
  ASSERT_EQ(found.of_ranks.size(), expected.of_ranks.size()) << text;
  for (std::size_t i = 0; i < expected.of_ranks.size(); ++i) {
    EXPECT_EQ(found.of_ranks[i].first, expected.of_ranks[i].first) << text;
    std::map<std::string, OptimizerState::Values> by_name;
    for (const auto& [name, values] : found.of_ranks[i].second) by_name[name] = values;
    EXPECT_EQ(by_name.size(), expected.of_ranks[i].second.size()) << text;
    for (const auto& [name, values] : expected.of_ranks[i].second) {
      ASSERT_EQ(by_name[name].size(), values.size()) << text << ", " << name;
      for (std::size_t k = 0; k < values.size(); ++k) {
        EXPECT_EQ(by_name[name][k].first, values[k].first) << text;
        const Tensor ours = by_name[name][k].second.toTensor(), theirs = values[k].second.toTensor();
        EXPECT_TRUE(torch::equal(ours, theirs) && ours.sizes() == theirs.sizes()) << text << ", " << name;
      }
    }
  }
}

std::vector<OptimizerState> of_all_ranks(const OptimizerState& own) {
  std::stringstream saved;
  torch::save(own, saved);
  std::vector<OptimizerState> all;
  for (int of = 0; of < size(); ++of) {
    std::string bytes = saved.str();
    const Tensor length = torch::tensor(static_cast<std::int64_t>(bytes.size()));
    broadcast({length}, group(), of);
    bytes.resize(static_cast<std::size_t>(length.item<std::int64_t>()));
    broadcast({torch::from_blob(bytes.data(), {length.item<std::int64_t>()}, torch::kByte)}, group(), of);
    std::stringstream read(bytes);
    torch::load(all.emplace_back(), read);
  }
  return all;
}

// Parameters that only some ranks use, that none does, and that are tied: gradients are those of one process
// that rounds and holds back as all ranks do.
TEST(ShardCompression, TrainsAsOneProcessThatHoldsBack) {
  for (const Row& row : rows()) {
    Net expected(7), net(7);
    const Optimizer alone = kCases[0].make(parameters_of(expected));
    Oracle oracle(row);
    Shard sharded = shard(*net, group(), row.options());
    const Optimizer optimizer = kCases[0].make(sharded.parameters());
    for (int step = 0; step < kSteps; ++step) {
      oracle.step(expected, *alone, step);
      train(net, row, *optimizer, step, step + 1);
    }
    sharded.gather();
    expect_same(*net, *expected, row.text());
    if (size() == 1) continue;
    const Communication whole = sharded.full_optimizer_state(*optimizer).communication;
    for (const auto& [of_rank, values] : whole.of_ranks) {
      if (row.has_copies()) break;
      for (const auto& [name, of_name] : values) {
        if (name.find('[') != std::string::npos) continue;
        const Tensor& residual = oracle.residuals[std::to_string(of_rank) + " " + name];
        const Tensor found = of_name.front().second.toTensor();
        EXPECT_TRUE(residual.defined() ? torch::equal(found, residual) : found.abs().sum().item<float>() == 0)
            << row.text() << ", " << name;
      }
    }
  }
}

enum class Given { kWhole, kOnRank0, kParts };

void goes_on_from_a_state(Compression method) {
  const std::vector<Row> all = rows(method);
  for (std::size_t from = 0; from < all.size(); ++from) {
    const Row& row = all[from];
    Net net(7);
    Shard sharded = shard(*net, group(), row.options());
    const Optimizer optimizer = kCases[0].make(sharded.parameters());
    train(net, row, *optimizer, 0, 2);
    const StateDict module = sharded.full_state_dict();
    const OptimizerState whole = through_file(sharded.full_optimizer_state(*optimizer));
    const std::vector<OptimizerState> parts = of_all_ranks(sharded.sharded_optimizer_state(*optimizer));
    EXPECT_EQ(sharded.communication().of_ranks.front().second.empty(),
              size() == 1 || method == Compression::kQsgd);
    train(net, row, *optimizer, 2, kSteps);
    sharded.gather();
    for (const Given how : {Given::kWhole, Given::kOnRank0, Given::kParts}) {
      const std::size_t to =
          how == Given::kWhole ? from : (from + static_cast<std::size_t>(how)) % all.size();
      for (const Row& other : {row, all[to]}) {
        const std::string text =
            row.text() + " to " + other.text() + " as " + std::to_string(static_cast<int>(how));
        const bool same_buckets = how == Given::kParts;
        const std::int64_t bucket_bytes = same_buckets ? 5000 : 900;
        Net resumed_net(9);
        Shard resumed = shard(*resumed_net, group(), other.options(bucket_bytes));
        const Optimizer own = kCases[0].make(resumed.parameters());
        resumed.load_state_dict({module});
        std::vector<OptimizerState> given = how == Given::kParts ? parts : std::vector<OptimizerState>{whole};
        if (how == Given::kOnRank0 && rank() > 0) given.clear();
        resumed.load_optimizer_state(*own, given);
        const Communication loaded = resumed.full_optimizer_state(*own).communication;
        const bool rounds = other.degree != row.degree || method != Compression::kBFloat16;
        expect_equal(total_of(loaded, net), total_of(whole.communication, net), rounds, text);
        if (other.stage != row.stage || other.degree != row.degree) continue;
        if (!same_buckets && method != Compression::kBFloat16) continue;  // elements share what is sent
        if (same_buckets) expect_same_bits(loaded, whole.communication, text);
        train(resumed_net, other, *own, 2, kSteps);
        resumed.gather();
        expect_same(*resumed_net, *net, text);
      }
    }
  }
}

// At the same stage: the same bits as without a break. At another all that is held back is still there.
TEST(ShardCompression, GoesOnFromAState) {
  for (const Compression method : kMethods) goes_on_from_a_state(method);
  goes_on_from_a_state(Compression::kQsgd);  // whose random numbers go on
}

/// What so many ranks hold back, of whole numbers: whole parameters, and slices of sums.
Communication held_back_by(int ranks, const Net& net, Compression method) {
  Communication all{name_of(method), ranks, {}, {}};
  for (int of = 0; of < ranks; ++of) {
    torch::manual_seed(static_cast<std::uint64_t>(of + 1));
    auto& values = all.of_ranks.emplace_back().second;
    all.of_ranks.back().first = of;
    for (const auto& item : net->named_parameters()) {
      if (item.key() == kOtherName || !item.value().requires_grad()) continue;
      values.push_back(
          {item.key(), {{"residual", torch::randint(-99, 99, item.value().sizes()).to(at::kFloat)}}});
      if (item.value().numel() > 600 && method != Compression::kPowerSgd) {
        const std::int64_t first = of * 256 / ranks / 256 * 256, last = of + 1 < ranks ? first : 512;
        if (last > first) {
          values.push_back({item.key() + "[" + std::to_string(first) + ":" + std::to_string(last) + "]",
                            {{"residual_of_sum", torch::ones({last - first})}}});
        }
      }
    }
  }
  return all;
}

// From any number of ranks: each element's sum over ranks is what it was, and the next steps apply it.
TEST(ShardCompression, IsLoadedByAnotherNumberOfRanks) {
  for (const Row& row : rows_of_all()) {
    for (int ranks = 1; ranks <= 5; ++ranks) {
      Net net(7);
      Shard sharded = shard(*net, group(), row.options());
      const Optimizer optimizer = kCases[0].make(sharded.parameters());
      OptimizerState state = sharded.full_optimizer_state(*optimizer);
      state.communication = held_back_by(ranks, net, row.method);
      sharded.load_optimizer_state(*optimizer, {state});
      const std::string text = row.text() + " from " + std::to_string(ranks);
      expect_equal(total_of(sharded.full_optimizer_state(*optimizer).communication, net),
                   total_of(state.communication, net), /*rounds=*/false, text);
    }
  }
}

void refuses(const std::function<void()>& what, const std::string& text) {
  try {
    what();
    ADD_FAILURE() << "nothing was thrown; expected: " << text;
  } catch (const ConfigError& error) {
    EXPECT_NE(message_of(error).find(text), std::string::npos) << message_of(error);
  }
}

// On all ranks alike, and what there was is still there.
TEST(ShardCompression, WhatWouldLoseAGradientIsRefused) {
  if (size() == 1) return;
  const Row row{Stage::kGradients, 0};
  Net net(7), plain_net(7);
  Shard sharded = shard(*net, group(), row.options());
  const Optimizer optimizer = kCases[0].make(sharded.parameters());
  train(net, row, *optimizer, 0, 2);
  const OptimizerState whole = sharded.full_optimizer_state(*optimizer);
  const std::vector<OptimizerState> parts = of_all_ranks(sharded.sharded_optimizer_state(*optimizer));
  const auto refused = [&](const std::string& text, const std::function<void(OptimizerState&)>& change) {
    OptimizerState changed = whole;
    change(changed);
    refuses([&] { sharded.load_optimizer_state(*optimizer, {changed}); }, text);
    expect_same_bits(sharded.full_optimizer_state(*optimizer).communication, whole.communication, text);
  };
  refused("by compression qsgd, and gradients are exchanged here by compression bfloat16",
          [](OptimizerState& state) { state.communication.method = "qsgd"; });
  refused("what rank 1 of " + std::to_string(size()) + " has held back of gradients is in none",
          [](OptimizerState& state) {
            state.communication.of_ranks.erase(state.communication.of_ranks.begin() + 1);
          });
  refused(
      "what rank 0 of " + std::to_string(size()) + " has held back of gradients is given twice",
      [](OptimizerState& state) { state.communication.of_ranks.push_back(state.communication.of_ranks[0]); });
  refused("holds back gradients of elsewhere, which the module has not", [](OptimizerState& state) {
    state.communication.of_ranks[0].second.push_back({"elsewhere", {{"residual", torch::ones({3})}}});
  });
  refused("has momentum of even, which compression bfloat16 does not keep", [](OptimizerState& state) {
    state.communication.of_ranks[0].second.push_back({"even", {{"momentum", torch::ones({24, 3})}}});
  });
  refused("residual of even in the state that is loaded is not of elements 0 to 72 of 72",
          [](OptimizerState& state) {
            state.communication.of_ranks[0].second = {{"even", {{"residual", torch::ones({3})}}}};
          });
  refused("residual of even in the state that is loaded is not of elements 0 to 72 of 72",
          [](OptimizerState& state) {
            state.communication.of_ranks[0].second = {{"even", {{"residual", torch::ones({3, 24})}}}};
          });
  refused("residual of even[64:80] in the state that is loaded is not of elements 64 to 80 of 72",
          [](OptimizerState& state) {
            state.communication.of_ranks[0].second = {{"even[64:80]", {{"residual", torch::ones({16})}}}};
          });
  refused("residual of even is of Double in the state and of Float here", [](OptimizerState& state) {
    state.communication.of_ranks[0].second = {
        {"even", {{"residual", torch::full({24, 3}, 0.1, at::kDouble)}}}};
  });
  refused("which compression bfloat16 has not", [](OptimizerState& state) {
    state.communication.numbers = {{"steps", 3}};
  });
  std::vector<OptimizerState> mixed = parts;
  mixed[1].communication = {};
  refuses([&] { sharded.load_optimizer_state(*optimizer, mixed); },
          "the states that are loaded are of several runs");

  Shard dense = shard(*plain_net, group(), {.stage = row.stage});
  const Optimizer of_dense = kCases[0].make(dense.parameters());
  refuses([&] { dense.load_optimizer_state(*of_dense, {whole}); },
          "by compression bfloat16, and gradients are exchanged here by compression none");
  const OptimizerState without = dense.full_optimizer_state(*of_dense);
  EXPECT_TRUE(without.communication.method.empty());
  sharded.load_optimizer_state(*optimizer, {without});  // nothing is held back there
  EXPECT_TRUE(sharded.communication().of_ranks.front().second.empty());

  Net other(7);
  refuses(
      [&] {
        shard(*other, group(), {.sum_order = SumOrder::kNative, .compression = Compression::kBFloat16});
      },
      "a compression and sum_order kNative");
  refuses(
      [&] {
        shard(*other, group(),
              {.compression = Compression::kBFloat16,
               .mixed_precision = MixedPrecision{.parameters = at::kHalf}});
      },
      "is of Half, and a compression");
  refuses(
      [&] {
        shard(*other, group(), {.compression = rank() == 0 ? Compression::kBFloat16 : Compression::kNone});
      },
      "reef::shard was given different models or options");
}

struct Fails : torch::autograd::Function<Fails> {
  static Tensor forward(torch::autograd::AutogradContext*, const Tensor& x) { return x.clone(); }
  static torch::autograd::variable_list backward(torch::autograd::AutogradContext*,
                                                 const torch::autograd::variable_list&) {
    throw c10::OutOfMemoryError({__func__, __FILE__, __LINE__}, "this rank is out of memory");
  }
};

// A pass that a rank abandons, cleared gradients, and a module that is looked at anew leave every bit.
TEST(ShardCompression, WhatIsHeldBackStays) {
  if (size() == 1) return;
  for (const Row& row : rows_of_all()) {
    Net net(7);
    Shard sharded = shard(*net, group(), row.options());
    const Optimizer optimizer = kCases[0].make(sharded.parameters());
    train(net, row, *optimizer, 0, 2);
    const Communication before = sharded.full_optimizer_state(*optimizer).communication;
    const auto same = [&](const std::string& text) {
      expect_same_bits(sharded.full_optimizer_state(*kCases[0].make(sharded.parameters())).communication,
                       before, row.text() + text);
    };
    optimizer->zero_grad();
    try {
      // Some buckets are on their way by then.
      const Tensor loss = net->forward(batch(ranks_at(row.stage), rank(), 2));
      if (rank() == 1) {
        const Tensor h = Fails::apply(net->norm->weight * 1);
        (loss + h.sum()).backward();
      } else {
        loss.backward();
      }
      ADD_FAILURE() << "the pass was not abandoned";
    } catch (const std::exception&) {
    }
    same(", after an abandoned pass");
    optimizer->zero_grad();
    net->zero_grad();
    sharded.clear_gradients();
    same(", after gradients were cleared");
    sharded.refresh(*net);
    same(", after refresh()");
    net->to(at::kDouble);
    sharded.refresh(*net);
    const Optimizer wider = kCases[0].make(sharded.parameters());
    expect_equal(total_of(sharded.full_optimizer_state(*wider).communication, net), total_of(before, net),
                 row.method != Compression::kBFloat16, row.text() + ", of Double");
    net->to(at::kBFloat16);
    refuses([&] { sharded.refresh(*net); }, "and what is held back would be lost");
    EXPECT_TRUE(sharded.has_ended());
  }
}

// What is held back may leave for a tier, and what is on its way stays.
TEST(ShardCompression, IsTheSameInsideABudget) {
  for (const Row& row : rows()) {
    if (row.stage == Stage::kOptimizer || row.degree != 0) continue;
    const ShardOptions options = row.options(std::int64_t{300} << 10);
    expect_same_inside_a_budget(training_of_a_chain(6, at::kFloat, options), 80, row.text());
  }
}

// Between steps residuals take the gradients' bytes, in whole buckets, and at kReplicate a slice besides.
// From the second step on the memory of the step before stays, too. A rank sends 2 bytes an element.
TEST(ShardCompression, BytesAreCountedAndSentExactly) {
  const Ledger ledger;
  for (const Row& row : rows()) {
    settled_live_bytes();
    const std::int64_t before = ledger.live()[Category::kCommunication];
    torch::nn::Linear layer(torch::nn::LinearOptions(512, 96 * size()).bias(false));
    const std::int64_t elements = layer->weight.numel();
    Shard sharded = shard(*layer, group(), row.options(std::int64_t{25} << 20));
    torch::optim::SGD optimizer(sharded.parameters(), torch::optim::SGDOptions(0.1));
    const auto step = [&] {
      optimizer.zero_grad();
      layer->forward(torch::randn({2, 512})).sum().backward();
      optimizer.step();
      sharded.gather();
    };
    step();
    const std::int64_t slice = elements / (row.degree == 0 ? size() : row.degree);
    std::int64_t held_back = row.has_copies() ? slice : elements;
    if (row.stage == Stage::kReplicate) held_back += slice;
    if (size() == 1) held_back = 0;
    const auto counted = [&] {
      settled_live_bytes();
      return ledger.live()[Category::kCommunication] - before;
    };
    EXPECT_EQ(counted(), 4 * held_back) << row.text();
    const OptimizerState state = sharded.full_optimizer_state(optimizer);
    sharded.load_optimizer_state(optimizer, {state});
    EXPECT_EQ(counted(), 4 * held_back) << row.text() << ", loaded";
    const std::int64_t sent = sharded.sent_bytes();
    for (int i = 0; i < 2; ++i) step();
    EXPECT_EQ(counted(), 2 * 4 * held_back) << row.text() << ", two steps later";
    if (row.stage != Stage::kReplicate) continue;
    EXPECT_EQ(sharded.sent_bytes() - sent, 2 * 2 * 2 * (size() - 1) * slice) << row.text();
  }
}

}  // namespace
}  // namespace reef::shard_tests
