// SPDX-License-Identifier: Apache-2.0
#pragma once

// Columns in a score: a formula of one column of a query and of a key, whose sum over the columns stands in place of their
// dot product. A formula of a score (plug/own_score.hpp) has, beside score(),
//
//   template <class S>
//   S column(const auto& q, const auto& k, const auto& w) const        F, of q[0], k[0], ...
//
//   pair.dot = sum_c F(q_c, k_c, w_c)          pair.logit = scale pair.dot, soft-capped if the mask says so
//
// for example F = |q - k|, a distance, with the score -p[0] pair.dot: attention with a Laplace kernel. A struct may also have
//
//   numbers_per_column  1       each side gives so many numbers per column: n of rows of width n C, whose number m of column c
//                               stands at m C + c, so that a row is its first numbers, then its second ones. With
//                               F = q[0] k[0] exp(q[1] - k[1]) they are keys and a decay of each channel, added up
//   column_weights              pointer to a Param (1 or heads, weights_per_column, C) that `parameters` names as a tensor:
//                               w[0], w[1], ... of the column
//   weights_per_column  1       beside column_weights
//
// F is written as score() is: no branch on its values, words of heed::math. It may read members of the struct that are not learnt.
// The derivative of F is derived. A pair that no query sees gives nothing to any result, whatever its F is.
//
// Cost    sums run over packs of queries, for 8 keys at a time. bench/NOTES.md has figures for |q - k|. Products of 16-bit pairs
//         (Options::precision) are not used. A formula without column() pays nothing.
// Errors  std::invalid_argument where dim_qk is no multiple of numbers_per_column, or column_weights have another shape, or F reads
//         a number that its columns do not have.

#include <heed/autodiff/lane_dual.hpp>
#include <heed/core/geometry.hpp>
#include <heed/core/param.hpp>
#include <heed/plug/column_sums.hpp>
#include <heed/plug/parameters.hpp>
#include <heed/simd/transpose.hpp>

#include <algorithm>
#include <array>

