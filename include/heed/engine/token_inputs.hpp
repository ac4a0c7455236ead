// SPDX-License-Identifier: Apache-2.0
#pragma once

// Numbers of tokens (plug/token_inputs.hpp) in a call: which row of theirs a head reads, what is summed over tokens, and
// the way of their gradients back.
//
//   y_t  = sum over s <= t of term(x_s)
//   dx_t = term'(x_t) sum over s >= t of (dL/dy_s of keys + dL/dy_s of queries)
//
//   y._t = sum over s <= t of term'(x_s) x._s             of tangents (engine/tangents.hpp)
//
// Memory  forward: a number per token, head and input where they are summed; backward: one per map, and three more where
//         they are summed.

#include <heed/core/error.hpp>
#include <heed/core/geometry.hpp>
#include <heed/core/parallel.hpp>
#include <heed/core/view.hpp>
#include <heed/engine/tiles.hpp>
#include <heed/engine/widened.hpp>
#include <heed/simd/transpose.hpp>

#include <algorithm>
#include <memory>
#include <utility>
#include <vector>

namespace heed {
inline namespace HEED_ABI {
namespace detail {

// The numbers of token t that head h reads.
template <class U>
[[nodiscard]] U* input_row(const TensorView<U>& inputs, const Geometry& g, Index b, Index h,
                           Index t) {
  return inputs.row(b, h / (g.heads / inputs.shape().heads), t);
}

// Tokens of a head; those of a panel's queries.
struct TokenRange {
  Index batch, head, first, count;
};
[[nodiscard]] inline TokenRange tokens_of(const TilePlace& place) {
  return {place.batch, place.head, place.query, place.rows};
}
// Rows of a tensor in lanes, from column `column` on as many as `to` has rows; zeros where the tensor is not given.
template <class Real>
void pack_stored(const TensorView<const Real>& from, const TokenRange& tokens, Index column,
                 const LaneTile<Real>& to, Real factor = Real(1)) {
  if (!from.given()) return to.fill(Real(0));
  pack_lanes(from.row(tokens.batch, tokens.head, tokens.first) + column, from.strides().row,
             tokens.count, to.rows, to.data, to.lanes, factor);
}
// The same of numbers of tokens that head `tokens.head` reads.
template <class Real>
void load_inputs(const TensorView<const Real>& from, const Geometry& g, TokenRange tokens,
                 const LaneTile<Real>& to) {
  if (to.rows == 0) return;
  if (from.given()) tokens.head /= g.heads / from.shape().heads;
  pack_stored(from, tokens, 0, to);
}

// These columns of `inputs`; nothing where there are none.
template <class U>
[[nodiscard]] TensorView<U> columns_of(const TensorView<U>& inputs, const ColumnRange& columns) {
  if (!inputs.given() || columns.count == 0) return {};
  Shape shape = inputs.shape();
  shape.dim = columns.count;
  return {inputs.data() ? inputs.data() + columns.first : nullptr, shape, inputs.strides()};
}
// Gives each part of the op its columns of the numbers of tokens, which arrive in `of` as the caller's.
template <class Tensors>
void split_inputs(const TokenColumns& columns, Tensors& of) {
  of.normaliser_query = columns_of(of.query_inputs, columns.normaliser_query);
  of.normaliser_key = columns_of(of.key_inputs, columns.normaliser_key);
  of.readout_query = columns_of(of.query_inputs, columns.readout_query);
  of.query_inputs = columns_of(of.query_inputs, columns.score_query);
  of.key_inputs = columns_of(of.key_inputs, columns.score_key);
}

// Threads that so many numbers are worth.
[[nodiscard]] inline int threads_for_inputs(int threads, Index numbers) {
  constexpr Index per_thread = 4096;
  return int(std::min<Index>(threads, 1 + numbers / per_thread));
}

// The sums that rows read, and of which backward writes the gradients; for scores that sum nothing, the numbers of the
// call themselves.
template <class Real>
class SummedInputs {
 public:
  // score: must outlive this.
  SummedInputs(const ScoreTiles<Real>& score, const Geometry& g,
               const TensorView<const Real>& query_inputs, const TensorView<const Real>& key_inputs,
               int threads)
      : score_(score), g_(g), x_(key_inputs), query_(query_inputs), key_(key_inputs) {
    if (!sums()) return;
    threads_ = threads_for_inputs(threads, shape().batch * shape().heads * shape().len * count());
    sums_.resize(numbers());
    for_each_column([&](Index b, Index h, Index c, Column& terms) {
      summands(b, h, c, terms.data(), nullptr);
      double sum = 0;
      for (Index t = 0; t < g_.len_kv; ++t) {
        sum += terms[std::size_t(t)];
        sums_[at(b, h, t, c)] = Real(sum);
      }
    });
    key_ = {sums_.data(), shape()};
    query_ = of_queries(std::as_const(sums_).data());
  }
  SummedInputs(const SummedInputs&) = delete;  // the views refer to its memory

  // Does the score sum them?
  [[nodiscard]] bool sums() const { return score_.traits.sums_inputs; }
  [[nodiscard]] const TensorView<const Real>& query() const { return query_; }
  [[nodiscard]] const TensorView<const Real>& key() const { return key_; }

  // Where backward writes the gradients of what rows read; those of the call are `grad_query` and `grad_key`.
  void take_gradients(TensorView<Real>& grad_query, TensorView<Real>& grad_key) {
    if (!sums()) return;
    grad_ = grad_key;
    if (!grad_.given()) return;
    of_keys_.resize(numbers());
    of_queries_.resize(numbers());
    grad_key = {of_keys_.data(), shape()};
    grad_query = of_queries(of_queries_.data());
  }
  // From tangents of the call's numbers to those of what rows read.
  void take_tangents(TensorView<const Real>& query, TensorView<const Real>& key) {
    if (!sums() || !key.given()) return;
    of_keys_.resize(numbers());
    for_each_column([&](Index b, Index h, Index c, Column& slopes) {
      summands(b, h, c, nullptr, slopes.data());
      double sum = 0;
      for (Index t = 0; t < g_.len_kv; ++t) {
        sum += slopes[std::size_t(t)] * double(key.row(b, h, t)[c]);
        of_keys_[at(b, h, t, c)] = Real(sum);
      }
    });
    key = {of_keys_.data(), shape()};
    query = of_queries(std::as_const(of_keys_).data());
  }
  // After backward.
  void chain() const {
    if (!sums() || !grad_.given()) return;
    for_each_column([&](Index b, Index h, Index c, Column& slopes) {
      summands(b, h, c, nullptr, slopes.data());
      double sum = 0;
      for (Index t = g_.len_kv - 1; t >= 0; --t) {
        sum += double(of_keys_[at(b, h, t, c)]) + double(of_queries_[at(b, h, t, c)]);
        // An input that no pair read has gradient 0, even if it is NaN.
        grad_.row(b, h, t)[c] = sum == 0 ? Real(0) : Real(slopes[std::size_t(t)] * sum);
      }
    });
  }

  // What is summed, and how numbers lie in memory as sums of it do: densely, number c of token t at at(b, h, t, c).
  [[nodiscard]] const TensorView<const Real>& terms() const { return x_; }
  [[nodiscard]] const Shape& shape() const { return x_.shape(); }
  [[nodiscard]] std::size_t numbers() const {
    return std::size_t(element_count(shape(), "sums of token inputs"));
  }
  [[nodiscard]] std::size_t at(Index b, Index h, Index t, Index c) const {
    return std::size_t(((b * shape().heads + h) * shape().len + t) * count() + c);
  }
  // Rows of the queries' own tokens, of which those at hand are read.
  template <class U>
  [[nodiscard]] TensorView<U> of_queries(U* rows) const {
    return {rows + g_.first_query * count(),
            {shape().batch, shape().heads, g_.held_queries(), count()},
            dense_strides(shape())};
  }
  // body(b, h, c, column) for each number c of the tokens of a head; `column` has room for one number per token.
  using Column = std::vector<double>;
  template <class Body>
  void for_each_column(Body&& body) const {
    const Index heads = shape().heads;
    parallel_for(shape().batch * heads * count(), threads_, [&](Index unit) {
      Column column(std::size_t(g_.len_kv));
      body(unit / count() / heads, unit / count() % heads, unit % count(), column);
    });
  }

 private:
  [[nodiscard]] Index count() const { return score_.traits.key_inputs; }
  void summands(Index b, Index h, Index c, double* values, double* slopes) const {
    if (g_.len_kv > 0)
      score_.summands(x_.row(b, h, 0) + c, x_.strides().row, g_.len_kv, values, slopes);
  }

  const ScoreTiles<Real>& score_;
  Geometry g_;
  TensorView<const Real> x_, query_, key_;
  TensorView<Real> grad_;
  int threads_ = 1;
  std::vector<Real> sums_, of_keys_, of_queries_;  // (batch, heads, len_kv, count)
};

// Gives the parts of the op what they read of the tokens in `operands`. Returns the memory of their sums; null for ops that
// read nothing of tokens.
template <class Real>
[[nodiscard]] std::unique_ptr<SummedInputs<Real>> take_inputs(const OpTiles<Real>& op,
                                                              const Geometry& g, int threads,
                                                              Operands<Real>& operands) {
  if (!op.columns.any()) return nullptr;
  split_inputs(op.columns, operands);
  auto inputs = std::make_unique<SummedInputs<Real>>(op.score, g, operands.query_inputs,
                                                     operands.key_inputs, threads);
  operands.query_inputs = inputs->query();
  operands.key_inputs = inputs->key();
  return inputs;
}

// to(b, h, t, c) = the sum of parts[b][head][map][t][c] over the heads that read row h, and over maps, in their order.
template <class Real>
void sum_over_readers(const std::vector<Real>& parts, Index heads, Index maps,
                      const TensorView<Real>& to, int threads) {
  const Shape& s = to.shape();
  if (s.batch * s.heads == 0) return;
  const Index readers = heads / s.heads * maps, row = s.len * s.dim;
  threads = threads_for_inputs(threads, Index(parts.size()));
  parallel_for(s.batch * s.heads, threads, [&](Index unit) {
    const Real* from = parts.data() + unit * readers * row;
    for (Index t = 0; t < s.len; ++t)
      for (Index c = 0; c < s.dim; ++c) {
        double sum = 0;
        for (Index r = 0; r < readers; ++r) sum += double(from[r * row + t * s.dim + c]);
        to.row(unit / s.heads, unit % s.heads, t)[c] = Real(sum);
      }
  });
}

}  // namespace detail
}  // namespace HEED_ABI
}  // namespace heed
