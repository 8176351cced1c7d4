#include <ATen/SequenceNumber.h>
#include <ATen/core/grad_mode.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/ones.h>
#include <c10/core/InferenceMode.h>
#include <c10/core/impl/VirtualGuardImpl.h>
#include <torch/csrc/autograd/engine.h>
#include <torch/csrc/autograd/function.h>
#include <torch/csrc/autograd/functions/accumulate_grad.h>

#include <algorithm>
#include <chrono>
#include <memory>
#include <numeric>
#include <optional>
#include <unordered_map>
#include <unordered_set>
#include <utility>

#include "chain/terms.h"
#include "checkpoint/captured.h"
#include "checkpoint/tape.h"
#include "checkpoint/writes_undone.h"
#include "compat.h"
#include "reef/chain.h"
#include "reef/error.h"
#include "reef/ledger.h"
#include "surroundings.h"

namespace reef {
namespace {

namespace ta = torch::autograd;
using at::Tensor;
using Pass = std::function<void()>;

void wait_for(c10::Device device) {
  if (device.is_cpu()) return;
  const c10::impl::VirtualGuardImpl on(device.type());
  on.synchronizeStream(on.getStream(device));
}

/// Where backward begins: makes the gradient of a stage's output, and then says so.
struct GradientSource final : ta::Node {
  GradientSource(ta::Edge output, std::vector<std::int64_t> output_sizes, at::TensorOptions output_options,
                 Pass is_made)
      : Node(ta::edge_list{std::move(output)}),
        sizes(std::move(output_sizes)),
        options(output_options),
        made(std::move(is_made)) {}

  ta::variable_list apply(ta::variable_list&&) override {
    Tensor gradient = at::ones(sizes, options);
    made();
    return {std::move(gradient)};
  }

  std::vector<std::int64_t> sizes;
  at::TensorOptions options;
  Pass made;
};

/// What backward makes for a parameter, and whether that has no gradient to which it would be added.
struct NewGradient {
  std::uint64_t bytes;
  bool is_first;
};
using NewGradients = std::unordered_map<const c10::TensorImpl*, NewGradient>;

/// A stage's backward pass. Its gradients go nowhere, so no hook of a parameter runs.
class Backward {
 public:
  /// `began`: at::sequence_number::peek() before forward; what is older is not the stage's.
  Backward(const Tensor& output, const Tensor& input, std::uint64_t began)
      : sizes_(output.sizes().vec()), options_(output.options().requires_grad(false)) {
    if (!output.requires_grad()) return;
    from_ = ta::impl::gradient_edge(output);
    std::unordered_set<ta::Node*> seen;
    std::vector<ta::Node*> open{from_.function.get()};
    while (!open.empty()) {
      ta::Node* const node = open.back();
      open.pop_back();
      if (!seen.insert(node).second) continue;
      for (const ta::Edge& edge : node->next_edges()) {
        if (!edge.is_valid()) continue;
        const auto* leaf = dynamic_cast<const ta::AccumulateGrad*>(edge.function.get());
        if (leaf == nullptr && edge.function->sequence_nr() >= began) {
          open.push_back(edge.function.get());
        } else if (std::find(to_.begin(), to_.end(), edge) == to_.end()) {
          to_.push_back(edge);
          const bool is_parameter = leaf != nullptr && !leaf->variable.is_same(input);
          parameters_.push_back(is_parameter ? leaf->variable : Tensor());
        }
      }
    }
  }

  /// Gives the gradients that it makes for parameters. `begins` is called when
  /// the gradient of the output is there.
  NewGradients run(const Pass& begins) {
    if (to_.empty()) return {};
    const Tensor none = at::empty({0}, options_);
    auto source = compat::make_node<GradientSource, decltype(ta::Edge::function)>(std::exchange(from_, {}),
                                                                                  sizes_, options_, begins);
    source->add_input_metadata(none);
    const ta::variable_list gradients =
        ta::Engine::get_default_engine().execute({ta::Edge(source, 0)}, {none}, /*keep_graph=*/false,
                                                 /*create_graph=*/false, /*accumulate_grad=*/false, to_);
    NewGradients bytes;
    for (std::size_t i = 0; i < gradients.size(); ++i) {
      const Tensor& parameter = parameters_[i];
      if (!parameter.defined() || !gradients[i].defined()) continue;
      bytes[parameter.unsafeGetTensorImpl()] = {gradients[i].nbytes(), !parameter.grad().defined()};
    }
    return bytes;
  }

