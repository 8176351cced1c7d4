#pragma once

#include <cfloat>

#include "kernels/lane.h"
#include "kernels/optim_step.h"

/// What one step does to one parameter, written once for all lanes `L`: those of a processor (lanes_*.h) or a
/// CUDA thread. `s` holds the parameter's states, which the rule replaces by the new ones. A rule that
/// divides by a root is split into two halves, so that a processor can work on one half for some lanes while
/// it divides for others: begin() computes the new states and returns the root; end() computes the new
/// parameter from the old one, the gradient, the first new state and the root. A rule whose kCouples is true
/// gets the gradient with the decay already added (coupled() below). StepsAs names the rule whose step is the
/// same, so that its loops are compiled only once.
///
/// Roundings have the order of torch's fused CPU kernel if there is one (2.11 and 2.15 agree, as a comparison
/// of bits showed), and otherwise of torch's single-tensor loop; fma(a, b, c) is used where theirs contracts.
namespace reef::kernels {

/// Returns the gradient with weight decay added to it, for Adam, SGD, RMSprop and Adagrad. Must not be called
/// if `coupled_decay` is 0, because a gradient of -0 would become +0.
template <class L>
REEF_LANE typename L::Floats coupled(typename L::Floats p, typename L::Floats g, float coupled_decay) {
  return fma(p, L::all(coupled_decay), g);
}

/// Divides a root by the bias correction, and adds eps.
template <class L, bool kAsTorch>
struct Correction {
  using F = typename L::Floats;
  REEF_LANE explicit Correction(const OptimConstants& c)
      : by(L::all(c.correction)), inverse(L::all(1 / c.correction)), eps(L::all(c.eps)) {}
  REEF_LANE F of(F root) const {
    if constexpr (!kAsTorch) return fma(root, inverse, eps);
    // Gives the correctly rounded quotient without the processor's divider (Markstein 1990). This is exact
    // for square roots, because no intermediate result is small enough to lose bits.
    const F quotient = root * inverse;
    const F rest = min(fnma(quotient, by, root), L::all(FLT_MAX));  // An infinite root must not give NaN.
    return fma(rest, inverse, quotient) + eps;
  }
  F by, inverse, eps;
};

/// A moving average that is computed like torch's lerp: from the nearer of the average and the gradient.
template <class L>
struct Average {
  using F = typename L::Floats;
  REEF_LANE explicit Average(const OptimConstants& c)
      : keeps(c.gain1 < 0.5F), weight(L::all(keeps ? c.gain1 : c.gain1 - 1)) {}
  REEF_LANE F of(F average, F g) const { return fma(weight, g - average, keeps ? average : g); }
  bool keeps;
  F weight;
};

/// Adam: Kingma and Ba 2015 with coupled decay, Loshchilov and Hutter 2019 (AdamW) with decoupled decay, and
/// with the maximum of second moments Reddi et al. 2018 (AMSGrad).
template <class L, bool kMaximum, bool kAsTorch>
struct Adam {
  using F = typename L::Floats;
  using StepsAs = Adam;
  static constexpr int kStates = kMaximum ? 3 : 2;
  static constexpr bool kCouples = true;
  REEF_LANE static constexpr bool is_signed(int state) { return state == 0; }

  REEF_LANE explicit Adam(const OptimConstants& c)
      : kept(L::all(c.kept)),
        average(c),
        decay2(L::all(c.decay2)),
        gain2(L::all(c.gain2)),
        correction(c),
        rate(L::all(c.rate)) {}

  REEF_LANE F begin(F g, F* s) const {
    s[0] = average.of(s[0], g);
    s[1] = fma(gain2 * g, g, s[1] * decay2);
    F second = s[1];
    if constexpr (kMaximum) second = s[2] = max(s[2], s[1]);
    return sqrt(second);
  }
  REEF_LANE F end(F p, F, F first, F root) const { return p * kept + rate * first / correction.of(root); }

