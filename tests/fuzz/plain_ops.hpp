// SPDX-License-Identifier: Apache-2.0
#pragma once

// The variants' formulas in plain loops, one struct each, as the heads of heed/ops/*.hpp have them. Parameters are
// numbered in the order in which the op shows them.

#include "fuzz/plain.hpp"

namespace fuzz {

using SdpaFormula = SoftmaxFormula;

// 0 strength, 1 vigilance, 2 sharpness, 3 feedback.
struct DarFormula : SoftmaxFormula {
  enum Gate { logistic, centred, tanh_gate, piecewise } gate = logistic;
  int iterations = 0;
  bool converged = false, adaptive = false, safe = false;
  double eps = 1e-8;
  std::vector<double> basis;  // (width, rank)
  Index rank = 0;

  template <class S>
  [[nodiscard]] S opened(const S& y, const S& alpha, PlainResult<S>& result) const {
    if (gate == tanh_gate) return (S(1) + tanh(alpha * y)) * S(0.5);
    if (gate != piecewise) return sigmoid(alpha * y);
    const S z = alpha * y + S(0.5);
    result.to_kink = std::min({result.to_kink, std::abs(value(z)), std::abs(value(z) - 1)});
    return value(z) < 0 ? S(0) : value(z) > 1 ? S(1) : z;
  }
  template <class S>
  [[nodiscard]] S score(const Plain<S>& p, Index batch, Index h, Index i, const S* q, const S* k,
                        Index width, const S&, const S& logit, PlainResult<S>& result,
                        Index) const {
    std::vector<S> a(q, q + width), b(k, k + width);
    if (rank > 0) {
      a = project(q, width);
      b = project(k, width);
    }
    const Index n = Index(a.size());
    const S along = norm(a.data(), n), key_along = norm(b.data(), n);
    for (const double length : {value(along), value(key_along)})
      if (length > 0) result.shortest = std::min(result.shortest, length);
    S c = dot(a.data(), b.data(), n) * (S(1) / (along + S(eps))) * (S(1) / (key_along + S(eps)));
    if (safe && (value(along) == 0 || value(key_along) == 0)) c = S(0);
    if (gate == centred) c = (c + S(1)) * S(0.5);
    const S rho = p.param(1, h), alpha = p.param(2, h), beta = p.param(3, h);
    // A rounding of c comes out of t rounds of the gate multiplied by alpha s (1 + alpha beta s + ...), s its slope.
    const double s = gate == piecewise ? 1 : gate == tanh_gate ? 0.5 : 0.25, a_s = s * value(alpha);
    double multiplied = 0;
    for (int t = 0; t < (converged ? 60 : std::max(1, iterations)); ++t)
      multiplied = a_s * (1 + std::abs(value(beta)) * multiplied);
    double& size = result.s_row[std::size_t(p.sizes.row(batch, h, i))];
    size = std::max(size, std::abs(value(p.param(0, h))) * multiplied);
    S r = 0;
    const int steps = converged ? 4000 : std::max(1, iterations);
    for (int t = 0; t < steps; ++t) {
      const S next = opened(S(c + beta * r - rho), alpha, result);
      const bool rests = settled(next, r);
      r = next;
      if (converged && rests) break;
    }
    S strength = p.param(0, h);
    if (adaptive) {
      const S w = norm(q, width) * norm(k, width) / S(double(width));
      strength = strength * (w / (S(1) + w));
    }
    return logit + strength * r;
  }

 private:
  template <class S>
  [[nodiscard]] std::vector<S> project(const S* row, Index width) const {
    std::vector<S> y(std::size_t(rank), S(0));
    for (Index c = 0; c < width; ++c)
      for (Index r = 0; r < rank; ++r)
        y[std::size_t(r)] += row[c] * S(basis[std::size_t(c * rank + r)]);
    return y;
  }
  [[nodiscard]] static bool settled(double a, double b) { return !(std::abs(a - b) > 1e-17); }
  [[nodiscard]] static bool settled(const Dual& a, const Dual& b) {
    return settled(a.x, b.x) && !(std::abs(a.d - b.d) > 1e-16 * (1 + std::abs(a.d)));
  }
};

// Given: 0 lambda. Four vectors: 0 to 3 lambda_q1, _k1, _q2, _k2; 4 the norm's weight. Token: none.
struct DifferentialFormula : SoftmaxFormula {
  static constexpr int maps = 2;
  enum Pairing { halves, halves_repeated_keys, halves_apart, heads, heads_apart } pairing = halves;
  enum Lambda { given, four_vectors, token } lambda = given;
  double lambda_init = 0, factor = 1, eps = 1e-5;
  bool normed = false;

