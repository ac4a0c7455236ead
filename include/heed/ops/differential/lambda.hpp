// SPDX-License-Identifier: Apache-2.0
#pragma once

// Differential attention subtracts lambda times a second softmax from a first (ops/differential.hpp). This file has the
// kinds of lambda, and the ways in which the two maps read heads or halves of heads.
//
//   GivenLambda            lambda                                     one, or one per head
//   ReparameterisedLambda  lambda = exp(lq1.lk1) - exp(lq2.lk2) + lambda_init
//                          dlambda/dlq1 = exp(lq1.lk1) lk1     dlambda/dlk1 = exp(lq1.lk1) lq1
//                          dlambda/dlq2 = -exp(lq2.lk2) lk2    dlambda/dlk2 = -exp(lq2.lk2) lq2
//                          lambda_init = 0.8 - 0.6 exp(-0.3 (depth - 1)), not learnt
//   TokenLambda            lambda_i = sigmoid(x_i)
//                          dlambda_i/dx_i = lambda_i (1 - lambda_i)
//
// Learning keep_in_range() (core/interval.hpp) after a step keeps lq1.lk1 and lq2.lk2 to a third of the largest
//          exponent of the scalar: 29 in float
// Symbols  w width of one map; depth of the layer, from 1; x the op's extra input, one number per
//          query and output head
// Source   GivenLambda: seed note 001. ReparameterisedLambda: Ye et al., Differential Transformer,
//          eq. 2 and Microsoft's code, whose depth counts from 0. TokenLambda: Differential
//          Transformer V2. Differs in: the seed cuts lambda out of the graph, here it is trained
//
// A policy is a struct of parameters that inherits DifferenceOptions and has
//
//   PlaceFree                     itself, if lambda_of() uses `head` only to find a parameter (plug/promises.hpp)
//   static constexpr bool uses_extra
//   parameters, check(), keep_jointly()      its parameters and options, `pairing` included (plug/parameters.hpp);
//                                 a check of its own calls that of DifferenceOptions
//   lambda_of<S>(head, extra)     lambda of a row, or of a pack of rows
//   chain_lambda(head, dlambda, grad)    without uses_extra: adds to the parameters of `grad`
//   lambda_slope<S>(extra)               with uses_extra: dlambda/dextra

#include <heed/core/scalar.hpp>
#include <heed/plug/normaliser.hpp>

#include <cmath>
#include <limits>
#include <type_traits>