 private:
  std::vector<std::int64_t> sizes_;
  at::TensorOptions options_;
  ta::Edge from_;
  ta::edge_list to_;
  std::vector<Tensor> parameters_;  ///< of each of these, to which it belongs, if one
};

/// One stage, on one input.
class StageMeasurement {
 public:
  StageMeasurement(const Chain& chain, std::size_t stage, const Tensor& input, int repeats)
      : chain_(chain), stage_(stage), input_(input), device_(input.device()) {
    profile_.name = chain.name(stage);
    const SurroundingsScope as_before(surroundings_);
    const WritesUndone undone;
    const at::AutoGradMode grad_mode(true);
    std::vector<double> forward, retape, backward;
    for (int repeat = -1; repeat < repeats; ++repeat) {
      const Seconds seconds = time();
      if (repeat < 0) continue;
      forward.push_back(seconds.forward);
      retape.push_back(seconds.retape);
      backward.push_back(seconds.backward);
    }
    profile_.forward_seconds = median(forward);
    profile_.retape_seconds = std::min(median(retape), profile_.forward_seconds);
    profile_.backward_seconds = median(backward);
    count();
  }

  const StageProfile& profile() const { return profile_; }
  const Tensor& output() const { return output_; }
  const NewGradients& gradients() const { return gradients_; }
  std::uint64_t state_bytes() const { return state_bytes_; }

 private:
  struct Seconds {
    double forward = 0, retape = 0, backward = 0;
  };

  double seconds_of(const Pass& pass) const {
    wait_for(device_);
    const auto begin = std::chrono::steady_clock::now();
    pass();
    wait_for(device_);
    return std::chrono::duration<double>(std::chrono::steady_clock::now() - begin).count();
  }

  // And how far the middle half of them is apart.
  double median(std::vector<double>& seconds) {
    std::sort(seconds.begin(), seconds.end());
    const std::size_t last = seconds.size() - 1;
    const double middle = seconds[seconds.size() / 2];
    if (middle > 0)
      profile_.spread = std::max(profile_.spread, (seconds[last - last / 4] - seconds[last / 4]) / middle);
    return middle;
  }

  Tensor input() const { return input_.detach().requires_grad_(input_.requires_grad()); }
  Tensor run(const Tensor& input) const {
    Tensor output = chain_.run(stage_, input);
    if (output.defined()) return output;
    throw ConfigError("profile_chain: stage " + std::to_string(stage_ + 1) + " (" + chain_.name(stage_) +
                      ") gives an undefined tensor; a stage gives what the next one reads");
  }
  static std::shared_ptr<Tape> new_tape() {
    auto tape = std::make_shared<Tape>("profile_chain", /*checks_values=*/false);
    tape->set_wanted([] {});
    return tape;
  }
  Tensor taped(const std::shared_ptr<Tape>& tape, const Tensor& input) const {
    const SavedTensorScope scope(Tape::recording(tape, Tape::Keep::kTensors));
    return run(input);
  }

  Seconds time() {
    Seconds seconds;
    const Tensor from = input();
    const auto tape = new_tape();
    const std::uint64_t began = at::sequence_number::peek();
    Tensor output;
    seconds.forward = seconds_of([&] { output = taped(tape, from); });
    Backward backward(output, from, began);
    output.reset();
    std::chrono::steady_clock::time_point begin = std::chrono::steady_clock::now();
    backward.run([&] {
      wait_for(device_);
      begin = std::chrono::steady_clock::now();
    });
    wait_for(device_);
    seconds.backward = std::chrono::duration<double>(std::chrono::steady_clock::now() - begin).count();
    seconds.retape = seconds_of([&] { tape->retake([&] { run(input()); }, Tape::Stop::kOnceWhole); });
    return seconds;
  }

  void count() {
    Ledger ledger;
    std::int64_t before = 0;
    const auto begin = [&] {
      ledger.reset_peak();
      before = ledger.live(device_).total();
    };
    const auto more = [&] {
      return static_cast<std::uint64_t>(std::max<std::int64_t>(0, ledger.live(device_).total() - before));
    };
    const auto peak = [&] {
      return static_cast<std::uint64_t>(
          std::max<std::int64_t>(0, ledger.peak(device_).bytes.total() - before));
    };

    const Tensor from = input();
    begin();
    {
      Captured captured;
      {
        const auto tape = new_tape();
        const SavedTensorScope scope(Tape::recording(tape, Tape::Keep::kNothing));
        const Captured::FirstRun finding(captured, Captured::FirstRun::For::kMeasurement);
        Tensor output = run(from);
        output_ = output.detach().requires_grad_(output.requires_grad());
      }
      state_bytes_ = captured.bytes();
    }
    profile_.output_bytes = more();
    profile_.forward_bytes = peak();

    const auto tape = new_tape();
    const std::uint64_t began = at::sequence_number::peek();
    Captured captured;
    begin();
    Tensor output;
    {
      const Captured::FirstRun finding(captured, Captured::FirstRun::For::kMeasurement);
      output = taped(tape, from);
    }
    profile_.taped_bytes = peak();
    const auto holds = [&](const Tensor& tensor) {
      return tensor.has_storage() && tape->references(*tensor.storage().unsafeGetStorageImpl()) > 0;
    };
    profile_.tape_has_input = holds(from);
    profile_.tape_has_output = profile_.output_bytes > 0 && holds(output);
    Backward backward(output, from, began);
    output.reset();
    profile_.tape_bytes = more() - std::min(more(), captured.bytes());
    begin();
    gradients_ = backward.run(begin);
    for (const auto& [parameter, gradient] : gradients_) {
      if (gradient.is_first) profile_.gradient_bytes += gradient.bytes;
    }
    profile_.backward_bytes = peak();

    begin();
    {
      const WritesUndone undone;
      const Captured::SecondRun finding(captured, "profile_chain: " + profile_.name);
      tape->retake([&] { run(input()); }, Tape::Stop::kOnceWhole);
    }
    profile_.retape_bytes = peak();
    settle();
  }