  // Map m of head h, as HeadPairing's comments have it: half-head s is the left (s even) or right part of head s/2.
  [[nodiscard]] PlainMap map(const Sizes& s, Index h, int m) const {
    const Index w = pairing == heads || pairing == heads_apart ? s.dim_qk : s.dim_qk / 2;
    const Index group = s.heads / s.kv_heads;
    Index query_half = 2 * h + m, key_half = m;
    switch (pairing) {
      case heads: return {2 * h + m, 0, 0, w};
      case heads_apart: return {h + m * s.heads, 0, 0, w};
      case halves: break;
      case halves_repeated_keys: key_half = (2 * h + m) / group; break;
      case halves_apart: query_half = h + m * s.heads; break;
    }
    return {query_half / 2, query_half % 2 * w, key_half % 2 * w, w};
  }
  template <class S>
  [[nodiscard]] Weights<S> weigh(const Plain<S>& p, Index b, Index h, Index i,
                                 const std::vector<std::vector<S>>& scores) const {
    Weights<S> w;
    w.lse.resize(2);
    w.weight = softmax(scores[0], &w.lse[0]);
    const std::vector<S> second = softmax(scores[1], &w.lse[1]);
    const S l = lambda_of(p, b, h, i);
    for (std::size_t n = 0; n < second.size(); ++n) {
      w.terms.push_back(value(w.weight[n]) + std::abs(value(l)) * value(second[n]));
      w.weight[n] = w.weight[n] - l * second[n];
    }
    return w;
  }
  template <class S>
  void read(const Plain<S>& p, PlainResult<S>& result) const {
    if (!normed) return;
    const Index n = p.sizes.dim_v;
    for (Index row = 0; row < p.sizes.rows(); ++row) {
      S* o = result.out.data() + row * n;
      const S root = sqrt(dot(o, o, n) / S(double(n)) + S(eps));
      for (Index c = 0; c < n; ++c) {
        const S weight = p.params[4].empty() ? S(1) : p.params[4][std::size_t(c)];
        o[c] = S(factor) * o[c] / root * weight;
        // An error of the mixed row counts twice: in o and in the root.
        const double gain = 2 * std::abs(factor * value(weight) / value(root));
        result.terms[std::size_t(row * n + c)] *= gain;
        result.gain = std::max(result.gain, gain);
      }
    }
  }

 private:
  template <class S>
  [[nodiscard]] S lambda_of(const Plain<S>& p, Index b, Index h, Index i) const {
    if (lambda == given) return p.param(0, h);
    if (lambda == token) return sigmoid(p.x(b, h, i)[0]);
    const auto product = [&](std::size_t x, std::size_t y) {
      return dot(p.params[x].data(), p.params[y].data(), Index(p.params[x].size()));
    };
    return exp(product(0, 1)) - exp(product(2, 3)) + S(lambda_init);
  }
};

// Given: 0 bias. From the query: 0 weight, 1 bias. Calculated: 0 to 2 weights of query, key, value, 3 bias.
struct IntentFormula : SoftmaxFormula {
  enum Form { given, from_query, calculated } form = given;
  bool per_head = false;