namespace heed {
inline namespace HEED_ABI {

// The rows that map 0 and map 1 of output head h read, H = heads. Half-head s is the left (s even) or right (s odd) half of
// head s / 2. Key and value always come from kv head g = h / (H / kv_heads).
enum class HeadPairing {
  // Half-heads 2h and 2h+1 of query and 2g and 2g+1 of key: both halves of head h, of kv head g.
  // The seed's form; Microsoft's V1, whose view (T, 2H, w) has the same order; under GQA its flash
  // code.
  halves,
  // Microsoft's V1 under GQA, naive code: each key half-head is repeated r = H / kv_heads times, so
  // that query half-head s reads key half-head s / r. For even r both maps read the same keys.
  halves_repeated_keys,
  // Query half-heads h and h+H; key halves as in `halves`. Weights of code that splits key and value into half-heads in the
  // same way need the rows of their projections reordered, unless kv_heads = 1.
  halves_apart,
  // V2: query heads 2h and 2h+1 of 2H against the whole of kv head g.
  heads,
  // Query heads h and h+H of 2H against the whole of kv head g.
  heads_apart,
};

struct DifferenceOptions : PlainRows {
  static constexpr int maps = 2;
  HeadPairing pairing = HeadPairing::halves;

  void check(const Geometry& g, const char* where) const {
    require(pairs_whole_heads() || g.dim_qk % 2 == 0, where, ": dim_qk is ", g.dim_qk,
            ", it must be even: both maps read half a head");
  }

  [[nodiscard]] bool pairs_whole_heads() const {
    return pairing == HeadPairing::heads || pairing == HeadPairing::heads_apart;
  }
  // Heads of the query tensor.
  [[nodiscard]] Index query_heads(Index heads) const {
    return pairs_whole_heads() ? 2 * heads : heads;
  }
  // Width of one map, w.
  [[nodiscard]] Index map_width(const Geometry& g) const {
    return pairs_whole_heads() ? g.dim_qk : g.dim_qk / 2;
  }

  [[nodiscard]] Source source(const Geometry& g, Index h, int map) const {
    const Index w = map_width(g), group = g.kv_head(h);
    const auto half_of = [w](Index s) { return (s % 2) * w; };
    const Index consecutive = 2 * h + map, apart = h + map * g.heads;
    switch (pairing) {
      case HeadPairing::halves_repeated_keys:
        return {h, group, half_of(consecutive), half_of(consecutive / g.group()), w};
      case HeadPairing::halves_apart: return {apart / 2, group, half_of(apart), half_of(map), w};
      case HeadPairing::heads: return {consecutive, group, 0, 0, w};
      case HeadPairing::heads_apart: return {apart, group, 0, 0, w};
      case HeadPairing::halves: break;
    }
    return {h, group, half_of(consecutive), half_of(map), w};
  }
};

// Recommended: 0 to 1. At 0 the weights are the softmax of map 0; lambda still has its gradient.
template <class Real>
struct GivenLambda : DifferenceOptions {
  static constexpr bool uses_extra = false;
  using PlaceFree = GivenLambda;

  Param<Real> lambda = Real(0.05);

  static constexpr auto parameters =
      std::tuple{named("lambda", &GivenLambda::lambda), option("pairing", &GivenLambda::pairing)};

  template <class S>
  [[nodiscard]] S lambda_of(Index head, const S&) const {
    return S(lambda.head(head));
  }
  void chain_lambda(Index head, double dlambda, GivenLambda& grad) const {
    grad.lambda.head(head) += Real(dlambda);
  }
};

// lambda_init of a layer: 0.2 at depth 1, towards 0.8 with depth.
[[nodiscard]] inline double lambda_init_at(Index depth) {
  require(depth >= 1, "lambda_init_at: depth is ", depth, ", it must be at least 1");
  return 0.8 - 0.6 * std::exp(-0.3 * double(depth - 1));
}

struct ReparameterisedOptions : DifferenceOptions {
  double lambda_init = lambda_init_at(1);
};

// Four vectors of w numbers, shared by all heads. Where all are 0, lambda = lambda_init and their
// gradients are 0 as well: training starts from small random numbers (the source: deviation 0.1).
template <class Real>
struct ReparameterisedLambda : ReparameterisedOptions {
  static constexpr bool uses_extra = false;
  using PlaceFree = ReparameterisedLambda;
  using Wide = std::conditional_t<std::is_same_v<Real, float>, double, Real>;

  Param<Real> lambda_q1, lambda_k1, lambda_q2, lambda_k2;

  // One number per column of a map.
  [[nodiscard]] std::vector<Index> vector_shape(const Geometry& g) const { return {map_width(g)}; }

  static constexpr auto parameters = std::tuple{
      tensor("lambda_q1", &ReparameterisedLambda::lambda_q1, &ReparameterisedLambda::vector_shape),
      tensor("lambda_k1", &ReparameterisedLambda::lambda_k1, &ReparameterisedLambda::vector_shape),
      tensor("lambda_q2", &ReparameterisedLambda::lambda_q2, &ReparameterisedLambda::vector_shape),
      tensor("lambda_k2", &ReparameterisedLambda::lambda_k2, &ReparameterisedLambda::vector_shape),
      option("lambda_init", &ReparameterisedLambda::lambda_init),
      option("pairing", &ReparameterisedLambda::pairing)};

  // Shrinks two vectors whose exponent lq.lk passes a third of the largest that the scalar bears:
  // lambda stays finite, with room for products with it.
  void keep_jointly() {
    keep_exponent(lambda_q1, lambda_k1);
    keep_exponent(lambda_q2, lambda_k2);
  }
  void check(const Geometry& g, const char* where) const {
    DifferenceOptions::check(g, where);
    require_within(double(math::value_of(lambda_of(0, Real(0)))), {}, where, "lambda");
  }
  template <class S>
  [[nodiscard]] S lambda_of(Index, const S&) const {
    return S(Real(exp_dot(lambda_q1, lambda_k1) - exp_dot(lambda_q2, lambda_k2) +
                  math::constant<Wide>(lambda_init)));
  }
  void chain_lambda(Index, double dlambda, ReparameterisedLambda& grad) const {
    chain_exp_dot(lambda_q1, lambda_k1, dlambda, grad.lambda_q1, grad.lambda_k1);
    chain_exp_dot(lambda_q2, lambda_k2, -dlambda, grad.lambda_q2, grad.lambda_k2);
  }

 private:
  [[nodiscard]] static Wide exp_dot(const Param<Real>& a, const Param<Real>& b) {
    return math::exp(math::dot_product(
        a.size(), [&](Index c) { return Wide(a[c]); }, [&](Index c) { return Wide(b[c]); }));
  }
  static void keep_exponent(Param<Real>& a, Param<Real>& b) {
    const double largest = std::log(double(std::numeric_limits<Real>::max())) / 3;
    double exponent = 0;
    for (Index c = 0; c < a.size(); ++c) exponent += double(a[c]) * double(b[c]);
    if (!(exponent > largest) || !std::isfinite(exponent)) return;
    // Slightly smaller, so that rounding of the vectors does not raise the exponent above the limit again.
    const double shrink = std::sqrt(largest / exponent) * (1 - 1e-6);
    for (Param<Real>* vector : {&a, &b})
      for (Index c = 0; c < vector->size(); ++c) (*vector)[c] = Real(double((*vector)[c]) * shrink);
  }
  static void chain_exp_dot(const Param<Real>& a, const Param<Real>& b, double g, Param<Real>& da,
                            Param<Real>& db) {
    const double outer = g * exp_dot(a, b);
    for (Index c = 0; c < a.size(); ++c) {
      da[c] += Real(outer * double(b[c]));
      db[c] += Real(outer * double(a[c]));
    }
  }
};

struct TokenLambdaOptions : DifferenceOptions {
  TokenLambdaOptions() { pairing = HeadPairing::heads; }
};

// A lambda for every query and output head, from the op's extra input.
template <class Real>
struct TokenLambda : TokenLambdaOptions {
  static constexpr bool uses_extra = true;
  using PlaceFree = TokenLambda;

  static constexpr auto parameters = std::tuple{option("pairing", &TokenLambda::pairing)};

  template <class S>
  [[nodiscard]] S lambda_of(Index, const S& extra) const {
    return math::sigmoid(extra);
  }
  template <class S>
  [[nodiscard]] S lambda_slope(const S& extra) const {
    return math::sigmoid_slope(extra);
  }
};

}  // namespace HEED_ABI
}  // namespace heed
