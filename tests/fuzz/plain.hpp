// SPDX-License-Identifier: Apache-2.0
#pragma once

// Attention in plain loops, from the formulas at the head of heed/mask/mask.hpp and of the ops,
// using only the integer type of heed:
//
//   for each batch b, head h, query i:
//     seen    the keys j that every part of the mask shows
//     score   of each map and each seen key:  formula's score - slope |p - j| + bias
//     weight  by the formula from the row's scores, then after dropout
//     mixed   sum of weight v_j;  out = formula's readout of it
//
// S is double, or Dual for the derivative along one direction. Hidden keys are never read.

#include <heed/core/config.hpp>

#include "fuzz/dual.hpp"

#include <algorithm>
#include <cmath>
#include <limits>
#include <vector>

namespace fuzz {

using heed::Index;
using std::exp;
using std::log;
using std::sqrt;
using std::tanh;

inline constexpr double kInf = std::numeric_limits<double>::infinity();
inline constexpr double kNaN = std::numeric_limits<double>::quiet_NaN();

struct Sizes {
  Index batch = 1, heads = 1, query_heads = 1, kv_heads = 1;
  Index len_q = 1, len_kv = 1, dim_qk = 1, dim_v = 1, extra = 0;
  Index first_query =
      0;  // query i stands at first_query + i for formulas, which a mask does not read

  [[nodiscard]] Index kv_of(Index h) const { return h / (heads / kv_heads); }
  [[nodiscard]] Index row(Index b, Index h, Index i) const { return (b * heads + h) * len_q + i; }
  [[nodiscard]] Index rows() const { return batch * heads * len_q; }
};

// (batch or 1, heads or 1, len_q or 1, len_kv); no numbers: not given.
template <class S>
struct Broadcast4 {
  Index batch = 0, heads = 0, len = 0, keys = 0;
  std::vector<S> numbers;

  [[nodiscard]] bool given() const { return keys > 0 || batch > 0; }
  [[nodiscard]] std::size_t at(Index b, Index h, Index i, Index j) const {
    const Index bb = batch == 1 ? 0 : b, hh = heads == 1 ? 0 : h, ii = len == 1 ? 0 : i;
    return std::size_t(((bb * heads + hh) * len + ii) * keys + j);
  }
};

struct PlainBand {
  Index left = -1, right = -1;
  bool bottom_right = false;
  Index offset = 0;
};

// A function of positions, or a list of blocks.
struct PlainFunction {
  enum Kind { near, modulo, values, blocks } kind = near;
  Index number = 1;  // the distance, the modulus, or the queries and keys of a block
  bool bottom_right = false;
  Index offset = 0;
  std::vector<Index> numbers;  // values: [batch][len_kv]; blocks: [rows][blocks], 0 or 1
  bool negated = false;
  bool kept = false;  // as a BlockMask

  [[nodiscard]] bool shows(const Sizes& s, Index b, Index h, Index i, Index j) const {
    const Index p = i + offset + (bottom_right ? s.len_kv - s.len_q : 0);
    bool seen = false;
    if (kind == near) seen = std::abs(p - j) <= number + h;
    if (kind == modulo) seen = (3 * p + j) % number != b % 2;
    if (kind == values) seen = numbers[std::size_t(b * s.len_kv + j)] <= std::abs(p) % 4;
    if (kind == blocks)
      seen =
          numbers[std::size_t(i / number * ((s.len_kv + number - 1) / number) + j / number)] != 0;
    return seen != negated;
  }
};

// All parts of a mask except its bias.
struct PlainMask {
  std::vector<PlainBand> bands;
  std::vector<Index> key_lengths, query_documents, key_documents;
  Broadcast4<char> allowed;
  std::vector<PlainFunction> functions;
  bool united = false;  // true if one part suffices
  std::vector<double> slopes;
  bool slopes_bottom_right = false;
  Index slopes_offset = 0;
  double soft_cap = 0;

  [[nodiscard]] Index slopes_shift(const Sizes& s) const {
    return slopes_offset + (slopes_bottom_right ? s.len_kv - s.len_q : 0);
  }
  [[nodiscard]] bool shows(const Sizes& s, Index b, Index h, Index i, Index j) const {
    for (const PlainBand& band : bands) {
      const Index p = i + band.offset + (band.bottom_right ? s.len_kv - s.len_q : 0);
      if (band.left >= 0 && j < p - band.left) return false;
      if (band.right >= 0 && j > p + band.right) return false;
    }
    if (!key_lengths.empty() && j >= key_lengths[std::size_t(b)]) return false;
    const auto shown = [&](const PlainFunction& f) { return f.shows(s, b, h, i, j); };
    if (!functions.empty() && !(united ? std::any_of(functions.begin(), functions.end(), shown)
                                       : std::all_of(functions.begin(), functions.end(), shown)))
      return false;
    if (allowed.given() && !allowed.numbers[allowed.at(b, h, i, j)]) return false;
    return query_documents.empty() || query_documents[std::size_t(b * s.len_q + i)] ==
                                          key_documents[std::size_t(b * s.len_kv + j)];
  }
};

template <class S>
struct Plain {
  Sizes sizes;
  std::vector<S> query, key, value, extra;  // dense (batch, heads, len, dim)
  Broadcast4<S> bias;                       // -infinity hides
  std::vector<std::vector<S>> params;  // in the order in which the op shows them; empty: not in use
  PlainMask mask;
  double scale = 1;
  std::vector<char> kept;  // factors by dropout of the pairs, [row][key]; empty: all are kept
  double keep_factor = 1;

