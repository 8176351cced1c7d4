#pragma once

#include <cfloat>

#include "kernels/lane.h"
#include "kernels/optim_step.h"

/// What one step does to one parameter, written once: `L` are the lanes of a processor (lanes_*.h) or a CUDA
/// thread. `s` holds the parameter's states, which the rule replaces by the new ones. A rule that divides by
/// a root is in two halves, so that a processor can work on one half for some lanes while it divides for
/// others: begin() makes the new states and returns the root; end() computes the new parameter from the old
/// one, the gradient, the first new state and the root. A rule whose kCouples is true is given the gradient
/// with the decay already in it (coupled() below). StepsAs names the rule whose step is the same, so that its
/// loops are compiled once. Roundings come in the order of torch's fused CPU kernels
/// where there is one (2.11 and 2.15 agree; found by comparing bits), else in that of its single-tensor loop:
/// fma(a, b, c) stands where theirs contracts.
namespace reef::kernels {

/// The gradient with weight decay added to it, as Adam, SGD, RMSprop and Adagrad have it when `coupled_decay`
/// is not 0. (Where it is 0 the gradient must stay as it is: -0 + 0 would be +0.)
template <class L>
REEF_LANE typename L::Floats coupled(typename L::Floats p, typename L::Floats g, float coupled_decay) {
  return fma(p, L::all(coupled_decay), g);
}

/// What a root is divided by before eps is added to it.
template <class L, bool kAsTorch>
struct Correction {
  using F = typename L::Floats;
  REEF_LANE explicit Correction(const OptimConstants& c)
      : by(L::all(c.correction)), inverse(L::all(1 / c.correction)), eps(L::all(c.eps)) {}
  REEF_LANE F of(F root) const {
    if constexpr (!kAsTorch) return fma(root, inverse, eps);
    // Divides as the division rounds (Markstein 1990), without the processor's divider. For square roots:
    // nothing here can be as small as to lose bits.
    const F quotient = root * inverse;
    const F rest = min(fnma(quotient, by, root), L::all(FLT_MAX));  // of infinity: not NaN
    return fma(rest, inverse, quotient) + eps;
  }
  F by, inverse, eps;
};

/// A moving average, from the end that it is nearer to: so torch interpolates.
template <class L>
struct Average {
  using F = typename L::Floats;
  REEF_LANE explicit Average(const OptimConstants& c)
      : keeps(c.gain1 < 0.5F), weight(L::all(keeps ? c.gain1 : c.gain1 - 1)) {}
  REEF_LANE F of(F average, F g) const { return fma(weight, g - average, keeps ? average : g); }
  bool keeps;
  F weight;
};

/// Kingma and Ba 2015 with the gradient decayed, Loshchilov and Hutter 2019 with the parameter decayed; with
/// the third state, Reddi et al. 2018.
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

/// You et al. 2017: momentum over gradients scaled by a trust ratio.
template <class L>
struct Lars : Momentum<L> {
  using F = typename L::Floats;
  using StepsAs = Momentum<L>;
  using Momentum<L>::Momentum;
  REEF_LANE F measured(F, F g, F*) const { return g; }
};

/// Chen et al. 2023, algorithm 2.
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

/// Hinton 2012; centred as Graves 2013. The mean's square can exceed the mean square by rounding (in few
/// bits: by more): their difference is kept from falling below 0.
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

/// Duchi et al. 2011.
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

/// You et al. 2020, algorithm 2, with the identity for their phi.
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

  /// The update before its trust ratio.
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

/// Calls `each.operator()<Rule>(rule)` with every rule there is.
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

/// Whether roundings are torch's: states of fewer bits have no step of torch's to agree with.
constexpr bool rounds_as_torch(OptimFormat format) { return format == OptimFormat::kFloat32; }

}  // namespace reef::kernels