  template <class S>
  void read(const Plain<S>& p, PlainResult<S>& result) const {
    const Sizes& s = p.sizes;
    const std::vector<S>& bias = p.params[form == given ? 0 : form == from_query ? 1 : 3];
    for (Index b = 0; b < s.batch; ++b)
      for (Index h = 0; h < s.heads; ++h)
        for (Index i = 0; i < s.len_q; ++i)
          for (Index c = 0; c < s.dim_v; ++c) {
            const Index column = per_head ? 0 : c, columns = per_head ? 1 : s.dim_v;
            S logit = 0;
            const auto add = [&](const S* row, Index width, std::size_t n) {
              for (Index r = 0; r < width; ++r)
                logit += row[r] * p.params[n][std::size_t((h * width + r) * columns + column)];
            };
            if (form == given) logit = p.x(b, h, i)[column];
            if (form != given) add(p.q(b, h, i), s.dim_qk, 0);
            if (form == calculated) add(p.k(b, s.kv_of(h), s.first_query + i), s.dim_qk, 1);
            if (form == calculated) add(p.v(b, s.kv_of(h), s.first_query + i), s.dim_v, 2);
            if (!bias.empty()) logit += bias.size() == 1 ? bias[0] : bias[std::size_t(h)];
            S& out = result.out[std::size_t(s.row(b, h, i) * s.dim_v + c)];
            out = out * sigmoid(logit);
          }
  }
};

// 0 rho, 1 eta.
struct OdeFormula : SoftmaxFormula {
  static constexpr int reports = 1;
  enum Mode { flow, equilibrium, lagrange, lagrange_equilibrium } mode = flow;
  int steps = 5;

  template <class S>
  [[nodiscard]] S score(const Plain<S>& p, Index b, Index h, Index i, const S* q, const S* k,
                        Index width, const S&, const S& logit, PlainResult<S>& result,
                        Index) const {
    S apart = 0;
    for (Index c = 0; c < width; ++c) apart += (q[c] - k[c]) * (q[c] - k[c]);
    // Rounding is of the size of the squares, wherever they cancel.
    const double rho = std::abs(value(p.param(0, h)));
    double& size = result.s_row[std::size_t(p.sizes.row(b, h, i))];
    size = std::max(size, rho * (value(dot(q, q, width)) + value(dot(k, k, width))));
    return logit - p.param(0, h) * apart;
  }
  template <class S>
  [[nodiscard]] Weights<S> weigh(const Plain<S>& p, Index b, Index h, Index i,
                                 const std::vector<std::vector<S>>& scores) const {
    const std::vector<S>& drive = scores[0];
    const S eta = p.param(1, h);
    const double n = double(drive.size());
    Weights<S> w;
    w.lse = {-kInf};
    w.reports = {0};
    if (drive.empty()) return w;
    w.lse = {0};
    S mean = 0;
    double top = 0;
    for (const S& d : drive) mean += d / S(n), top = std::max(top, std::abs(value(d)));
    std::vector<S> a(drive.size(), S(1 / n));
    const bool multiplier = mode == lagrange || mode == lagrange_equilibrium;
    const int count = mode == equilibrium ? 600 : mode == lagrange_equilibrium ? 0 : steps;
    if (mode == lagrange_equilibrium)
      for (std::size_t j = 0; j < a.size(); ++j) a[j] = S(1 / n) + drive[j] - mean;
    for (int t = 0; t < count; ++t) {
      std::vector<S> next;
      for (std::size_t j = 0; j < a.size(); ++j)
        next.push_back(a[j] + eta * (drive[j] - a[j]) -
                       (multiplier ? eta * (mean - S(1 / n)) : S(0)));
      // The uniform start is the same for every key, and left out of the logarithm.
      if (!multiplier) next = softmax(next, &w.lse[0]);
      if (mode == flow && t == 0) w.lse[0] -= (1 - value(eta)) / n;
      w.reports[0] = 0;
      double change = 0;
      for (std::size_t j = 0; j < a.size(); ++j) {
        w.reports[0] = std::max(w.reports[0], std::abs(value(next[j]) - value(a[j])));
        change = std::max(change, distance(next[j], a[j]));
      }
      a = next;
      if (mode == equilibrium && change < 1e-17) break;
    }
    if (multiplier)
      w.lse[0] = 0 * value(mean);  // the logarithm of a sum of 1, NaN in a row without one
    if (!multiplier) {             // heed's drive lacks the row's own -rho |q|^2
      const S* q = p.q(b, h, i);
      w.lse[0] += value(eta) * value(p.param(0, h)) * value(dot(q, q, p.sizes.dim_qk));
    }
    w.weight = a;
    for (const S& x : a) w.terms.push_back(std::abs(value(x)) + (multiplier ? 1 / n + top : 0));
    return w;
  }

