// SPDX-License-Identifier: Apache-2.0
#pragma once

// Adam with decoupled weight decay. In step t, for each weight p with gradient g:
//
//   p *= 1 - lr wd
//   m = b1 m + (1 - b1) g        v = b2 v + (1 - b2) g^2
//   p -= lr / (1 - b1^t)  m / (sqrt(v / (1 - b2^t)) + eps)
//
// Then the layer's keep_in_range(), if it has one, brings weights that have left their range back into it.
//
// Symbols   lr learning_rate, wd weight_decay, b1 beta1, b2 beta2, eps epsilon.
// Errors    std::invalid_argument, before anything is changed, for an option out of range and for a weight that is
//           visited twice or has another size than its state or its gradient. step() does not check
//           that numbers are finite; step_if_finite() takes the whole step or none of it.
// Source    Loshchilov and Hutter 2019, algorithm 2, as in PyTorch: the decay is multiplied by lr.

#include <heed/core/parallel.hpp>
#include <heed/nn/context.hpp>
#include <heed/nn/weight.hpp>
#include <heed/simd/instructions.hpp>

#include <algorithm>
#include <cmath>
#include <limits>
#include <map>
#include <set>
#include <utility>

namespace heed {
inline namespace HEED_ABI {
namespace nn {

struct AdamWOptions {
  double learning_rate = 1e-3;  // >= 0
  double beta1 = 0.9;           // in [0, 1)
  double beta2 = 0.999;         // in [0, 1)
  double epsilon = 1e-8;        // > 0
  double weight_decay = 0.01;   // >= 0
};

namespace detail {

// The factors of one step, the same for all weights.
template <class Real>
struct AdamWStep {
  Pack<Real> beta1, rest1, beta2, rest2, correction2, epsilon, rate;

  AdamWStep(const AdamWOptions& o, Index t)
      : beta1(Real(o.beta1)),
        rest1(Real(1 - o.beta1)),
        beta2(Real(o.beta2)),
        rest2(Real(1 - o.beta2)),
        correction2(Real(1 / (1 - std::pow(o.beta2, double(t))))),
        epsilon(Real(o.epsilon)),
        rate(Real(o.learning_rate / (1 - std::pow(o.beta1, double(t))))) {}

  // A vector of weights and their moments after the step.
  struct After {
    Pack<Real> value, first, second;
  };
  // decay is lr wd. It is subtracted together with the change, since rounding 1 - lr wd would lose its digits.
  [[nodiscard]] After after(Pack<Real> decay, const Real* p, const Real* g, const Real* m,
                            const Real* v) const {
    const Pack<Real> slope = Pack<Real>::load(g), value = Pack<Real>::load(p);
    const Pack<Real> first = mul_add(beta1, Pack<Real>::load(m), rest1 * slope);
    const Pack<Real> second = mul_add(beta2, Pack<Real>::load(v), rest2 * slope * slope);
    const Pack<Real> change = rate * first / (square_root(second * correction2) + epsilon);
    return {value - mul_add(decay, value, change), first, second};
  }
  void update(Pack<Real> decay, Real* p, const Real* g, Real* m, Real* v) const {
    const After next = after(decay, p, g, m, v);
    next.value.store(p);
    next.first.store(m);
    next.second.store(v);
  }
  // 0 in each lane, or NaN where a number would not be finite after the step: x - x is NaN for such numbers only.
  [[nodiscard]] Pack<Real> fault(Pack<Real> decay, const Real* p, const Real* g, const Real* m,
                                 const Real* v) const {
    const After next = after(decay, p, g, m, v);
    return (next.value - next.value) + (next.first - next.first) + (next.second - next.second);
  }
};

}  // namespace detail

template <class Real>
class AdamW {
 public:
  using Decays = std::function<bool(const std::string&, const Param<Real>&)>;
  using StateVisitor =
      std::function<void(const std::string&, std::vector<Real>& first, std::vector<Real>& second)>;

  AdamWOptions options;  // may change between steps
  Decays decays;         // says which weights decay; if empty, all do

  explicit AdamW(const AdamWOptions& chosen = {}, Decays which = {})
      : options(chosen), decays(std::move(which)) {
    require_options("AdamW");
  }

  // One step for every weight of `layer`: an object with visit(Visitor<Real>), or a function that
  // takes a Visitor<Real> and calls it.
  template <class Layer>
  void step(Context<Real>& c, Layer&& layer) {
    take(all_of(c, layer, "AdamW::step"), layer);
  }
  // Takes the step and returns true, or changes nothing and returns false where a weight or a moment would not be finite
  // after it. It reads all numbers once more than step() does, which takes little time beside a backward pass.
  template <class Layer>
  [[nodiscard]] bool step_if_finite(Context<Real>& c, Layer&& layer) {
    const Step all = all_of(c, layer, "AdamW::step_if_finite");
    std::vector<char> finite(all.pieces.size());
    all.for_each_piece(
        [&](std::size_t i) { finite[i] = stays_finite(all.numbers, all.pieces[i]); });
    if (std::ranges::count(finite, 0) > 0) return false;
    take(all, layer);
    return true;
  }

  // Steps so far, t.
  [[nodiscard]] Index steps() const { return steps_; }

  // For reading a checkpoint: prepare() makes the state of all weights of `layer`, zeros where it
  // is new; visit_state() gives access to fill it; set_steps() sets t.
  template <class Layer>
  void prepare(Layer&& layer) {
    (void)collect(layer, "AdamW::prepare");
  }
  // m and v of every weight, in alphabetical order of the names.
  void visit_state(const StateVisitor& f) {
    for (auto& [name, moments] : state_) f(name, moments.first, moments.second);
  }
  void set_steps(Index steps) {
    require(steps >= 0, "AdamW::set_steps: steps is ", steps, ", it must be at least 0");
    steps_ = steps;
  }

 private:
  static constexpr Index kGrain = 65536;  // fewer elements are not worth another worker

  struct Moments {
    std::vector<Real> first, second;
  };
  // A part of a weight that one worker updates.
  struct Piece {
    Real* p;
    const Real* g;
    Real *m, *v;
    Index count;
    Real decay;
  };
  // All numbers that one step needs.
  struct Step {
    std::vector<Piece> pieces;
    detail::AdamWStep<Real> numbers;
    int workers;

    template <class F>
    void for_each_piece(F&& f) const {
      parallel_for(Index(pieces.size()), workers, [&](Index i) { f(std::size_t(i)); });
    }
  };

  template <class Layer>
  [[nodiscard]] Step all_of(const Context<Real>& c, Layer& layer, const char* where) {
    require_options(where);
    std::vector<Piece> pieces = collect(layer, where);
    Index elements = 0;
    for (const Piece& piece : pieces) elements += piece.count;
    const int workers = int(std::min<Index>(resolve_threads(c.threads), 1 + elements / kGrain));
    return {std::move(pieces), detail::AdamWStep<Real>(options, steps_ + 1), workers};
  }
  template <class Layer>
  void take(const Step& all, Layer& layer) {
    all.for_each_piece([&](std::size_t i) { update(all.numbers, all.pieces[i]); });
    nn::keep_in_range(layer);
    ++steps_;
  }

  void require_options(const char* where) const {
    constexpr double top = std::numeric_limits<double>::max();
    const auto within = [&](double value, bool inside, const char* name, const char* range) {
      require(inside, where, ": ", name, " is ", value, ", it must be ", range);
    };
    const AdamWOptions& o = options;
    within(o.learning_rate, o.learning_rate >= 0 && o.learning_rate <= top, "learning_rate",
           "at least 0 and finite");
    within(o.beta1, o.beta1 >= 0 && o.beta1 < 1, "beta1", "in [0, 1)");
    within(o.beta2, o.beta2 >= 0 && o.beta2 < 1, "beta2", "in [0, 1)");
    within(o.epsilon, Real(o.epsilon) > 0 && o.epsilon <= top, "epsilon", "positive and finite");
    within(o.weight_decay, o.weight_decay >= 0 && o.weight_decay <= top, "weight_decay",
           "at least 0 and finite");
  }

  // Divides all weights into pieces. State that is missing is made after all checks have passed.
  template <class Layer>
  [[nodiscard]] std::vector<Piece> collect(Layer& layer, const char* where) {
    std::vector<std::pair<std::string, Piece>> weights;
    std::set<std::string> seen;
    show(layer, [&](const std::string& name, Param<Real>& value, Param<Real>& grad) {
      require(seen.insert(name).second, where, ": ", name, " is visited twice");
      require_sizes(name, value, grad, where);
      const bool decaying = !decays || decays(name, std::as_const(value));
      const Real decay = decaying ? Real(options.learning_rate * options.weight_decay) : Real(0);
      weights.push_back({name, {value.data(), grad.data(), nullptr, nullptr, value.size(), decay}});
    });
    std::vector<Piece> pieces;
    for (const auto& [name, whole] : weights) {
      auto found = state_.find(name);
      if (found == state_.end()) {  // both moments or, if there is no memory, no entry
        const std::vector<Real> zeros(std::size_t(whole.count));
        found = state_.emplace(name, Moments{zeros, zeros}).first;
      }
      Moments& moments = found->second;
      for (Index at = 0; at < whole.count; at += kGrain)
        pieces.push_back({whole.p + at, whole.g + at, moments.first.data() + at,
                          moments.second.data() + at, std::min(kGrain, whole.count - at),
                          whole.decay});
    }
    return pieces;
  }
  template <class Layer>
  static void show(Layer& layer, const Visitor<Real>& f) {
    if constexpr (requires { layer.visit(f); })
      layer.visit(f);
    else
      layer(f);
  }
  void require_sizes(const std::string& name, const Param<Real>& value, const Param<Real>& grad,
                     const char* where) const {
    require(grad.size() == value.size(), where, ": ", name, " has ", value.size(),
            " values, its gradient has ", grad.size());
    const auto found = state_.find(name);
    if (found == state_.end()) return;
    for (const std::vector<Real>* moment : {&found->second.first, &found->second.second})
      require(Index(moment->size()) == value.size(), where, ": ", name, " has ", value.size(),
              " values, its state has ", moment->size());
  }

  // Calls f(p, g, m, v) for the last numbers of a piece, fewer than a pack has, with zeros behind them.
  template <class F>
  static void with_rest(const Piece& piece, F&& f) {
    constexpr Index W = kLanes<Real>;
    const Index rest = piece.count % W, done = piece.count - rest;
    if (rest == 0) return;
    Real lanes[4][std::size_t(W)] = {};
    std::copy_n(piece.p + done, rest, lanes[0]);
    std::copy_n(piece.g + done, rest, lanes[1]);
    std::copy_n(piece.m + done, rest, lanes[2]);
    std::copy_n(piece.v + done, rest, lanes[3]);
    f(lanes[0], lanes[1], lanes[2], lanes[3]);
    std::copy_n(lanes[0], rest, piece.p + done);
    std::copy_n(lanes[2], rest, piece.m + done);
    std::copy_n(lanes[3], rest, piece.v + done);
  }
  static void update(const detail::AdamWStep<Real>& numbers, const Piece& piece) {
    constexpr Index W = kLanes<Real>;
    const Pack<Real> decay = piece.decay;
    for (Index i = 0; i + W <= piece.count; i += W)
      numbers.update(decay, piece.p + i, piece.g + i, piece.m + i, piece.v + i);
    with_rest(piece,
              [&](Real* p, Real* g, Real* m, Real* v) { numbers.update(decay, p, g, m, v); });
  }
  [[nodiscard]] static bool stays_finite(const detail::AdamWStep<Real>& numbers,
                                         const Piece& piece) {
    constexpr Index W = kLanes<Real>;
    const Pack<Real> decay = piece.decay;
    Pack<Real> faults = Real(0);
    for (Index i = 0; i + W <= piece.count; i += W)
      faults += numbers.fault(decay, piece.p + i, piece.g + i, piece.m + i, piece.v + i);
    with_rest(piece, [&](Real* p, Real* g, Real* m, Real* v) {
      faults += numbers.fault(decay, p, g, m, v);
    });
    return sum_lanes(faults) == Real(0);
  }

  std::map<std::string, Moments> state_;
  Index steps_ = 0;
};

}  // namespace nn
}  // namespace HEED_ABI
}  // namespace heed