  F kept;
  Average<L> average;
  F decay2, gain2;
  Correction<L, kAsTorch> correction;
  F rate;
};

template <class L>
struct Sgd {
  using F = typename L::Floats;
  using StepsAs = Sgd;
  static constexpr int kStates = 0;
  static constexpr bool kCouples = true;
  REEF_LANE static constexpr bool is_signed(int) { return true; }

  REEF_LANE explicit Sgd(const OptimConstants& c) : rate(L::all(c.rate)) {}

  REEF_LANE void step(F& p, F g, F*) const { p = fma(g, rate, p); }

  F rate;
};

template <class L>
struct Momentum {
  using F = typename L::Floats;
  using StepsAs = Momentum;
  static constexpr int kStates = 1;
  static constexpr bool kCouples = true;
  REEF_LANE static constexpr bool is_signed(int) { return true; }

  REEF_LANE explicit Momentum(const OptimConstants& c)
      : first(c.first),
        nesterov(c.nesterov),
        trust(L::all(c.trust)),
        decay1(L::all(c.decay1)),
        gain1(L::all(c.gain1)),
        rate(L::all(c.rate)) {}

  REEF_LANE void step(F& p, F g, F* s) const {
    g = trust * g;
    s[0] = first ? g : fma(g, gain1, s[0] * decay1);
    p = fma(nesterov ? fma(s[0], decay1, g) : s[0], rate, p);
  }

  bool first, nesterov;
  F trust, decay1, gain1, rate;
};

/// LARS (You et al. 2017): momentum of gradients that are scaled by a trust ratio.
template <class L>
struct Lars : Momentum<L> {
  using F = typename L::Floats;
  using StepsAs = Momentum<L>;
  using Momentum<L>::Momentum;
  REEF_LANE F measured(F, F g, F*) const { return g; }
};

/// Lion (Chen et al. 2023, algorithm 2).
template <class L>
struct Lion {
  using F = typename L::Floats;
  using StepsAs = Lion;
  static constexpr int kStates = 1;
  static constexpr bool kCouples = false;
  REEF_LANE static constexpr bool is_signed(int) { return true; }

  REEF_LANE explicit Lion(const OptimConstants& c)
      : kept(L::all(c.kept)),
        decay1(L::all(c.decay1)),
        gain1(L::all(c.gain1)),
        decay2(L::all(c.decay2)),
        gain2(L::all(c.gain2)),
        rate(L::all(c.rate)) {}

  REEF_LANE void step(F& p, F g, F* s) const {
    const F zero = L::all(0.0F);
    const F direction = fma(g, gain1, s[0] * decay1);
    const F sign = select(abs(direction) > zero, copysign(L::all(1.0F), direction), zero);
    p = fma(sign, rate, p * kept);
    s[0] = fma(g, gain2, s[0] * decay2);
  }

  F kept, decay1, gain1, decay2, gain2, rate;
};

/// RMSprop (Hinton 2012), and its centred variant (Graves 2013). Rounding can make the square of the mean
/// exceed the mean square, above all if states have few bits, so their difference is clamped at 0.
template <class L, bool kCentered, bool kMomentum>
struct Rmsprop {
  using F = typename L::Floats;
  using StepsAs = Rmsprop;
  static constexpr int kStates = 1 + kCentered + kMomentum;
  static constexpr bool kCouples = true;
  REEF_LANE static constexpr bool is_signed(int state) { return state > 0; }

  REEF_LANE explicit Rmsprop(const OptimConstants& c)
      : decay1(L::all(c.decay1)),
        decay2(L::all(c.decay2)),
        gain2(L::all(c.gain2)),
        eps(L::all(c.eps)),
        rate(L::all(c.rate)) {}

  REEF_LANE void step(F& p, F g, F* s) const {
    s[0] = fma(gain2 * g, g, s[0] * decay2);
    F mean_square = s[0];
    if constexpr (kCentered) {
      s[1] = fma(gain2, g - s[1], s[1]);
      mean_square = max(fnma(s[1], s[1], mean_square), L::all(0.0F));
    }
    const F root = sqrt(mean_square) + eps;
    if constexpr (kMomentum) {
      F& momentum = s[kStates - 1];
      momentum = momentum * decay1 + g / root;
      p = fma(momentum, rate, p);
    } else {
      p = p + rate * g / root;
    }
  }

