#pragma once

#include <ATen/core/Tensor.h>
#include <ATen/core/ivalue.h>
#include <torch/optim/optimizer.h>

#include <cstddef>
#include <cstdint>
#include <memory>
#include <optional>
#include <string>
#include <tuple>
#include <utility>
#include <vector>

#include "reef/collectives.h"
#include "reef/export.h"
#include "reef/state_tensors.h"

/// Optimizers in LibTorch's idiom: swap `torch::optim::AdamW` for `reef::optim::AdamW`. One fused pass over
/// memory for each step, whatever the rule; states in 32, 16, 8 or 4 bits. The same operators serve Python.
namespace reef::optim {

/// How states are kept. Bytes are those of Adam's two states, for each element.
enum class StateFormat : std::uint8_t {
  kFloat32,     ///< 8 bytes; the step is torch's fused one, bit for bit where there is one
  kBFloat16,    ///< 4; rounded stochastically
  kInt8,        ///< 2.03; a dynamic map (2110.02861), a float32 scale for each 256
  kInt4,        ///< 1.06; a dynamic map, and a linear one without zero (2309.01507), a scale for each 128
  kCompanded8,  ///< 2.13; companded (2602.23349), a bfloat16 scale for each 32
  kInt8Compensated,        ///< 3.03; as kInt8, and four bits a code of what its rounding lost
  kInt4Compensated,        ///< 2.06
  kCompanded8Compensated,  ///< 3.13
  kInt4Rank1,              ///< as kInt4; second moments of matrices have a scale for each row and each column
};

/// By the name that Python gives it: "float32", "bfloat16", "int8", "int4", "companded8", and
/// "int8_compensated" and so on, "int4_rank1". Throws ConfigError.
REEF_API StateFormat state_format(const std::string& name);

/// What parameters of 16 bits keep of what their rounding loses.
enum class MasterWeights : std::uint8_t {
  kNone,        ///< nothing: rounded to the nearest, as torch does
  kFloat32,     ///< a float32 copy
  kSplit,       ///< a byte: 24 bits in all
  kStochastic,  ///< nothing, but rounded so that the mean is right; alike on every rank and in every run
};

/// Options by key. Which were set is kept: a parameter group inherits the others from the optimizer.
class REEF_API OptionsBase : public torch::optim::OptimizerOptions {
 public:
  double get_lr() const override { return get("lr").toDouble(); }
  void set_lr(double lr) override { set("lr", lr); }
  /// Writes every option under its key.
  void serialize(torch::serialize::OutputArchive& archive) const override;
  /// Reads those that are there: a file of torch::optim has not all.
  void serialize(torch::serialize::InputArchive& archive) override;

  bool has(const std::string& key) const;
  /// Throws ConfigError for a key that is none.
  const c10::IValue& get(const std::string& key) const;
  void set(const std::string& key, c10::IValue value);
  /// What has not been set is as in `defaults`.
  void inherit(const OptionsBase& defaults);

 protected:
  void add(std::string key, c10::IValue value);

