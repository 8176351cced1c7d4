// Functions that read what they also write: a second run finds what the first did, or there is an error.
#include "chain_nets.h"
#include "reef/chain.h"
#include "reef/checkpoint.h"
#include "reef/error.h"

namespace reef {
namespace {

using namespace chain_tests;

/// What a function carries from call to call.
struct Carried {
  Tensor weight = torch::linspace(0.1, 1, 16).view({4, 4}).requires_grad_();
  Tensor average = torch::zeros({4});
  Tensor bank = torch::linspace(0, 1, 12).view({3, 4}).clone();
  Tensor at = torch::zeros({}, torch::kLong);
};
using Way = std::function<Tensor(Carried&, const Tensor&)>;

struct Row {
  const char* name;
  Way way;
};

const Row kRows[] = {{"an average in place",
                      [](Carried& c, const Tensor& x) {
                        const Tensor y = x.mm(c.weight);
                        c.average.mul_(0.9).add_(y.detach().mean(0));
                        return (y * (c.average + 1)).sin();
                      }},
                     {"an average, read and then copied into",
                      [](Carried& c, const Tensor& x) {
                        const Tensor y = x.mm(c.weight) * (c.average + 1);
                        c.average.copy_(y.detach().mean(0));
                        return y.sin();
                      }},
                     {"an average, by way of a view",
                      [](Carried& c, const Tensor& x) {
                        const Tensor y = x.mm(c.weight);
                        c.average.narrow(0, 1, 2).add_(y.detach().mean(0).narrow(0, 1, 2));
                        return (y + c.average).sin();
                      }},
                     {"an average, without a graph's version",
                      [](Carried& c, const Tensor& x) {
                        const Tensor y = x.mm(c.weight);
                        c.average.variable_data().add_(y.detach().mean(0));
                        return (y * (c.average + 1)).sin();
                      }},
                     {"a bank",
                      [](Carried& c, const Tensor& x) {
                        const Tensor y = x.mm(c.weight);
                        const Tensor mixed = y.mm((c.bank + 1).t()).softmax(-1);
                        c.bank.select(0, c.at.item<std::int64_t>()).copy_(y.detach().mean(0));
                        c.at.add_(1).remainder_(3);
                        return mixed.mm(c.bank + 2);
                      }},
                     {"a counter that decides",
                      [](Carried& c, const Tensor& x) {
                        c.at.add_(1);
                        return c.at.item<std::int64_t>() % 2 == 0 ? x.mm(c.weight).sin()
                                                                  : x.mm(c.weight).exp();
                      }},
                     {"a parameter that is scaled",
                      [](Carried& c, const Tensor& x) {
                        {
                          const torch::NoGradGuard no_grad;
                          c.weight.mul_(0.75);
                        }
                        return x.mm(c.weight).sin();
                      }},
                     {"overwritten before it is read",
                      [](Carried& c, const Tensor& x) {
                        c.average.copy_(x.detach().mean(0));
                        return (x.mm(c.weight) * (c.average + 1)).sin();
                      }},
                     {"by an output argument", [](Carried& c, const Tensor& x) {
                        const Tensor y = x.mm(c.weight);
                        at::add_out(c.average, c.average, y.detach().mean(0));
                        return (y * (c.average + 1)).sin();
                      }}};

enum class Call { kPlain, kCheckpoint, kNested, kChain };

Tensor called(Call call, const Way& way, const std::shared_ptr<Carried>& carried, const Tensor& x) {
  const auto stage = [way, carried](const Tensor& in) { return way(*carried, in); };
  switch (call) {
    case Call::kPlain:
      return stage(stage(x) + 1);
    case Call::kCheckpoint:
      return checkpoint([=](const Tensor& in) { return stage(stage(in) + 1); }, x);
    case Call::kNested:
      return checkpoint([=](const Tensor& in) { return checkpoint(stage, checkpoint(stage, in) + 1); }, x);
    case Call::kChain:
      break;
  }
  Chain chain({stage, [](const Tensor& in) { return in + 1; }, stage});
  const ChainProfile profile = profile_chain(chain, x, {.repeats = 1});
  return run(chain, plan_chain(profile, minimum_bytes(profile)), x);
}

/// All that two steps and two forward passes before one backward pass leave.
Tensors left_by(Call call, const Way& way) {
  torch::manual_seed(0);
  const auto carried = std::make_shared<Carried>();
  Tensors inputs;
  for (int i = 0; i < 3; ++i) inputs.push_back(torch::randn({3, 4}).requires_grad_());
  const auto loss = [&](int i) {
    return called(call, way, carried, inputs[static_cast<std::size_t>(i)]).pow(2).mean();
  };
  loss(0).backward();
  loss(0).backward();
  (loss(1) + loss(2)).backward();
  Tensors left{carried->weight.detach(), carried->weight.grad(), carried->average, carried->bank,
               carried->at};
  for (const Tensor& input : inputs) left.push_back(input.grad());
  return left;
}

TEST(CheckpointState, EveryFunctionLeavesWhatItLeavesPlainly) {
  for (const Row& row : kRows) {
    Tensors plain;
    try {
      plain = left_by(Call::kPlain, row.way);
    } catch (const c10::Error&) {  // autograd saves what is modified later
      for (const Call call : {Call::kCheckpoint, Call::kNested, Call::kChain})
        EXPECT_THROW(left_by(call, row.way), c10::Error) << row.name;
      continue;
    }
    for (const Call call : {Call::kCheckpoint, Call::kNested, Call::kChain}) {
      const Tensors ours = left_by(call, row.way);
      for (std::size_t i = 0; i < plain.size(); ++i) {
        EXPECT_TRUE(ours[i].equal(plain[i])) << row.name << ", call " << static_cast<int>(call) << ", " << i;
      }
    }
  }
}

template <class Function>
std::string refused(const Function& function) {
  try {
    function();
  } catch (const RecomputeError& error) {
    return message_of(error);
  }
  return "not refused";
}

TEST(CheckpointState, WhatAnotherWritesBetweenIsRefused) {
  const Tensor bias = torch::zeros({4}), x = torch::ones({4}, torch::requires_grad());
  const Tensor y = checkpoint([bias](const Tensor& in) { return (in + bias).sin(); }, x).sum();
  bias.add_(1);
  EXPECT_NE(refused([&] { y.backward(); }).find("a tensor that it reads, Float [4], has been modified"),
            std::string::npos);
}

TEST(CheckpointState, WhatIsCarriedInAnotherTensorIsRefused) {
  const auto held = std::make_shared<Tensor>(torch::zeros({4}));
  const auto function = [held](const Tensor& in) {
    *held = *held * 0.5 + in.detach();
    return (in * *held).exp();
  };
  const Tensor x = torch::ones({4}, torch::requires_grad());
  const Tensor y = checkpoint(function, x).sum();
  EXPECT_NE(refused([&] { y.backward(); }).find("in the place of one that this had read"), std::string::npos);
  Chain chain({function});
  EXPECT_NE(refused([&] { profile_chain(chain, x); }), "not refused");
}

TEST(CheckpointState, ATableThatTheFirstRunMakesIsFoundByTheSecond) {
  Tensor table;
  const auto function = [&](const Tensor& in) {
    if (!table.defined()) table = torch::arange(4).to(torch::kFloat).cos();
    return (in * table).sin();
  };
  const Tensor x = torch::ones({4}, torch::requires_grad());
  checkpoint(function, x).sum().backward();
  EXPECT_TRUE(x.grad().equal(torch::autograd::grad({function(x).sum()}, {x})[0]));
}

TEST(CheckpointState, OnlyWhatIsBothReadAndWrittenIsCopied) {
  Ledger ledger;
  const auto kept = [&](const auto& function) {
    const Tensor x = torch::ones({32, 64}, torch::requires_grad());
    const std::int64_t before = ledger.live().total();
    const Tensor y = checkpoint(function, x);
    return ledger.live().total() - before - static_cast<std::int64_t>(y.nbytes());
  };
  nn::Sequential norm(nn::Linear(64, 64), nn::BatchNorm1d(64), nn::Tanh());
  EXPECT_EQ(kept([&](const Tensor& x) { return norm->forward(x); }), 0);
  const Tensor average = torch::zeros({64});
  EXPECT_EQ(kept([&](const Tensor& x) { return (x + average.mul_(0.9)).exp(); }), 64 * 4);
  EXPECT_EQ(kept([&](const Tensor& x) { return (x + average.zero_()).exp(); }), 0);
}

TEST(CheckpointState, ItIsKnownWhetherARunIsUndone) {
  std::vector<bool> undone, again;
  const auto inner = [&](const Tensor& x) {
    undone.push_back(is_undone());
    again.push_back(is_run_again());
    return x.exp();
  };
  const Tensor x = torch::ones({4}, torch::requires_grad());
  checkpoint([&](const Tensor& in) { return checkpoint(inner, in).sin(); }, x).sum().backward();
  EXPECT_EQ(undone, (std::vector<bool>{false, true, true}));
  EXPECT_EQ(again, (std::vector<bool>{false, false,
                                      true}));  // the inner one, first within the outer one's second run
  EXPECT_FALSE(is_undone());
}

}  // namespace
}  // namespace reef