  F decay1, decay2, gain2, eps, rate;
};

/// Adagrad (Duchi et al. 2011).
template <class L>
struct Adagrad {
  using F = typename L::Floats;
  using StepsAs = Adagrad;
  static constexpr int kStates = 1;
  static constexpr bool kCouples = true;
  REEF_LANE static constexpr bool is_signed(int) { return false; }

  REEF_LANE explicit Adagrad(const OptimConstants& c) : eps(L::all(c.eps)), rate(L::all(c.rate)) {}

  REEF_LANE F begin(F g, F* s) const {
    s[0] = fma(g, g, s[0]);
    return sqrt(s[0]);
  }
  REEF_LANE F end(F p, F g, F, F root) const { return p + rate * g / (root + eps); }

  F eps, rate;
};

/// LAMB (You et al. 2020, algorithm 2, where phi is the identity).
template <class L>
struct Lamb {
  using F = typename L::Floats;
  using StepsAs = Lamb;
  static constexpr int kStates = 2;
  static constexpr bool kCouples = false;
  REEF_LANE static constexpr bool is_signed(int state) { return state == 0; }

  REEF_LANE explicit Lamb(const OptimConstants& c)
      : decoupled_decay(L::all(c.decoupled_decay)),
        gain1(L::all(c.gain1)),
        decay2(L::all(c.decay2)),
        gain2(L::all(c.gain2)),
        inverse1(L::all(1 / c.correction1)),
        correction(c),
        rate(L::all(c.rate * c.trust)) {}

  /// Computes the new states and returns the update without its trust ratio.
  REEF_LANE F measured(F p, F g, F* s) const {
    s[0] = fma(gain1, g - s[0], s[0]);
    s[1] = fma(gain2 * g, g, s[1] * decay2);
    return fma(p, decoupled_decay, s[0] * inverse1 / correction.of(sqrt(s[1])));
  }

  REEF_LANE void step(F& p, F g, F* s) const { p = fma(measured(p, g, s), rate, p); }

  F decoupled_decay, gain1, decay2, gain2, inverse1;
  Correction<L, false> correction;
  F rate;
};

/// Calls `each.operator()<Rule>(rule)` for every rule.
template <class L, bool kAsTorch, class Each>
void for_every_rule(const Each& each) {
  each.template operator()<Adam<L, false, kAsTorch>>(OptimRule::kAdam);
  each.template operator()<Adam<L, true, kAsTorch>>(OptimRule::kAdamMaximum);
  each.template operator()<Sgd<L>>(OptimRule::kSgd);
  each.template operator()<Momentum<L>>(OptimRule::kMomentum);
  each.template operator()<Lion<L>>(OptimRule::kLion);
  each.template operator()<Rmsprop<L, false, false>>(OptimRule::kRmsprop);
  each.template operator()<Rmsprop<L, false, true>>(OptimRule::kRmspropMomentum);
  each.template operator()<Rmsprop<L, true, false>>(OptimRule::kRmspropCentered);
  each.template operator()<Rmsprop<L, true, true>>(OptimRule::kRmspropCenteredMomentum);
  each.template operator()<Adagrad<L>>(OptimRule::kAdagrad);
  each.template operator()<Lamb<L>>(OptimRule::kLamb);
  each.template operator()<Lars<L>>(OptimRule::kLars);
}

template <class Rule>
constexpr bool has_unsigned() {
  for (int state = 0; state < Rule::kStates; ++state) {
    if (!Rule::is_signed(state)) return true;
  }
  return false;
}

/// Whether a step must round exactly like torch's. Torch has no step with states of fewer bits than float32.
constexpr bool rounds_as_torch(OptimFormat format) { return format == OptimFormat::kFloat32; }

}  // namespace reef::kernels