 private:
  struct Option {
    std::string key;
    c10::IValue value;
    bool set = false;
  };
  Option* find(const std::string& key);
  std::vector<Option> options_;
};

// NOLINTBEGIN(bugprone-macro-parentheses): a type is no expression
#define REEF_OPTIM_OPTION(Type, name, as) \
  auto& name(const Type& value) {         \
    this->set(#name, value);              \
    return this->self();                  \
  }                                       \
  Type name() const { return this->get(#name).as; }
// NOLINTEND(bugprone-macro-parentheses)

/// What every rule has.
template <class Derived>
class Options : public OptionsBase {
 public:
  explicit Options(double lr, double weight_decay) {
    add("lr", lr);
    add("weight_decay", weight_decay);
    add("maximize", false);
    add("state", std::int64_t{0});
    add("master", std::int64_t{0});
    add("min_quantized_numel", std::int64_t{4096});
  }
  std::unique_ptr<torch::optim::OptimizerOptions> clone() const override {
    return std::make_unique<Derived>(static_cast<const Derived&>(*this));
  }

  REEF_OPTIM_OPTION(double, lr, toDouble())
  REEF_OPTIM_OPTION(double, weight_decay, toDouble())
  REEF_OPTIM_OPTION(bool, maximize, toBool())
  /// Tensors of fewer elements keep float32 states.
  REEF_OPTIM_OPTION(std::int64_t, min_quantized_numel, toInt())

  Derived& state(StateFormat format) {
    set("state", static_cast<std::int64_t>(format));
    return self();
  }
  StateFormat state() const { return static_cast<StateFormat>(get("state").toInt()); }
  Derived& master(MasterWeights master) {
    set("master", static_cast<std::int64_t>(master));
    return self();
  }
  MasterWeights master() const { return static_cast<MasterWeights>(get("master").toInt()); }

 protected:
  Derived& self() { return static_cast<Derived&>(*this); }
};

using Betas = std::tuple<double, double>;

/// Of Adam and AdamW.
template <class Derived>
struct AdamFamilyOptions : Options<Derived> {
  static constexpr const char* kRule = "adam";
  AdamFamilyOptions(double lr, double weight_decay) : Options<Derived>(lr, weight_decay) {
    this->add("betas", Betas(0.9, 0.999));
    this->add("eps", 1e-8);
    this->add("amsgrad", false);
  }
  REEF_OPTIM_OPTION(Betas, betas, template to<Betas>())
  REEF_OPTIM_OPTION(double, eps, toDouble())
  REEF_OPTIM_OPTION(bool, amsgrad, toBool())
};

/// Kingma and Ba 2015, the gradient decayed; amsgrad: Reddi et al. 2018.
struct AdamOptions : AdamFamilyOptions<AdamOptions> {
  static constexpr bool kDecoupled = false;
  AdamOptions() : AdamFamilyOptions(1e-3, 0) {}
  // A rate that is given is the group's own, whatever the optimizer has.
  AdamOptions(double rate) : AdamOptions() { lr(rate); }  // NOLINT(google-explicit-constructor): as torch's
};

/// Loshchilov and Hutter 2019: the parameter decayed.
struct AdamWOptions : AdamFamilyOptions<AdamWOptions> {
  static constexpr bool kDecoupled = true;
  AdamWOptions() : AdamFamilyOptions(1e-3, 1e-2) {}
  AdamWOptions(double rate) : AdamWOptions() { lr(rate); }  // NOLINT(google-explicit-constructor)
};

/// Tang et al. 2021 (2102.02888), the parameter decayed. For parameters() of a Shard with
/// Compression::kOneBitAdam and the same beta1. In its warm-up this is AdamW. From then on `.grad` is the
/// momentum m, the second moment v stays as it is, and w = (1 - lr weight_decay) w - lr m / (sqrt(v) + eps)
/// without bias corrections; an element whose v is 0 then is not stepped by m any longer. States are float32,
/// and there is no amsgrad. Throws ConfigError for other parameters, as other optimizers do for these.
struct OneBitAdamOptions : AdamFamilyOptions<OneBitAdamOptions> {
  static constexpr const char* kRule = "one_bit_adam";
  static constexpr bool kDecoupled = true;
  OneBitAdamOptions() : AdamFamilyOptions(1e-3, 0) {}
  OneBitAdamOptions(double rate) : OneBitAdamOptions() { lr(rate); }  // NOLINT(google-explicit-constructor)
};

struct SGDOptions : Options<SGDOptions> {
  static constexpr const char* kRule = "sgd";
  static constexpr bool kDecoupled = false;
  SGDOptions() : Options(1e-3, 0) {
    add("momentum", 0.0);
    add("dampening", 0.0);
    add("nesterov", false);
  }
  SGDOptions(double rate) : SGDOptions() { lr(rate); }  // NOLINT(google-explicit-constructor)
  REEF_OPTIM_OPTION(double, momentum, toDouble())
  REEF_OPTIM_OPTION(double, dampening, toDouble())
  REEF_OPTIM_OPTION(bool, nesterov, toBool())
};

/// Chen et al. 2023.
struct LionOptions : Options<LionOptions> {
  static constexpr const char* kRule = "lion";
  static constexpr bool kDecoupled = true;
  LionOptions() : Options(1e-4, 0) { add("betas", Betas(0.9, 0.99)); }
  LionOptions(double rate) : LionOptions() { lr(rate); }  // NOLINT(google-explicit-constructor)
  REEF_OPTIM_OPTION(Betas, betas, to<Betas>())
};

/// Hinton 2012; centered: Graves 2013.
struct RMSpropOptions : Options<RMSpropOptions> {
  static constexpr const char* kRule = "rmsprop";
  static constexpr bool kDecoupled = false;
  RMSpropOptions() : Options(1e-2, 0) {
    add("alpha", 0.99);
    add("eps", 1e-8);
    add("momentum", 0.0);
    add("centered", false);
  }
  RMSpropOptions(double rate) : RMSpropOptions() { lr(rate); }  // NOLINT(google-explicit-constructor)
  REEF_OPTIM_OPTION(double, alpha, toDouble())
  REEF_OPTIM_OPTION(double, eps, toDouble())
  REEF_OPTIM_OPTION(double, momentum, toDouble())
  REEF_OPTIM_OPTION(bool, centered, toBool())
};

/// Duchi et al. 2011.
struct AdagradOptions : Options<AdagradOptions> {
  static constexpr const char* kRule = "adagrad";
  static constexpr bool kDecoupled = false;
  AdagradOptions() : Options(1e-2, 0) {
    add("lr_decay", 0.0);
    add("initial_accumulator_value", 0.0);
    add("eps", 1e-10);
  }
  AdagradOptions(double rate) : AdagradOptions() { lr(rate); }  // NOLINT(google-explicit-constructor)
  REEF_OPTIM_OPTION(double, lr_decay, toDouble())
  REEF_OPTIM_OPTION(double, initial_accumulator_value, toDouble())
  REEF_OPTIM_OPTION(double, eps, toDouble())
};

/// You et al. 2020, algorithm 2.
struct LAMBOptions : Options<LAMBOptions> {
  static constexpr const char* kRule = "lamb";
  static constexpr bool kDecoupled = false;
  LAMBOptions() : Options(1e-3, 0) {
    add("betas", Betas(0.9, 0.999));
    add("eps", 1e-6);
  }
  LAMBOptions(double rate) : LAMBOptions() { lr(rate); }  // NOLINT(google-explicit-constructor)
  REEF_OPTIM_OPTION(Betas, betas, to<Betas>())
  REEF_OPTIM_OPTION(double, eps, toDouble())
};

/// You et al. 2017.
struct LARSOptions : Options<LARSOptions> {
  static constexpr const char* kRule = "lars";
  static constexpr bool kDecoupled = false;
  LARSOptions() : Options(1e-1, 0) {
    add("momentum", 0.9);
    add("dampening", 0.0);
    add("nesterov", false);
    add("trust_coefficient", 1e-3);
    add("eps", 1e-8);
  }
  LARSOptions(double rate) : LARSOptions() { lr(rate); }  // NOLINT(google-explicit-constructor)
  REEF_OPTIM_OPTION(double, momentum, toDouble())
  REEF_OPTIM_OPTION(double, dampening, toDouble())
  REEF_OPTIM_OPTION(bool, nesterov, toBool())
  REEF_OPTIM_OPTION(double, trust_coefficient, toDouble())
  REEF_OPTIM_OPTION(double, eps, toDouble())
};
#undef REEF_OPTIM_OPTION

/// The states of one parameter, by torch's names; those of few bits have a scale beside them ("exp_avg",
/// "exp_avg_scale"), and there may be "master".
struct REEF_API ParameterState : torch::optim::OptimizerParamState, StateTensors {
  std::unique_ptr<torch::optim::OptimizerParamState> clone() const override {
    return std::make_unique<ParameterState>(*this);
  }
  void serialize(torch::serialize::OutputArchive& archive) const override;
  void serialize(torch::serialize::InputArchive& archive) override;
  /// An undefined tensor if there is none.
  at::Tensor& operator[](const std::string& name);
  at::Tensor find(const std::string& name) const;
  std::vector<at::Tensor> state_tensors() const override;

  at::Tensor step;  ///< float32, one element: steps taken
  std::vector<std::pair<std::string, at::Tensor>> tensors;

  /// Whose it is, and how it is kept: a step of anything else is refused.
  struct Layout {
    std::vector<std::int64_t> sizes;
    std::vector<std::int64_t> strides;
    c10::ScalarType dtype;
    c10::Device device;
    std::string format;
    MasterWeights master;
    bool operator==(const Layout&) const = default;
  };
  std::optional<Layout> layout;  ///< none: not looked at since the program made the state
};

class GradientRelease;
class NormSums;

/// What all rules share. Parameters are float32, bfloat16 or float16 and dense; gradients too.
class REEF_API Optimizer : public torch::optim::Optimizer {
 public:
  /// One step of every parameter that has a gradient. Throws ConfigError where that cannot be, before
  /// anything is changed, and NonFiniteGradient, when all have been stepped: blocks of 256 elements whose
  /// gradient is not finite stay as they were. Under a Budget each parameter is an operator of its own.
  at::Tensor step(LossClosure closure = nullptr) override;

  /// LAMB and LARS, for parts of parameters (Shard::parameters()): norms are added up over the ranks of
  /// `group`, so that a step is, bit for bit, that of the whole parameters, for any number of ranks and at
  /// every stage. All ranks call this alike, and step() from then on; a rank sends 1 KiB for each parameter
  /// to each other one. Parts are on the CPU. Throws ConfigError for other rules and without a group, and
  /// RankFailed. Without it, a step of parts is refused, as is GradientRelease.
  void norms_over(const ProcessGroupPtr& group);

  /// The group inherits what its options do not set.
  void add_param_group(const torch::optim::OptimizerParamGroup& group);

  /// torch::optim's file format. What is loaded is bit for bit what was saved, in its formats; a file of the
  /// torch::optim class of the same rule is put into this one's. Throws ConfigError, and changes nothing, for
  /// one of another rule, of other shapes, or that lacks what a step needs.
  void save(torch::serialize::OutputArchive& archive) const override;
  void load(torch::serialize::InputArchive& archive) override;
  /// For the torch::optim class of the same rule: states in float32.
  void save_for_torch(torch::serialize::OutputArchive& archive) const;

 protected:
  Optimizer(const std::vector<torch::optim::OptimizerParamGroup>& groups,
            std::unique_ptr<OptionsBase> defaults, const char* rule, bool decoupled);

 private:
  void write(torch::serialize::OutputArchive& archive, bool for_torch) const;
  std::vector<double> numbers(const OptionsBase& options) const;
  std::unique_ptr<ParameterState> begun(const OptionsBase& options, const at::Tensor& parameter) const;
  void begin(const OptionsBase& options, const at::Tensor& parameter, const std::string& name, bool is_signed,
             ParameterState& state) const;
  ParameterState::Layout layout_of(const OptionsBase& options, const at::Tensor& parameter) const;
  void check_parameters(std::size_t group) const;
  void check_group(std::size_t group) const;
  void check_these(std::size_t group, const std::vector<std::size_t>& indices) const;

  friend class GradientRelease;
  /// Parameters of a group on one device, and how many elements of each one's gradient were not finite,
  /// there.
  struct Stepped {
    std::size_t group;
    std::vector<std::size_t> indices;
    at::Tensor nonfinite;
  };
  /// `squares`: of the wholes of parts; undefined: there are no parts.
  Stepped step_these(std::size_t group, std::vector<std::size_t> indices, const at::Tensor& squares = {});
  struct Operands;
  Operands operands_of(std::size_t group, const std::vector<std::size_t>& indices) const;
  using Slices = std::vector<std::pair<std::size_t, std::vector<std::size_t>>>;
  /// Of each slice.
  std::vector<at::Tensor> squares_over_ranks(const Slices& slices) const;
  void report(const std::vector<Stepped>& all) const;

  std::string rule_;
  bool decoupled_;
  GradientRelease* release_ = nullptr;
  std::shared_ptr<NormSums> norms_;
};

/// A rule's optimizer, made as torch::optim's are: of parameters, or of groups with options of their own.
template <class RuleOptions>
class Rule : public Optimizer {
 public:
  explicit Rule(const std::vector<torch::optim::OptimizerParamGroup>& groups, RuleOptions defaults = {})
      : Optimizer(groups, std::make_unique<RuleOptions>(std::move(defaults)), RuleOptions::kRule,
                  RuleOptions::kDecoupled) {}
  explicit Rule(std::vector<at::Tensor> parameters, RuleOptions defaults = {})
      : Rule(std::vector<torch::optim::OptimizerParamGroup>{torch::optim::OptimizerParamGroup(
                 std::move(parameters))},
             std::move(defaults)) {}
};

using Adam = Rule<AdamOptions>;
using AdamW = Rule<AdamWOptions>;
using OneBitAdam = Rule<OneBitAdamOptions>;
using SGD = Rule<SGDOptions>;
using Lion = Rule<LionOptions>;
using RMSprop = Rule<RMSpropOptions>;
using Adagrad = Rule<AdagradOptions>;
using LAMB = Rule<LAMBOptions>;
using LARS = Rule<LARSOptions>;

}  // namespace reef::optim
