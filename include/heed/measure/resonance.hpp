// SPDX-License-Identifier: Apache-2.0
#pragma once

// Measures adaptive resonance between a query tensor and a key tensor.
//
//   resonance_map         r_ij of every pair, 0 where the mask hides it
//   resonance_statistics  per head: the fraction of visible pairs that cross the vigilance,
//                         Pr[c' > rho], and the mean of r; without a (len_q, len_kv) matrix
//
// Shapes   query (batch, heads, len_q, dim_qk), key (batch, kv_heads, len_kv, dim_qk),
//          map (batch, heads, len_q, len_kv)
// Bounds   finite for finite rows of any size. c' = c, or (c + 1)/2 for the centred gate: the number that the gate compares
//          with rho. For the static gate, and no other, the pairs that cross are those with r > 1/2 (ops/dar/gate.hpp).
//          The statistics have the same bits for any number of threads.
// Errors   std::invalid_argument on sizes that do not fit.
// Source   "Attention with Differentiable Adaptive Resonance", section 9.
// Cost     one product Q K^T and one gate a pair.

#include <heed/measure/pairs.hpp>
#include <heed/ops/dar.hpp>

#include <algorithm>
#include <cmath>
#include <concepts>
#include <type_traits>
#include <vector>

namespace heed {
inline namespace HEED_ABI {

// One entry per head, over all batches; 0 for a head without a visible pair.
struct ResonanceStatistics {
  std::vector<double> crossing, mean_resonance;
  std::vector<Index> visible_pairs;
};

namespace detail {

// The sizes of a call; throws if the arguments do not fit.
template <class Real>
[[nodiscard]] Geometry resonance_geometry(const TensorView<const Real>& query,
                                          const TensorView<const Real>& key, const char* where) {
  const Shape &q = query.shape(), &k = key.shape();
  require(q.dim > 0, where, ": query has dim ", q.dim, ", it must be positive");
  require(k.dim == q.dim, where, ": key has dim_qk ", k.dim, ", query has ", q.dim);
  require(k.batch == q.batch, where, ": key has batch ", k.batch, ", query has ", q.batch);
  require(k.heads > 0 ? q.heads % k.heads == 0 : q.heads == 0, where, ": key has ", k.heads,
          " heads, which does not divide the query's ", q.heads);
  require(query.page_rows() == 0 && key.page_rows() == 0, where,
          ": query or key has pages, they must lie in one piece");
  require(query.data() != nullptr || !query.has_elements(), where, ": query is null, shape ", q);
  require(key.data() != nullptr || !key.has_elements(), where, ": key is null, shape ", k);
  return {.batch = q.batch,
          .heads = q.heads,
          .query_heads = q.heads,
          .kv_heads = k.heads,
          .len_q = q.len,
          .len_kv = k.len,
          .dim_qk = q.dim,
          .dim_v = q.dim};
}

// The rows of a tensor, giant rows scaled down by a power of two: a cosine does not change, and products of such rows no
// longer overflow. Rows below the edge, and rows with numbers that are not finite, do not change.
template <class Real>
class TamedRows {
 public:
  explicit TamedRows(const TensorView<const Real>& rows) : view_(rows) {
    const Shape& s = rows.shape();
    for (Index unit = 0; unit < s.batch * s.heads * s.len; ++unit) {
      const Index row = unit % s.len, head = unit / s.len;
      const Real* x = rows.row(head / s.heads, head % s.heads, row);
      Real top = Real(0);
      for (Index c = 0; c < s.dim; ++c) top = std::max(top, std::abs(x[c]));
      if (!(top > Real(NormRange<Real>::edge)) || !std::isfinite(top)) continue;
      if (copy_.empty()) copy_all();
      const Real factor =
          std::ldexp(Real(1), std::ilogb(Real(NormRange<Real>::edge)) - std::ilogb(top));
      for (Index c = 0; c < s.dim; ++c) copy_[std::size_t(unit * s.dim + c)] *= factor;
    }
    if (!copy_.empty()) view_ = {copy_.data(), s};
  }
  TamedRows(const TamedRows&) = delete;  // the view may refer to the copy
  [[nodiscard]] const TensorView<const Real>& view() const { return view_; }

 private:
  void copy_all() {
    const Shape& s = view_.shape();
    for (Index unit = 0; unit < s.batch * s.heads * s.len; ++unit) {
      const Index head = unit / s.len;
      const Real* x = view_.row(head / s.heads, head % s.heads, unit % s.len);
      copy_.insert(copy_.end(), x, x + s.dim);
    }
  }

  TensorView<const Real> view_;
  std::vector<Real> copy_;
};

struct ResonanceSums {
  double resonance = 0.0;
  Index crossings = 0, pairs = 0;
};

// Adds up units in their order, whichever thread computed them; `panels` of them stand side by side
// for each head of a batch.
[[nodiscard]] inline ResonanceStatistics total_per_head(const std::vector<ResonanceSums>& units,
                                                        const Geometry& g) {
  ResonanceStatistics result;
  const Index rows = g.batch * g.heads, panels = rows > 0 ? Index(units.size()) / rows : 0;
  for (Index h = 0; h < g.heads; ++h) {
    ResonanceSums total;
    for (Index b = 0; b < g.batch; ++b)
      for (Index n = 0; n < panels; ++n) {
        const ResonanceSums& s = units[std::size_t((b * g.heads + h) * panels + n)];
        total.resonance += s.resonance;
        total.crossings += s.crossings;
        total.pairs += s.pairs;
      }
    const double pairs = double(std::max<Index>(total.pairs, 1));
    result.crossing.push_back(double(total.crossings) / pairs);
    result.mean_resonance.push_back(total.resonance / pairs);
    result.visible_pairs.push_back(total.pairs);
  }
  return result;
}

}  // namespace detail

// An op that scores by adaptive resonance, whatever its normaliser and readout.
template <class Op>
concept ResonantOp =
    AttentionOp<Op> && std::same_as<typename Op::ScoreType, DarScore<typename Op::Scalar>>;

// Writes r_ij to `out` (batch, heads, len_q, len_kv), which must not overlap query or key; 0 where
// the mask hides the pair.
template <ResonantOp Op, class Real = typename Op::Scalar>
void resonance_map(const Op& op, std::type_identity_t<TensorView<const Real>> query,
                   std::type_identity_t<TensorView<const Real>> key,
                   std::type_identity_t<TensorView<Real>> out,
                   const std::type_identity_t<Mask<Real>>& mask = {}, int threads = 0) {
  constexpr const char* where = "heed::resonance_map";
  const Geometry g = detail::resonance_geometry<Real>(query, key, where);
  validate(op.score, g, where);
  const Shape expected{g.batch, g.heads, g.len_q, g.len_kv};
  require(out.shape() == expected, where, ": out has shape ", out.shape(), ", it must be ",
          expected);
  require(out.data() != nullptr || !out.has_elements(), where, ": out is null, shape ", expected);
  require(!may_overlap(out, query) && !may_overlap(out, key), where,
          ": out overlaps query or key; it needs memory of its own");
  const BoundMask<Real> bound(mask, g, where);
  parallel_for(g.batch * g.heads, resolve_threads(threads), [&](Index row) {
    for (Index i = 0; i < g.len_q; ++i)
      std::fill_n(out.row(row / g.heads, row % g.heads, i), g.len_kv, Real(0));
  });
  const detail::TamedRows<Real> queries(query), keys(key);
  PairWalk<DarScore<Real>, Real> walk(op.score, queries.view(), keys.view(), g, bound);
  walk.run(resolve_threads(threads), [&](const auto& at) {
    const Pack<Real> r = op.score.resonance(at.pair, at.scalars);
    at.for_each_visible([&](Index lane) {
      out.row(at.batch, at.head, at.query + lane)[at.key] = r.lane(int(lane));
    });
  });
}

// Computes how often, and how much, each head resonates.
template <ResonantOp Op, class Real = typename Op::Scalar>
[[nodiscard]] ResonanceStatistics resonance_statistics(
    const Op& op, std::type_identity_t<TensorView<const Real>> query,
    std::type_identity_t<TensorView<const Real>> key,
    const std::type_identity_t<Mask<Real>>& mask = {}, int threads = 0) {
  constexpr const char* where = "heed::resonance_statistics";
  const Geometry g = detail::resonance_geometry<Real>(query, key, where);
  validate(op.score, g, where);
  const BoundMask<Real> bound(mask, g, where);
  const detail::TamedRows<Real> queries(query), keys(key);
  PairWalk<DarScore<Real>, Real> walk(op.score, queries.view(), keys.view(), g, bound);
  std::vector<detail::ResonanceSums> units(std::size_t(walk.units()));
  walk.run(resolve_threads(threads), [&](const auto& at) {
    const Pack<Real> r = op.score.resonance(at.pair, at.scalars);
    const Pack<Real> input = op.score.gate_input(at.pair);
    detail::ResonanceSums& sums = units[std::size_t(at.unit)];
    at.for_each_visible([&](Index lane) {
      sums.resonance += double(r.lane(int(lane)));
      sums.crossings += ResonanceGate::crosses(input.lane(int(lane)), at.scalars[1].lane(0));
      ++sums.pairs;
    });
  });
  return detail::total_per_head(units, g);
}

}  // namespace HEED_ABI
}  // namespace heed
