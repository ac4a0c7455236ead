// SPDX-License-Identifier: Apache-2.0
#pragma once

// Sums over numbers of tokens (engine/token_inputs.hpp) in forward over backward. With y_t = sum over s <= t of term(x_s), and
// G_t the sum over s >= t of the gradients of the y_s that rows of keys and of queries read:
//
//   dx_t  = term'(x_t) G_t
//   dx._t = term'(x_t) G._t + term''(x_t) x._t G_t          term'' by dual numbers of dual numbers
//
// Memory  four numbers per token, head and input; nothing for scores that sum nothing.

#include <heed/engine/hvps.hpp>
#include <heed/engine/token_inputs.hpp>

#include <vector>

namespace heed {
inline namespace HEED_ABI {
namespace detail {

// Where gradients of what rows of queries and keys read of tokens go.
template <class Real>
struct InputGradients {
  TensorView<Real> query = {}, key = {};
};

template <class Real>
class SummedInputProducts {
 public:
  // sums: those of the call. tangent: that of the numbers which are summed, if they move.
  SummedInputProducts(const ScoreHvps<Real>& hvps, const SummedInputs<Real>& sums,
                      const TensorView<const Real>& tangent)
      : hvps_(hvps), sums_(sums), tangent_(tangent) {}
  SummedInputProducts(const SummedInputProducts&) = delete;  // views refer to its memory

  // `to_query` and `to_key`, where the caller wants the products, become those of what rows read. Returns where the gradients
  // themselves go that chain() needs; nowhere for scores that sum nothing.
  [[nodiscard]] InputGradients<Real> take(TensorView<Real>& to_query, TensorView<Real>& to_key) {
    if (!sums_.sums() || !to_key.given()) return {};
    to_ = to_key;
    for (auto* numbers : {&of_keys_, &of_queries_, &of_keys_tangent_, &of_queries_tangent_})
      numbers->resize(sums_.numbers());
    to_key = {of_keys_tangent_.data(), sums_.shape()};
    to_query = sums_.of_queries(of_queries_tangent_.data());
    return {sums_.of_queries(of_queries_.data()), {of_keys_.data(), sums_.shape()}};
  }
  // After the call.
  void chain() const {
    if (!to_.given()) return;
    sums_.for_each_column([&](Index b, Index h, Index c, auto&) {
      double sum = 0, sum_tangent = 0;
      for (Index t = to_.shape().len - 1; t >= 0; --t) {
        const std::size_t at = sums_.at(b, h, t, c);
        sum += double(of_keys_[at]) + double(of_queries_[at]);
        sum_tangent += double(of_keys_tangent_[at]) + double(of_queries_tangent_[at]);
        // An input that no pair read has gradient 0, even if it is NaN.
        const bool read = sum != 0 || sum_tangent != 0;
        to_.row(b, h, t)[c] = read ? product(b, h, t, c, sum, sum_tangent) : Real(0);
      }
    });
  }

 private:
  [[nodiscard]] Real product(Index b, Index h, Index t, Index c, double sum,
                             double sum_tangent) const {
    const DualNumber x(double(sums_.terms().row(b, h, t)[c]),
                       {tangent_.given() ? double(tangent_.row(b, h, t)[c]) : 0.0});
    const DualNumber slope = hvps_.slope(x);
    return Real(slope.value * sum_tangent + slope.grad[0] * sum);
  }

  const ScoreHvps<Real>& hvps_;
  const SummedInputs<Real>& sums_;
  TensorView<const Real> tangent_;
  TensorView<Real> to_;
  std::vector<Real> of_keys_, of_queries_, of_keys_tangent_, of_queries_tangent_;
};

}  // namespace detail
}  // namespace HEED_ABI
}  // namespace heed