namespace heed {
inline namespace HEED_ABI {

template <class Score, class Real>
class ColumnsOf final : public ColumnFormula<Real> {
  static constexpr int kNumbers = Score::numbers_per_column, kWeights = Score::weights_per_column;
  static constexpr Index W = kLanes<Real>;
  using P = Pack<Real>;
  using Moved = LaneDual<P, 1>;
  template <class S>
  using Numbers = std::array<S, std::size_t(kNumbers)>;
  template <class S>
  using Weights = std::array<S, std::size_t(kWeights)>;

 public:
  explicit ColumnsOf(const Score& score) : score_(score) {
    this->numbers = kNumbers;
    this->weights_per_column = kWeights;
  }

  const Real* weights([[maybe_unused]] Index h) const override {
    if constexpr (kWeights > 0) return weights_of(score_, h);
    return nullptr;
  }
  // The weights of head h in a score, or their gradient.
  template <class AnyScore>
  [[nodiscard]] static auto* weights_of(AnyScore& score, Index h) {
    auto& weights = score.*Score::column_weights;
    return weights.data() + (weights.extent(0) == 1 ? 0 : h * kWeights * weights.extent(2));
  }

  void sums(const ColumnPairs<Real>& pairs, const LaneTile<Real>& out) const override {
    add_up<P>(pairs, out);
  }
  void tangents(const ColumnPairs<Real>& pairs, const LaneTile<Real>& out) const override {
    add_up<Moved>(pairs, out);
  }
  void vjp(const ColumnPairs<Real>& pairs, const ColumnBack<Real>& back) const override {
    go_back<P>(pairs, back);
  }
  void vjp_tangents(const ColumnPairs<Real>& pairs, const ColumnBack<Real>& back) const override {
    go_back<Moved>(pairs, back);
  }

  [[gnu::flatten]] void row_sums(const Real* query, const ColumnPairs<Real>& pairs,
                                 Real* sums) const override {
    const Index columns = pairs.width / kNumbers;
    for (Index j = 0; j < pairs.count; ++j) {
      const Real* key = pairs.keys[0] + j * pairs.strides[0];
      P sum = Real(0);
      for (Index c = 0; c < columns; c += W) {
        const Index lanes = std::min(W, columns - c);
        Numbers<P> q, k;
        Weights<P> w;
        for (int n = 0; n < kNumbers; ++n) {
          q[std::size_t(n)] = some_lanes(query + n * columns + c, lanes);
          k[std::size_t(n)] = some_lanes(key + n * columns + c, lanes);
        }
        for (int m = 0; m < kWeights; ++m)
          w[std::size_t(m)] = some_lanes(pairs.weights[0] + m * columns + c, lanes);
        sum += select(P::iota() < P(Real(lanes)), score_.template column<P>(q, k, w), P(Real(0)));
      }
      sums[j] = sum_lanes(sum);
    }
  }

 private:
  // The first lanes from memory, zeros behind them.
  [[nodiscard]] static P some_lanes(const Real* from, Index lanes) {
    if (lanes == W) return P::load(from);
    Real padded[std::size_t(W)] = {};
    std::copy_n(from, lanes, padded);
    return P::load(padded);
  }

  // A number, or a number that moves by `tangent`.
  template <class S>
  [[nodiscard, gnu::always_inline]] static S number(const P& value,
                                                    [[maybe_unused]] const P& tangent) {
    if constexpr (std::is_same_v<S, P>) {
      return value;
    } else {
      S x = S::template variable<0>(value);
      x.grad[0] = tangent;
      return x;
    }
  }
  template <class S>
  static constexpr int kPlanes = std::is_same_v<S, P> ? 1 : 2;
  template <int n, class S>
  [[nodiscard, gnu::always_inline]] static P plane(const S& x) {
    if constexpr (std::is_same_v<S, P>)
      return x;
    else if constexpr (n == 0)
      return x.value;
    else
      return x.moves[0] ? x.grad[0] : P(Real(0));
  }
  template <class S>
  [[nodiscard, gnu::always_inline]] static S cell(const ColumnTiles<Real>& tiles, Index row,
                                                  int v) {
    if constexpr (kPlanes<S> == 1)
      return tiles[0].load(row, v);
    else
      return number<S>(tiles[0].load(row, v), tiles[1].data ? tiles[1].load(row, v) : P(Real(0)));
  }
  template <class S>
  [[nodiscard, gnu::always_inline]] static S cell(const std::array<const Real*, 2>& planes,
                                                  Index at, Index moved) {
    if constexpr (kPlanes<S> == 1)
      return P(planes[0][at]);
    else
      return number<S>(P(planes[0][at]), P(planes[1] ? planes[1][moved] : Real(0)));
  }

  // What column c reads of the queries of vector v, of key j, and of the weights.
  template <class S>
  [[nodiscard, gnu::always_inline]] static Numbers<S> query(const ColumnPairs<Real>& of, Index c,
                                                            int v) {
    Numbers<S> q;
    for (int n = 0; n < kNumbers; ++n)
      q[std::size_t(n)] = cell<S>(of.queries, n * (of.width / kNumbers) + c, v);
    return q;
  }
  template <class S>
  [[nodiscard, gnu::always_inline]] static Numbers<S> key(const ColumnPairs<Real>& of, Index j,
                                                          Index c) {
    Numbers<S> k;
    for (int n = 0; n < kNumbers; ++n) {
      const Index at = n * (of.width / kNumbers) + c;
      k[std::size_t(n)] = cell<S>(of.keys, j * of.strides[0] + at, j * of.strides[1] + at);
    }
    return k;
  }
  template <class S>
  [[nodiscard, gnu::always_inline]] static Weights<S> weights(const ColumnPairs<Real>& of,
                                                              Index c) {
    Weights<S> w;
    for (int m = 0; m < kWeights; ++m) {
      const Index at = m * (of.width / kNumbers) + c;
      w[std::size_t(m)] = cell<S>(of.weights, at, at);
    }
    return w;
  }

  // Sums, or how they move, of all pairs.
  template <class S>
  void add_up(const ColumnPairs<Real>& pairs, const LaneTile<Real>& out) const {
    constexpr int block = 8;
    const Index whole = pairs.count / block * block;
    for (int v = 0; v < pairs.vectors; ++v) {
      for (Index j = 0; j < whole; j += block) add_up<S, block>(pairs, j, v, out);
      for (Index j = whole; j < pairs.count; ++j) add_up<S, 1>(pairs, j, v, out);
    }
  }
  // Invariant: behind column c the sums hold what columns 0 ... c of `Keys` keys give.
  template <class S, int Keys>
  [[gnu::noinline, gnu::flatten]] void add_up(const ColumnPairs<Real>& of, Index j, int v,
                                              const LaneTile<Real>& out) const {
    const ColumnPairs<Real> pairs = of;
    P sums[std::size_t(Keys)];
    for (P& sum : sums) sum = Real(0);
    const Index columns = pairs.width / kNumbers;
    for (Index c = 0; c < columns; ++c) {
      const Numbers<S> q = query<S>(pairs, c, v);
      const Weights<S> w = weights<S>(pairs, c);
#pragma GCC unroll 8
      for (int k = 0; k < Keys; ++k)
        sums[k] += plane<1>(score_.template column<S>(q, key<S>(pairs, j + k, c), w));
    }
    for (int k = 0; k < Keys; ++k) out.store(j + k, v, sums[k]);
  }

  template <class S>
  void go_back(const ColumnPairs<Real>& pairs, const ColumnBack<Real>& back) const {
    for (Index j = 0; j < pairs.count; j += W)
      if (back.hidden.data)
        go_back<S, true>(pairs, back, j, std::min(W, pairs.count - j));
      else
        go_back<S, false>(pairs, back, j, std::min(W, pairs.count - j));
  }
  // Keys [first, first + count), at most W. Invariant: behind column c, all gradients of columns 0 ... c have what these keys
  // give, those of the keys as sums over the lanes.
  template <class S, bool Hidden>
  [[gnu::noinline, gnu::flatten]] void go_back(const ColumnPairs<Real>& of,
                                               const ColumnBack<Real>& to, Index first,
                                               Index count) const {
    constexpr Index together = std::min<Index>(4, W);
    const ColumnPairs<Real> pairs = of;
    const ColumnBack<Real> back = to;
    const Index columns = pairs.width / kNumbers;
    P dkey[std::size_t(kPlanes<S>)][std::size_t(kNumbers)][std::size_t(W)];
    for (Index c = 0; c < columns; ++c) {
      for (auto& of_plane : dkey)
        for (auto& of_number : of_plane)
          for (Index n = count; n < W; ++n) of_number[n] = Real(0);
      Index n = 0;
      for (; n + together <= count; n += together)
        some_keys<S, Hidden, int(together)>(pairs, back, c, first, n, dkey);
      for (; n < count; ++n) some_keys<S, Hidden, 1>(pairs, back, c, first, n, dkey);
      for (int plane = 0; plane < kPlanes<S>; ++plane)
        for (int i = 0; i < kNumbers; ++i) {
          Real* sums = back.keys[std::size_t(plane)].row(i * columns + c) + first;
          (P::load(sums) + detail::sums_of_lanes(dkey[plane][i])).store(sums);
        }
    }
  }
  // Column c of keys [first + n, first + n + Keys): adds to gradients of queries and weights; those of the keys, in lanes, go to
  // dkey[plane][number][n], ...
  template <class S, bool Hidden, int Keys>
  [[gnu::always_inline]] void some_keys(
      const ColumnPairs<Real>& pairs, const ColumnBack<Real>& back, Index c, Index first, Index n,
      P (&dkey)[std::size_t(kPlanes<S>)][std::size_t(kNumbers)][std::size_t(W)]) const {
    using D = LaneDual<S, 2 * kNumbers + kWeights>;
    const Index columns = pairs.width / kNumbers;
    const Weights<D> w = variables<D, 2 * kNumbers>(weights<S>(pairs, c));
    Numbers<D> k[std::size_t(Keys)];
    Numbers<S> sums[std::size_t(Keys)];
#pragma GCC unroll 4
    for (int at = 0; at < Keys; ++at) {
      k[at] = variables<D, kNumbers>(key<S>(pairs, first + n + at, c));
      sums[at].fill(math::constant<S>(0));
    }
    for (int v = 0; v < pairs.vectors; ++v) {
      const Numbers<D> q = variables<D, 0>(query<S>(pairs, c, v));
      S dquery[std::size_t(kNumbers)], dweight[std::size_t(kWeights + 1)];
      for (S& x : dquery) x = math::constant<S>(0);
      for (S& x : dweight) x = math::constant<S>(0);
#pragma GCC unroll 4
      for (int at = 0; at < Keys; ++at) {
        const Index j = first + n + at;
        const D f = score_.template column<D>(q, k[at], w);
        const S g = cell<S>(back.dsums, j, v);
        auto none = P(Real(0)) != P(Real(0));
        if constexpr (Hidden) none = is_hidden(back.hidden.load(j, v));
#pragma GCC unroll 4
        for (int i = 0; i < kNumbers; ++i) {
          if (f.moves[i]) dquery[i] = dquery[i] + seen<Hidden>(none, S(g * f.grad[i]));
          if (f.moves[kNumbers + i])
            sums[at][std::size_t(i)] =
                sums[at][std::size_t(i)] + seen<Hidden>(none, S(g * f.grad[kNumbers + i]));
        }
#pragma GCC unroll 4
        for (int i = 0; i < kWeights; ++i)
          if (f.moves[2 * kNumbers + i])
            dweight[i] = dweight[i] + seen<Hidden>(none, S(g * f.grad[2 * kNumbers + i]));
      }
      for (int i = 0; i < kNumbers; ++i) add(back.queries, i * columns + c, v, dquery[i]);
      for (int i = 0; i < kWeights; ++i) add(back.weights, i * columns + c, v, dweight[i]);
    }
    for (int at = 0; at < Keys; ++at)
      for (int i = 0; i < kNumbers; ++i) {
        dkey[0][i][n + at] = plane<0>(sums[at][std::size_t(i)]);
        if constexpr (kPlanes < S >> 1) dkey[1][i][n + at] = plane<1>(sums[at][std::size_t(i)]);
      }
  }
  // 0 where a pair is hidden.
  template <bool Hidden, class S>
  [[nodiscard, gnu::always_inline]] static S seen([[maybe_unused]] const typename P::Mask& hidden,
                                                  const S& x) {
    if constexpr (!Hidden)
      return x;
    else if constexpr (kPlanes<S> == 1)
      return zero_where(hidden, x);
    else
      return number<S>(zero_where(hidden, plane<0>(x)), zero_where(hidden, plane<1>(x)));
  }
  template <class S>
  [[gnu::always_inline]] static void add(const ColumnTiles<Real>& tiles, Index row, int v,
                                         const S& x) {
    tiles[0].add(row, v, plane<0>(x));
    if constexpr (kPlanes < S >> 1) tiles[1].add(row, v, plane<1>(x));
  }
  // Numbers as the variables first, first + 1, ...
  template <class D, int first, class S, std::size_t count>
  [[nodiscard, gnu::always_inline]] static std::array<D, count> variables(
      const std::array<S, count>& x) {
    std::array<D, count> all;
    detail::for_directions<int(count)>(
        [&](auto i) { all[i] = D::template variable<first + i>(x[i]); });
    return all;
  }

  const Score& score_;
};

namespace detail {

// How many numbers per column a formula's rows have; 0 for a formula without column().
template <class Formula, class Real>
[[nodiscard]] constexpr int numbers_per_column_of() {
  if constexpr (requires(const Formula& f, const std::array<Real, 1>& x) {
                  f.template column<Real>(x, x, x);
                }) {
    if constexpr (requires { Formula::numbers_per_column; })
      return Formula::numbers_per_column;
    else
      return 1;
  } else {
    return 0;
  }
}
template <class Formula>
[[nodiscard]] constexpr int weights_per_column_of() {
  if constexpr (!requires { Formula::column_weights; })
    return 0;
  else if constexpr (requires { Formula::weights_per_column; })
    return Formula::weights_per_column;
  else
    return 1;
}

template <class Score>
void check_columns(const Score& score, const Geometry& g, const char* where) {
  constexpr int numbers = Score::numbers_per_column, weights = Score::weights_per_column;
  require(g.dim_qk % numbers == 0, where, ": dim_qk is ", g.dim_qk,
          ", it must be a multiple of the numbers per column, ", numbers);
  if constexpr (weights > 0) {
    const std::vector<Index>& shape = (score.*Score::column_weights).shape();
    require(shape.size() == 3 && (shape[0] == 1 || shape[0] == g.heads) && shape[1] == weights &&
                shape[2] == g.dim_qk / numbers,
            where, ": column weights have shape ", extents_text(shape), ", it must be (1 or ",
            g.heads, ",", weights, ",", g.dim_qk / numbers, ")");
  }
}

}  // namespace detail

}  // namespace HEED_ABI
}  // namespace heed