  [[nodiscard]] const S* q(Index b, Index h, Index i) const {
    return query.data() + ((b * sizes.query_heads + h) * sizes.len_q + i) * sizes.dim_qk;
  }
  [[nodiscard]] const S* k(Index b, Index kv, Index j) const {
    return key.data() + ((b * sizes.kv_heads + kv) * sizes.len_kv + j) * sizes.dim_qk;
  }
  [[nodiscard]] const S* v(Index b, Index kv, Index j) const {
    return value.data() + ((b * sizes.kv_heads + kv) * sizes.len_kv + j) * sizes.dim_v;
  }
  [[nodiscard]] const S* x(Index b, Index h, Index i) const {
    return extra.data() + sizes.row(b, h, i) * sizes.extra;
  }
  // Parameter n of head h: its own value, or the one that all share.
  [[nodiscard]] const S& param(std::size_t n, Index h) const {
    return params[n].size() == 1 ? params[n][0] : params[n][std::size_t(h)];
  }
  [[nodiscard]] bool sees(Index b, Index h, Index i, Index j) const {
    return mask.shows(sizes, b, h, i, j) && !(bias.given() && value_of_bias(b, h, i, j) == -kInf);
  }

 private:
  [[nodiscard]] double value_of_bias(Index b, Index h, Index i, Index j) const {
    return fuzz::value(bias.numbers[bias.at(b, h, i, j)]);
  }
};

// The weights of a row's scores.
template <class S>
struct Weights {
  std::vector<S> weight;
  std::vector<double> terms;  // sizes of the terms of each weight, for the tolerance
  std::vector<double> lse;    // per map
  std::vector<double> reports;
};

template <class S>
struct PlainResult {
  std::vector<S> out;                        // (batch, heads, len_q, dim_v)
  std::vector<std::vector<double>> lse;      // per map, [row]
  std::vector<std::vector<double>> reports;  // [name][row]
  std::vector<S> steps;              // [row], if the readout gives them; the loss reads them, too
  std::vector<double> s_row, terms;  // S and sum p|v| of tests/tolerances.hpp: [row], like out
  std::vector<double> products;      // largest sum_c |q_c k_c| of a row
  std::vector<double> mixed, mixed_terms;  // out and terms before the readout
  double to_jump = kInf;  // distance of the nearest choice (winner, halt) from changing
  double shortest = 1;    // shortest row whose cosine is taken, unless it is zero
  double gain = 1;        // factor of the readout for errors of a mixed row
  double to_kink = kInf;  // the same for a slope that jumps
};

template <class S>
[[nodiscard]] S dot(const S* a, const S* b, Index n) {
  S sum = 0;
  for (Index c = 0; c < n; ++c) sum += a[c] * b[c];
  return sum;
}
template <class S>
[[nodiscard]] S sigmoid(const S& x) {
  return S(1) / (S(1) + exp(-x));
}
// |x|, also where squares overflow or vanish.
template <class S>
[[nodiscard]] S norm(const S* x, Index n) {
  double top = 0;
  for (Index c = 0; c < n; ++c)
    if (!(std::abs(value(x[c])) <= top)) top = std::abs(value(x[c]));
  if (top == 0 || !std::isfinite(top)) return sqrt(dot(x, x, n));
  S sum = 0;
  for (Index c = 0; c < n; ++c) sum += x[c] / S(top) * (x[c] / S(top));
  return sqrt(sum) * S(top);
}

// A visible score of -infinity has weight 0 beside a larger one. If all are -infinity, or one is
// NaN or +infinity, the row is NaN. An empty row has lse -infinity.
template <class S>
[[nodiscard]] std::vector<S> softmax(const std::vector<S>& scores, double* lse = nullptr) {
  double top = -kInf;
  bool broken = false;
  for (const S& s : scores) {
    broken = broken || std::isnan(value(s)) || value(s) == kInf;
    top = std::max(top, value(s));
  }
  broken = broken || (!scores.empty() && top == -kInf);
  if (lse != nullptr) *lse = broken ? kNaN : -kInf;
  if (broken) return std::vector<S>(scores.size(), S(kNaN));
  S sum = 0;
  std::vector<S> p;
  for (const S& s : scores) p.push_back(value(s) == -kInf ? S(0) : exp(s - S(top)));
  for (const S& e : p) sum += e;
  for (S& e : p) e = e / sum;
  if (lse != nullptr && !scores.empty()) *lse = top + std::log(value(sum));
  return p;
}

// The columns that score map m of head h reads.
struct PlainMap {
  Index query_head = 0, query_column = 0, key_column = 0, width = 0;
};

// The base of most formulas: softmax of one map, and no readout. A formula overrides members.
struct SoftmaxFormula {
  static constexpr int maps = 1, reports = 0;

