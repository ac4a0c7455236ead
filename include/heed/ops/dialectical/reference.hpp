// SPDX-License-Identifier: Apache-2.0
#pragma once

// Reference of dialectical attention: row by row in plain loops, on any scalar, against which summaries.hpp, step.hpp and
// ponder.hpp are tested. Halting decisions are made on plain values and not differentiated.

#include <heed/core/scalar.hpp>
#include <heed/ops/dialectical/parts.hpp>
#include <heed/plug/readout.hpp>
#include <heed/simd/row_norm.hpp>

#include <vector>

namespace heed {
inline namespace HEED_ABI {
namespace detail {

template <class S>
class DialecticalLongHand {
 public:
  DialecticalLongHand(const DialecticalParams<S>& weights, const DialecticalOptions& options,
                      ReadoutContext<S>& context)
      : w_(weights), options_(options), context_(context), d_(context.geometry.dim_v) {}

  void run() {
    const Geometry& g = context_.geometry;
    for_each_row(g.out_shape(), [&](Index b, Index h, Index i) {
      rows_.push_back(first_state(context_.out_row(b, h, i), context_.query_row(b, h, i)));
    });
    for (int t = 0; t < options_.max_steps; ++t) {
      bool any_active = false;
      for (std::size_t r = 0; r < rows_.size(); ++r) {
        Row& row = rows_[r];
        if (row.active || options_.halting == Halting::batch) {
          move(row);
          if (adaptive()) ponder(row, Index(r) / g.len_q % g.heads, t + 1);
          if (outside() && t + 1 < options_.max_steps)
            row.trail.insert(row.trail.end(), row.z.begin(), row.z.end());
        }
        any_active = any_active || row.active;
      }
      if (!any_active) break;
    }
    write();
  }

 private:
  using Real = decltype(math::value_of(S{}));
  using Vector = std::vector<S>;

  struct Row {
    Vector u_pos, u_neg, z;
    S tension;
    bool active = true;
    int steps_used = 0, updates = 0;
    Vector mean = {};                                              // sum_n p_n z_n
    S spent = math::constant<S>(0), steps = math::constant<S>(0);  // sum of h; rho
    Vector trail = {};                                             // z_1, ..., z_(max_steps - 1)
  };

  [[nodiscard]] bool adaptive() const { return options_.halting == Halting::adaptive; }
  [[nodiscard]] bool outside() const { return options_.halting == Halting::outside; }

  [[nodiscard]] Row first_state(const S* mixed, const S* query) const {
    Row row;
    row.z.assign(query, query + d_);
    for (Index c = 0; c < d_; ++c) {
      row.u_pos.push_back(product(w_.v_pos.data() + c * d_, mixed));
      row.u_neg.push_back(product(w_.v_neg.data() + c * d_, mixed));
    }
    const S n_pos = floored_norm(row.u_pos), n_neg = floored_norm(row.u_neg);
    const S cosine = math::dot_product(
        d_, [&](Index c) { return S(row.u_pos[std::size_t(c)] / n_pos); },
        [&](Index c) { return S(row.u_neg[std::size_t(c)] / n_neg); });
    row.tension = math::sigmoid(S(-cosine));
    return row;
  }

  void move(Row& row) const {
    const S gate = math::sigmoid(S(product(w_.gate.data(), row.z.data()) + w_.gate_bias[0]));
    Vector step;
    for (Index c = 0; c < d_; ++c) {
      const S* weight = w_.synth.data() + c * 3 * d_;
      const S a = product(weight, row.u_pos.data()) + product(weight + d_, row.u_neg.data()) +
                  product(weight + 2 * d_, row.z.data()) + w_.synth_bias[c];
      step.push_back(gate * row.tension * a * math::sigmoid(a));
    }
    const Real delta = length(step) / (length(row.z) + Real(1e-6));
    const bool done = delta < Real(options_.small_step());
    for (Index c = 0; c < d_; ++c) row.z[std::size_t(c)] += step[std::size_t(c)];
    row.steps_used += done ? 0 : 1;
    row.updates += 1;
    row.active = row.active && !done;
  }

  // After step n: halts the row, or lets it go on.
  void ponder(Row& row, Index head, int n) const {
    const S h =
        math::sigmoid(S(product(w_.halt.data() + head * d_, row.z.data()) + w_.halt_bias[head]));
    const bool halts =
        n == options_.max_steps || math::value_of(S(row.spent + h)) >= Real(1 - options_.spare_eps);
    const S left = math::constant<S>(1) - row.spent, p = halts ? left : h;
    if (row.mean.empty()) row.mean.assign(row.z.size(), math::constant<S>(0));
    for (std::size_t c = 0; c < row.z.size(); ++c) row.mean[c] += p * row.z[c];
    row.spent += h;
    if (!halts) return;
    row.steps = math::constant<S>(n) + left;
    row.active = false;
  }

  void write() {
    if (adaptive())
      for (Row& row : rows_) {
        row.z = row.mean;
        context_.steps.push_back(row.steps);
      }
    for (const Row& row : rows_)
      context_.steps.insert(context_.steps.end(), row.trail.begin(), row.trail.end());
    for (std::size_t r = 0; r < rows_.size(); ++r) {
      const Row& row = rows_[r];
      for (std::size_t c = 0; c < std::size_t(d_); ++c)
        context_.out[r * std::size_t(d_) + c] = row.z[c];
      if (context_.diagnostics.size() < 3) continue;
      context_.diagnostics[0][r] = row.steps_used;
      context_.diagnostics[1][r] = row.updates;
      context_.diagnostics[2][r] = double(math::value_of(row.tension));
    }
  }

  // a . b over the head width
  [[nodiscard]] S product(const S* a, const S* b) const {
    return math::dot_product(
        d_, [&](Index c) { return a[c]; }, [&](Index c) { return b[c]; });
  }
  // max(|u|, 1e-6)
  [[nodiscard]] S floored_norm(const Vector& u) const {
    const S norm = row_norm<S>(d_, [&](Index c) { return u[std::size_t(c)]; });
    return math::maximum(math::constant<S>(1e-6), norm);
  }
  // |x| of the plain values
  [[nodiscard]] static Real length(const Vector& x) {
    return row_norm<Real>(Index(x.size()),
                          [&](Index c) { return math::value_of(x[std::size_t(c)]); });
  }

  const DialecticalParams<S>& w_;
  const DialecticalOptions& options_;
  ReadoutContext<S>& context_;
  Index d_;
  std::vector<Row> rows_;
};

}  // namespace detail
}  // namespace HEED_ABI
}  // namespace heed