 private:
  [[nodiscard]] static double distance(double a, double b) { return std::abs(a - b); }
  [[nodiscard]] static double distance(const Dual& a, const Dual& b) {
    return std::max(std::abs(a.x - b.x), std::abs(a.d - b.d) / (1 + std::abs(a.d)));
  }
};

// 0 W (heads, most, dim_qk), 1 strength, 2 pull.
struct PrototypeFormula : SoftmaxFormula {
  static constexpr int reports = 1;
  std::vector<Index> counts;  // per head
  Index most = 0;
  double eps = 1e-8;

  template <class S>
  [[nodiscard]] S score(const Plain<S>& p, Index, Index h, Index, const S* q, const S* k,
                        Index width, const S&, const S& logit, PlainResult<S>& result,
                        Index) const {
    const Index winner = winner_of(p, h, k, result);
    if (winner < 0) return logit;
    const S* w = p.params[0].data() + (h * most + winner) * width;
    return logit + p.param(1, h) * cosine(q, w, width);
  }
  template <class S>
  void read(const Plain<S>& p, PlainResult<S>& result) const {
    const Sizes& s = p.sizes;
    for (Index b = 0; b < s.batch; ++b)
      for (Index h = 0; h < s.heads; ++h)
        for (Index i = 0; i < s.len_q; ++i) {
          const S* q = p.q(b, h, i);
          const Index winner = winner_of(p, h, q, result);
          result.reports[0][std::size_t(s.row(b, h, i))] = double(winner);
          if (winner < 0) continue;
          const S* w = p.params[0].data() + (h * most + winner) * s.dim_qk;
          for (Index c = 0; c < s.dim_v; ++c) {
            const auto at = std::size_t(s.row(b, h, i) * s.dim_v + c);
            result.out[at] += p.param(2, h) * (w[c] - q[c]);
            result.terms[at] +=
                std::abs(value(p.param(2, h))) * (std::abs(value(w[c])) + std::abs(value(q[c])));
          }
        }
  }

 private:
  template <class S>
  [[nodiscard]] S cosine(const S* a, const S* b, Index n) const {
    return dot(a, b, n) / (norm(a, n) + S(eps)) / (norm(b, n) + S(eps));
  }
  // -1 without prototypes.
  template <class S>
  [[nodiscard]] Index winner_of(const Plain<S>& p, Index h, const S* row,
                                PlainResult<S>& result) const {
    Index winner = -1;
    double best = -kInf, second = -kInf;
    const Index width = p.sizes.dim_qk;
    for (Index m = 0; m < counts[std::size_t(h)]; ++m) {
      const double c = value(cosine(row, p.params[0].data() + (h * most + m) * width, width));
      if (winner < 0 || c > best) {
        second = best;
        best = c;
        winner = m;
      } else {
        second = std::max(second, c);
      }
    }
    if (value(norm(row, width)) > 0) result.to_jump = std::min(result.to_jump, best - second);
    return winner;
  }
};

// 0 v_pos, 1 v_neg, 2 synth, 3 synth_bias, 4 gate, 5 gate_bias, 6 b_pos, 7 b_neg, 8 halt, 9 halt_bias.
struct DialecticalFormula : SoftmaxFormula {
  static constexpr int reports = 3;
  int max_steps = 3;
  double halt_eps = 1e-3;
  bool whole_batch = false;
  bool adaptive = false;  // halts by learnt probabilities, and has steps
  double spare_eps = 0.01;