  // Inside a budget memory leaves while it is being counted.
  void settle() {
    if (profile_.tape_has_output) raise(profile_.tape_bytes, profile_.output_bytes);
    raise(profile_.forward_bytes, profile_.output_bytes);
    raise(profile_.retape_bytes, profile_.tape_bytes);
    raise(profile_.taped_bytes, kept_bytes(profile_));
    const std::uint64_t left = input_.nbytes() + profile_.gradient_bytes;
    const std::uint64_t gone = profile_.tape_bytes + profile_.output_bytes;
    raise(profile_.backward_bytes, left - std::min(left, gone));
  }
  static void raise(std::uint64_t& bytes, std::uint64_t least) { bytes = std::max(bytes, least); }

  const Chain& chain_;
  std::size_t stage_;
  Tensor input_;
  c10::Device device_;
  Surroundings surroundings_{devices_of({input_})};
  StageProfile profile_;
  NewGradients gradients_;
  std::uint64_t state_bytes_ = 0;
  Tensor output_;
};

// What stages share gets its gradient when the last of them has gone backward: autograd holds what they have
// made so far from the first one on, also where there is a gradient to which it is added then.
void count_once(ChainProfile& profile, const std::vector<NewGradients>& gradients) {
  std::unordered_map<const c10::TensorImpl*, int> stages_of;
  for (const NewGradients& of_stage : gradients) {
    for (const auto& [parameter, gradient] : of_stage) ++stages_of[parameter];
  }
  std::unordered_set<const c10::TensorImpl*> there;
  for (std::size_t stage = profile.stages.size(); stage-- > 0;) {
    for (const auto& [parameter, gradient] : gradients[stage]) {
      if (stages_of[parameter] == 1) continue;
      std::uint64_t& bytes = profile.stages[stage].gradient_bytes;
      if (gradient.is_first) bytes -= gradient.bytes;
      if (there.insert(parameter).second) bytes += gradient.bytes;
    }
  }
}

/// Whether the stage writes into its input, or its output is a part of it.
struct Sharing {
  bool writes, gives;
};
Sharing sharing_of(const Chain& chain, std::size_t stage, const Tensor& input) {
  const Surroundings surroundings(devices_of({input}));
  const SurroundingsScope as_before(surroundings);
  const WritesUndone undone;
  const at::NoGradGuard no_grad;
  const Tensor given = stage == 0 ? input.clone() : input.detach();
  const auto version = given._version();
  const Tensor output = chain.run(stage, given);
  return {given._version() != version, output.defined() && output.is_alias_of(given)};
}

}  // namespace

ChainProfile profile_chain(Chain& chain, const Tensor& input, const ChainProfileOptions& options) {
  if (chain.size() == 0) throw ConfigError("profile_chain: a chain without a stage; add() one");
  if (c10::InferenceMode::is_enabled())
    throw ConfigError("profile_chain: in inference mode there is no backward; leave it");
  if (options.repeats < 1)
    throw ConfigError("profile_chain: " + std::to_string(options.repeats) +
                      " repeats measure nothing; give 3, say");
  chain.check_current();
  ChainProfile profile;
  std::vector<Tensor> inputs{
      input.detach().requires_grad_(input.requires_grad())};  // of this stage, and the one before
  std::vector<NewGradients> gradients;                        // of each stage
  std::vector<std::uint64_t> state_bytes;
  for (std::size_t stage = 0; stage < chain.size();) {
    const Sharing sharing = sharing_of(chain, stage, inputs.back());
    if (stage == 0 && sharing.writes) {
      throw ConfigError("profile_chain: stage 1 (" + chain.name(0) +
                        ") writes into the chain's input, which it needs again; give it a copy");
    }
    if (stage > 0 && (sharing.writes || sharing.gives)) {
      chain.join(stage--);
      inputs.pop_back();
      profile.stages.pop_back();
      gradients.pop_back();
      state_bytes.pop_back();
      continue;
    }
    StageMeasurement measured(chain, stage, inputs.back(), options.repeats);
    profile.stages.push_back(measured.profile());
    gradients.push_back(measured.gradients());
    state_bytes.push_back(measured.state_bytes());
    inputs.push_back(measured.output());
    if (inputs.size() > 2) inputs.erase(inputs.begin());
    ++stage;
  }
  count_once(profile, gradients);
  profile.state_bytes = std::accumulate(state_bytes.begin(), state_bytes.end(), std::uint64_t{0});
  check(profile);
  return profile;
}

}  // namespace reef