  [[nodiscard]] PlainMap map(const Sizes& s, Index h, int) const { return {h, 0, 0, s.dim_qk}; }
  template <class S>
  [[nodiscard]] S score(const Plain<S>&, Index, Index, Index, const S*, const S*, Index, const S&,
                        const S& logit, PlainResult<S>&, Index) const {
    return logit;
  }
  template <class S>
  [[nodiscard]] Weights<S> weigh(const Plain<S>&, Index, Index, Index,
                                 const std::vector<std::vector<S>>& scores) const {
    Weights<S> w;
    w.lse.resize(1);
    w.weight = softmax(scores[0], &w.lse[0]);
    return w;
  }
  template <class S>
  void read(const Plain<S>&, PlainResult<S>&) const {}
};

template <class S, class Formula>
[[nodiscard]] PlainResult<S> plain_attention(const Formula& formula, const Plain<S>& p) {
  const Sizes& s = p.sizes;
  PlainResult<S> result;
  const auto rows = std::size_t(s.rows());
  result.out.assign(rows * std::size_t(s.dim_v), S(0));
  result.terms.assign(rows * std::size_t(s.dim_v), 0.0);
  result.s_row.assign(rows, 0.0);
  result.products.assign(rows, 0.0);
  result.lse.assign(Formula::maps, std::vector<double>(rows, -kInf));
  result.reports.assign(Formula::reports, std::vector<double>(rows, 0.0));
  for (Index b = 0; b < s.batch; ++b)
    for (Index h = 0; h < s.heads; ++h)
      for (Index i = 0; i < s.len_q; ++i) {
        const Index kv = s.kv_of(h);
        const auto row = std::size_t(s.row(b, h, i));
        std::vector<Index> seen;
        for (Index j = 0; j < s.len_kv; ++j)
          if (p.sees(b, h, i, j)) seen.push_back(j);
        std::vector<std::vector<S>> scores(Formula::maps);
        for (int m = 0; m < Formula::maps; ++m) {
          const PlainMap map = formula.map(s, h, m);
          const S* q = p.q(b, map.query_head, i) + map.query_column;
          for (const Index j : seen) {
            const S* k = p.k(b, kv, j) + map.key_column;
            const S product = dot(q, k, map.width);
            S logit = S(p.scale) * product;
            if (p.mask.soft_cap != 0) logit = S(p.mask.soft_cap) * tanh(logit / S(p.mask.soft_cap));
            S score = formula.score(p, b, h, i, q, k, map.width, product, logit, result, j);
            if (!p.mask.slopes.empty()) {
              const Index at = i + p.mask.slopes_shift(s);
              score = score - S(p.mask.slopes[std::size_t(h)] * std::abs(double(at - j)));
            }
            if (p.bias.given()) score += p.bias.numbers[p.bias.at(b, h, i, j)];
            scores[std::size_t(m)].push_back(score);
            double size = std::isfinite(value(score)) ? std::abs(value(score)) : 0.0, sum = 0;
            for (Index c = 0; c < map.width; ++c) sum += std::abs(value(q[c]) * value(k[c]));
            result.s_row[row] = std::max({result.s_row[row], size, std::abs(p.scale) * sum});
            result.products[row] = std::max(result.products[row], sum);
          }
        }
        Weights<S> w = formula.weigh(p, b, h, i, scores);
        for (std::size_t m = 0; m < w.lse.size(); ++m) result.lse[m][row] = w.lse[m];
        for (std::size_t n = 0; n < w.reports.size(); ++n) result.reports[n][row] = w.reports[n];
        for (std::size_t n = 0; n < seen.size(); ++n) {
          double term = w.terms.empty() ? std::abs(value(w.weight[n])) : w.terms[n];
          if (!p.kept.empty()) {
            const bool kept = p.kept[row * std::size_t(s.len_kv) + std::size_t(seen[n])] != 0;
            w.weight[n] = kept ? w.weight[n] * S(p.keep_factor) : S(0);
            term = kept ? term * p.keep_factor : 0;
          }
          for (Index c = 0; c < s.dim_v; ++c) {
            const S v = p.v(b, kv, seen[n])[c];
            const auto at = row * std::size_t(s.dim_v) + std::size_t(c);
            result.out[at] += w.weight[n] * v;
            result.terms[at] += term * std::abs(value(v));
          }
        }
      }
  for (const S& x : result.out) result.mixed.push_back(value(x));
  result.mixed_terms = result.terms;
  formula.read(p, result);
  return result;
}

}  // namespace fuzz
