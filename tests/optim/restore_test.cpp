#include <gtest/gtest.h>
#include <torch/torch.h>

#include <cmath>
#include <functional>
#include <map>
#include <sstream>
#include <stdexcept>

#include "reef/error.h"
#include "reef/optim.h"
#include "reef/optimizer_state.h"

// What torch::load takes and what it refuses: files that are damaged in one way each, and then leave the
// optimizer as it was.
namespace reef::optim {
namespace {

using torch::Tensor;
using Values = OptimizerState::Values;

std::vector<Tensor> parameters(c10::ScalarType dtype = torch::kFloat) {
  torch::manual_seed(0);
  return {torch::randn({64, 96}).to(dtype).requires_grad_(), torch::randn({17}).to(dtype).requires_grad_()};
}

void run(torch::optim::Optimizer& optimizer, std::vector<Tensor>& all, int steps, int first = 0) {
  for (int step = first; step < first + steps; ++step) {
    torch::manual_seed(1000 + static_cast<std::uint64_t>(step));
    for (Tensor& p : all) p.mutable_grad() = torch::randn(p.sizes()).to(p.dtype());
    optimizer.step();
  }
}

template <class Optimizer, class Options>
OptimizerState saved(const Options& options, c10::ScalarType dtype = torch::kFloat) {
  std::vector<Tensor> all = parameters(dtype);
  Optimizer optimizer(all, options);
  run(optimizer, all, 3);
  return optimizer_state(optimizer);
}

Values& state_of(OptimizerState& state, std::size_t parameter = 0) {
  for (auto& [id, values] : state.states) {
    if (id == state.groups[0].ids[parameter]) return values;
  }
  throw std::runtime_error("no state");
}

void put(Values& values, const std::string& key, c10::IValue value) {
  for (auto& [name, old] : values) {
    if (name == key) {
      old = std::move(value);
      return;
    }
  }
  values.emplace_back(key, std::move(value));
}

Tensor get(const Values& values, const std::string& key) {
  for (const auto& [name, value] : values) {
    if (name == key) return value.toTensor();
  }
  return {};
}

void drop(Values& values, const std::string& key) {
  std::erase_if(values, [&](const auto& one) { return one.first == key; });
}

std::string bytes_of(const torch::optim::Optimizer& optimizer) {
  std::ostringstream text;
  const OptimizerState state = optimizer_state(optimizer);
  for (const auto& [key, value] : state.groups[0].options) text << key << value;
  std::map<std::string, Values> sorted(state.states.begin(), state.states.end());
  for (const std::string& id : state.groups[0].ids) {
    for (const auto& [key, value] : sorted[id]) {
      text << key;
      if (value.isTensor())
        text << value.toTensor().sizes() << value.toTensor().to(torch::kDouble).abs().sum();
      else
        text << value;
    }
  }
  return text.str();
}

void is_refused(torch::optim::Optimizer& optimizer, const OptimizerState& given, const std::string& text) {
  const std::string before = bytes_of(optimizer);
  try {
    load_optimizer_state(optimizer, given);
    ADD_FAILURE() << "no error: " << text;
  } catch (const ConfigError& error) {
    EXPECT_NE(message_of(error).find(text), std::string::npos) << message_of(error);
  }
  EXPECT_EQ(bytes_of(optimizer), before);
}

AdamW trained_adamw(std::vector<Tensor>& all, StateFormat format = StateFormat::kFloat32) {
  AdamW optimizer(all, AdamWOptions(1e-2).state(format).min_quantized_numel(100));
  run(optimizer, all, 2);
  return optimizer;
}

TEST(Restore, FilesOfOtherRulesAreRefused) {
  std::vector<Tensor> all = parameters();
  AdamW adamw = trained_adamw(all);
  const std::string who = "adam: parameter 0 of group 0, of shape [64, 96]: the state that is loaded lacks ";
  is_refused(adamw, saved<RMSprop>(RMSpropOptions()), who + "exp_avg, exp_avg_sq, and has square_avg, which");
  is_refused(adamw, saved<Lion>(LionOptions()), who + "exp_avg_sq; load it into an optimizer of the class");
  is_refused(adamw, saved<torch::optim::Adagrad>(torch::optim::AdagradOptions()),
             who + "exp_avg, exp_avg_sq");
  is_refused(adamw, saved<torch::optim::SGD>(torch::optim::SGDOptions(0.1).momentum(0.9)),
             who + "step, exp_avg");
  is_refused(adamw, saved<LAMB>(LAMBOptions()), "have no amsgrad, and adam needs it");
  std::vector<Tensor> others = parameters();
  LAMB lamb(others);
  is_refused(lamb, saved<torch::optim::AdamW>(torch::optim::AdamWOptions(1e-3)),
             "have amsgrad, and lamb has no");
  SGD sgd(others);
  is_refused(sgd, saved<LARS>(LARSOptions()), "sgd has no such option");
}

TEST(Restore, DamagedStatesAreRefused) {
  using Damage = std::pair<std::function<void(Values&)>, std::string>;
  const std::vector<Damage> damages = {
      {[](Values& s) { drop(s, "exp_avg"); }, "lacks exp_avg"},
      {[](Values& s) { drop(s, "step"); }, "lacks step"},
      {[](Values& s) {
         put(s, "exp_avg", torch::ones({1, 96}));
       },
       "exp_avg is Float of shape [1, 96]"},
      {[](Values& s) {
         put(s, "exp_avg_sq", torch::ones({96, 64}));
       },
       "exp_avg_sq is Float of shape [96, 64]"},
      {[](Values& s) {
         put(s, "exp_avg", torch::ones({64, 96}, torch::kDouble));
       },
       "exp_avg is Double"},
      {[](Values& s) {
         put(s, "exp_avg", torch::ones({64, 96}, torch::kLong));
       },
       "exp_avg is Long"},
      {[](Values& s) { put(s, "exp_avg", torch::ones({5}, torch::kByte)); }, "exp_avg is Byte of shape [5]"},
      {[](Values& s) { put(s, "exp_avg", "text"); }, "exp_avg is no tensor"},
      {[](Values& s) {
         put(s, "ema", torch::ones({64, 96}));
       },
       "has ema, which adam does not keep"},
      {[](Values& s) { put(s, "exp_avg_scale", torch::ones({24})); }, "exp_avg_scale"},
      {[](Values& s) { put(s, "step", std::int64_t{-1}); }, "step is -1"},
      {[](Values& s) { put(s, "step", torch::ones({2})); }, "step is Float of shape [2]"},
      {[](Values& s) {
         put(s, "master", torch::ones({64, 96}));
       },
       "has master weights"},
  };
  std::vector<Tensor> all = parameters();
  AdamW adamw = trained_adamw(all);
  for (const auto& [damage, text] : damages) {
    OptimizerState state = saved<AdamW>(AdamWOptions());
    damage(state_of(state));
    is_refused(adamw, state, text);
  }
  for (const StateFormat format : {StateFormat::kInt8, StateFormat::kInt4, StateFormat::kCompanded8}) {
    const auto options = AdamWOptions().state(format);
    OptimizerState state = saved<AdamW>(options);
    drop(state_of(state), "exp_avg_scale");
    is_refused(adamw, state, "lacks exp_avg_scale");
    put(state_of(state), "exp_avg_scale", torch::ones({3}));
    is_refused(adamw, state, "exp_avg_scale is Float of shape [3]");
  }
  OptimizerState state = saved<AdamW>(AdamWOptions());
  state.states.emplace_back("12345", state_of(state));
  is_refused(adamw, state, "of 1 parameters that are in none of its groups");
}

TEST(Restore, OptionsThatAreLoadedAreChecked) {
  std::vector<Tensor> all = parameters();
  AdamW adamw = trained_adamw(all);
  const std::vector<std::pair<std::pair<std::string, c10::IValue>, std::string>> faults = {
      {{"lr", "0.1"}, "lr is a value of kind String"},
      {{"lr", -1.0}, "lr is -1"},
      {{"eps", std::nan("")}, "eps is nan"},
      {{"betas", std::tuple<double>(0.9)}, "betas are 1 values; give two numbers"},
      {{"betas", 0.9}, "betas are Double"},
      {{"amsgrad", 1.0}, "amsgrad is a value of kind Double"},
      {{"amsgrad", true}, "lacks max_exp_avg_sq"},
      {{"state", std::int64_t{77}}, "state is 77"},
      {{"master", std::int64_t{-1}}, "master is -1"}};
  for (const auto& [option, text] : faults) {
    OptimizerState state = saved<AdamW>(AdamWOptions());
    put(state.groups[0].options, option.first, option.second);
    is_refused(adamw, state, text);
  }
  OptimizerState state = saved<AdamW>(AdamWOptions());
  put(state.groups[0].options, "weight_decay", std::int64_t{1});  // a whole number is a number
  load_optimizer_state(adamw, state);
  EXPECT_EQ(static_cast<const AdamWOptions&>(adamw.param_groups()[0].options()).weight_decay(), 1);
}

template <class Theirs, class Ours, class TheirOptions>
void expect_goes_on(const TheirOptions& options) {
  std::vector<Tensor> straight = parameters();
  Theirs theirs(straight, options);
  run(theirs, straight, 3);
  std::stringstream file;
  torch::save(theirs, file);
  std::vector<Tensor> moved = parameters();
  for (std::size_t i = 0; i < moved.size(); ++i) moved[i].data().copy_(straight[i].data());
  Ours ours(moved);
  torch::load(ours, file);
  run(theirs, straight, 3, 3);
  run(ours, moved, 3, 3);
  for (std::size_t i = 0; i < moved.size(); ++i)
    EXPECT_TRUE(torch::allclose(moved[i], straight[i], 1e-5, 1e-6)) << "parameter " << i;
}

TEST(Restore, EveryClassOfLibTorchsGoesOn) {
  torch::ones(16).sqrt();  // MKL's first call, on one thread (docs/budget.md)
  namespace to = torch::optim;
  expect_goes_on<to::AdamW, AdamW>(to::AdamWOptions(1e-2));
  expect_goes_on<to::Adam, Adam>(to::AdamOptions(1e-2).amsgrad(true));
  expect_goes_on<to::SGD, SGD>(to::SGDOptions(0.1).weight_decay(0.1));
  expect_goes_on<to::SGD, SGD>(to::SGDOptions(0.1).momentum(0.9).nesterov(true));
  expect_goes_on<to::RMSprop, RMSprop>(to::RMSpropOptions(1e-2));
  expect_goes_on<to::RMSprop, RMSprop>(to::RMSpropOptions(1e-2).momentum(0.9).centered(true));
  expect_goes_on<to::Adagrad, Adagrad>(to::AdagradOptions(1e-2).lr_decay(0.1));
}

TEST(Restore, MasterWeightsComeWithTheirParameters) {
  const auto options = AdamWOptions().master(MasterWeights::kFloat32);
  OptimizerState state = saved<AdamW>(options, torch::kBFloat16);
  std::vector<Tensor> wide = parameters();
  AdamW other(wide, options);
  is_refused(other, state, "has master weights");
  std::vector<Tensor> narrow = parameters(torch::kBFloat16);
  AdamW same(narrow);
  load_optimizer_state(same, state);
  drop(state_of(state), "master");
  is_refused(same, state, "lacks master");
  // torch's files know of none: they begin as the parameter is.
  AdamW begun(narrow, options);
  load_optimizer_state(begun, saved<torch::optim::AdamW>(torch::optim::AdamWOptions(1e-3)));
  const auto& kept = static_cast<const ParameterState&>(*begun.state().at(narrow[0].unsafeGetTensorImpl()));
  EXPECT_TRUE(torch::equal(kept.find("master"), narrow[0].to(torch::kFloat)));
}

TEST(Restore, StatesOfOptionsThatAreOffAreKept) {
  OptimizerState state = saved<torch::optim::Adam>(torch::optim::AdamOptions(1e-3).amsgrad(true));
  put(state.groups[0].options, "amsgrad", false);
  std::vector<Tensor> all = parameters();
  Adam adam(all);
  load_optimizer_state(adam, state);
  torch::serialize::OutputArchive archive;
  adam.save_for_torch(archive);
  std::stringstream file;
  archive.save_to(file);
  torch::optim::Adam back(all, torch::optim::AdamOptions(1e-3));
  torch::load(back, file);
  OptimizerState again = optimizer_state(back);
  EXPECT_TRUE(torch::equal(get(state_of(again), "max_exp_avg_sq"), get(state_of(state), "max_exp_avg_sq")));
}

}  // namespace
}  // namespace reef::optim