  template <class S>
  void read(const Plain<S>& p, PlainResult<S>& result) const {
    const Sizes& s = p.sizes;
    const Index d = s.dim_v;
    struct Token {
      std::vector<S> up, un, z;
      S tension = 0;
      bool moving = true;
      double used = 0, updates = 0;
      Index head = 0;
      std::vector<S> mean;
      S spent = 0, steps = 0;
    };
    std::vector<Token> tokens;
    for (Index b = 0; b < s.batch; ++b)
      for (Index h = 0; h < s.heads; ++h)
        for (Index i = 0; i < s.len_q; ++i) {
          Token t;
          const S* m = result.out.data() + s.row(b, h, i) * d;
          for (Index c = 0; c < d; ++c) {
            t.up.push_back(dot(p.params[0].data() + c * d, m, d));
            t.un.push_back(dot(p.params[1].data() + c * d, m, d));
          }
          const S np = floored(norm(t.up.data(), d)), nn = floored(norm(t.un.data(), d));
          for (const double u : {value(np), value(nn)})  // a cosine multiplies errors of short rows
            if (u > 1e-6) result.gain = std::max(result.gain, 1 / u);
          t.tension = sigmoid(-(dot(t.up.data(), t.un.data(), d) / np / nn));
          t.z.assign(p.q(b, h, i), p.q(b, h, i) + d);
          t.head = h;
          t.mean.assign(std::size_t(d), S(0));
          tokens.push_back(t);
        }
    for (int step = 0; step < max_steps; ++step) {
      bool any = false;
      for (Token& t : tokens) {
        if (!t.moving && !whole_batch) continue;
        const S gate = sigmoid(dot(t.z.data(), p.params[4].data(), d) + p.params[5][0]);
        std::vector<S> move;
        for (Index c = 0; c < d; ++c) {
          const S* row = p.params[2].data() + c * 3 * d;
          const S a = dot(row, t.up.data(), d) + dot(row + d, t.un.data(), d) +
                      dot(row + 2 * d, t.z.data(), d) + p.params[3][std::size_t(c)];
          move.push_back(gate * t.tension * (a * sigmoid(a)));
        }
        const double change = value(norm(move.data(), d)) / (value(norm(t.z.data(), d)) + 1e-6);
        const bool small = !adaptive && change < halt_eps;
        if (halt_eps > 0 && !adaptive)
          result.to_jump = std::min(result.to_jump, std::abs(change - halt_eps) / halt_eps);
        for (std::size_t c = 0; c < move.size(); ++c) t.z[c] += move[c];
        t.updates += 1;
        t.used += small ? 0 : 1;
        t.moving = t.moving && !small;
        if (adaptive) {
          const S h = sigmoid(dot(t.z.data(), p.params[8].data() + t.head * d, d) +
                              p.params[9][std::size_t(t.head)]);
          const S left = S(1) - t.spent;
          t.spent += h;
          const double over = value(t.spent) - (1 - spare_eps);
          const bool last = step + 1 == max_steps;
          if (!last) result.to_jump = std::min(result.to_jump, std::abs(over));
          t.moving = !last && !(over >= 0);
          for (std::size_t c = 0; c < t.z.size(); ++c) t.mean[c] += (t.moving ? h : left) * t.z[c];
          if (!t.moving) t.steps = S(step + 1) + left;
        }
        any = any || t.moving;
      }
      if (!any) break;
    }
    double longest = 1;
    for (const Token& t : tokens) longest = std::max(longest, value(norm(t.z.data(), d)));
    result.gain *= longest;
    if (adaptive) result.reports.emplace_back();
    for (std::size_t row = 0; row < tokens.size(); ++row) {
      if (adaptive) {
        tokens[row].z = tokens[row].mean;
        result.steps.push_back(tokens[row].steps);
        result.reports[3].push_back(value(tokens[row].steps));
      }
      std::copy(tokens[row].z.begin(), tokens[row].z.end(),
                result.out.begin() + std::ptrdiff_t(row) * d);
      result.reports[0][row] = tokens[row].used;
      result.reports[1][row] = tokens[row].updates;
      result.reports[2][row] = value(tokens[row].tension);
    }
  }

 private:
  template <class S>
  [[nodiscard]] static S floored(const S& length) {
    return value(length) < 1e-6 ? S(1e-6) : length;
  }
};

}  // namespace fuzz
