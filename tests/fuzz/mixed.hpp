// SPDX-License-Identifier: Apache-2.0
#pragma once

// The allowed error of a case in Precision::mixed: the bounds of check/mixed_bounds.hpp in plain loops.

#include <heed/check/mixed_bounds.hpp>

#include "fuzz/case.hpp"

#include <array>
#include <utility>
#include <vector>

namespace fuzz::detail {

// The bounds of dQ, dK, dV and of the bias' gradient of plain attention, without a soft cap.
class MixedGradientBounds {
 public:
  std::array<std::vector<double>, 5> bounds;  // as in Results::inputs; empty for extra

  // score_error: one per row.
  MixedGradientBounds(const Case& c, const std::vector<double>& score_error)
      : c_(c), score_error_(score_error) {
    const Plain<double>& p = c.plain;
    const std::size_t sizes[] = {p.query.size(), p.key.size(), p.value.size(), 0,
                                 p.bias.numbers.size()};
    for (std::size_t t = 0; t < bounds.size(); ++t) bounds[t].assign(sizes[t], 0);
    for (Index b = 0; b < p.sizes.batch; ++b)
      for (Index h = 0; h < p.sizes.heads; ++h)
        for (Index i = 0; i < p.sizes.len_q; ++i) add_row(b, h, i);
  }

 private:
  struct Seen {
    Index key;
    double weight, left;  // before dropout, and dropout's factor
    double a = 0;         // sum_c |v dO|, times `left`
  };

  void add_row(Index b, Index h, Index i) {
    const Plain<double>& p = c_.plain;
    const Sizes& s = p.sizes;
    const Index kv = s.kv_of(h), row = s.row(b, h, i);
    std::vector<Seen> seen = weights_of(b, h, i);
    const double* dout = c_.grad_out.data() + row * s.dim_v;
    double own = 0;  // B
    for (Seen& pair : seen) {
      for (Index x = 0; x < s.dim_v; ++x)
        pair.a += pair.left * std::abs(p.v(b, kv, pair.key)[x] * dout[x]);
      own += pair.weight * pair.a;
    }
    const double e = score_error_[std::size_t(row)];
    for (const Seen& pair : seen) {
      const double size = pair.weight * (pair.a + own);
      const double chained = heed::mixed_gradient_error(e) * std::abs(p.scale) * size;
      const Index key = ((b * s.kv_heads + kv) * s.len_kv + pair.key);
      for (Index x = 0; x < s.dim_qk; ++x) {
        bounds[0][std::size_t(row * s.dim_qk + x)] += chained * std::abs(p.k(b, kv, pair.key)[x]);
        bounds[1][std::size_t(key * s.dim_qk + x)] += chained * std::abs(p.q(b, h, i)[x]);
      }
      for (Index x = 0; x < s.dim_v; ++x)
        bounds[2][std::size_t(key * s.dim_v + x)] +=
            heed::mixed_out_error(e) * pair.weight * pair.left * std::abs(dout[x]);
      if (p.bias.given())
        bounds[4][p.bias.at(b, h, i, pair.key)] += heed::mixed_dscore_error(e) * size;
    }
  }

  [[nodiscard]] std::vector<Seen> weights_of(Index b, Index h, Index i) const {
    const Plain<double>& p = c_.plain;
    const Sizes& s = p.sizes;
    const Index shift = p.mask.slopes_shift(s);
    std::vector<double> scores;
    std::vector<Seen> seen;
    for (Index j = 0; j < s.len_kv; ++j) {
      if (!p.sees(b, h, i, j)) continue;
      double score = p.scale * dot(p.q(b, h, i), p.k(b, s.kv_of(h), j), s.dim_qk);
      if (!p.mask.slopes.empty())
        score -= p.mask.slopes[std::size_t(h)] * std::abs(double(i + shift - j));
      if (p.bias.given()) score += p.bias.numbers[p.bias.at(b, h, i, j)];
      scores.push_back(score);
      const bool dropped =
          !p.kept.empty() && p.kept[std::size_t(s.row(b, h, i) * s.len_kv + j)] == 0;
      seen.push_back({j, 0, dropped ? 0 : p.keep_factor});
    }
    const std::vector<double> weights = softmax(scores);
    for (std::size_t n = 0; n < seen.size(); ++n) seen[n].weight = weights[n];
    return seen;
  }

  const Case& c_;
  const std::vector<double>& score_error_;
};

}  // namespace fuzz::detail
