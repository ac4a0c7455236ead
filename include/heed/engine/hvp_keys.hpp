// SPDX-License-Identifier: Apache-2.0
#pragma once

// The last step of forward over backward: what panels have added up for keys, and its tangents, become tangents of the
// gradients of the keys as they are stored, of the numbers of their tokens, and of the parameters that features and the
// transform read. As KeySide::chain() does in backward:
//
//   df -> df . df/dk,   then   dK -> dK . dt/dk           both on dual numbers (tile/moving_rows.hpp)
//
// Heads run in parallel; what they add to parameters is kept per head, and added up in their order.

#include <heed/engine/hvp_shared.hpp>
#include <heed/engine/tile/moving_rows.hpp>

#include <array>
#include <utility>
#include <vector>

namespace heed {
inline namespace HEED_ABI {
namespace detail {

template <class Op, class Real>
class MovingKeyChain {
 public:
  using Score = typename Op::ScoreType;
  using P = Pack<Real>;
  static constexpr int kFeatures = Score::key_features;
  static constexpr Index kInputs = key_inputs_of<Score>;
  static constexpr bool kAny = kFeatures > 0 || Score::has_transform;

  MovingKeyChain(const Op& op, const CallContext<Real>& c, const TangentOperands<Real>& d,
                 const KeyTangents<Op, Real>& tangents, const Op& direction,
                 HvpShared<Real>& shared)
      : op_(op), c_(c), d_(d), tangents_(tangents), direction_(direction), s_(shared) {}

  // Adds to the result for keys and, if they are given, to the score's parameters.
  void run(Score* parameters, int threads) {
    if constexpr (kAny) {
      const Geometry& g = c_.geometry;
      std::vector<ParameterSums> sums(std::size_t(g.batch * g.heads));
      parallel_for(g.batch * g.kv_heads, threads, [&](Index unit) {
        const Index b = unit / g.kv_heads, kv = unit % g.kv_heads;
        for (Index h = 0; h < g.heads; ++h)
          if (op_.normaliser.source(g, h, 0).kv_head == kv && is_reader(h))
            chain_head(b, h, sums[std::size_t(b * g.heads + h)]);
      });
      if (parameters) add_in_order(sums, *parameters);
    }
  }

 private:
  static constexpr Index kWidth = kPanelLanes<Real>;
  // What the keys of one head add to parameters: to p, and to number n of those that the transform reads.
  struct ParameterSums {
    std::array<double, std::size_t(scalars_of<Score>)> scalars{};
    std::vector<std::pair<Index, double>> transform;
  };

  // Heads that read the same side values are chained once.
  [[nodiscard]] bool is_reader(Index h) const { return h == 0 || !c_.keys.shares(h, h - 1); }

  void chain_head(Index b, Index h, ParameterSums& sums) const {
    const Geometry& g = c_.geometry;
    const Source source = op_.normaliser.source(g, h, 0);
    const auto take_sides = [&](Scratch<Real>& s) {
      return MovingSides<Real>::take(s, source.width, c_.keys.needs().key_table_rows(), kInputs,
                                     kWidth);
    };
    const auto take_rows = [&](Scratch<Real>& s) {
      return MovingLanes<Real>::take(s, Score::has_transform ? source.width : 0, kWidth);
    };
    Scratch<Real> scratch(2 *
                          (scratch_elements<Real>(take_sides) + scratch_elements<Real>(take_rows)));
    const MovingSides<Real> rows = take_sides(scratch), grads = take_sides(scratch);
    const MovingLanes<Real> before = take_rows(scratch), work = take_rows(scratch);
    MovingTransformGradients<Score, Real> transform(tangents_.transform());
    transform.begin();
    const auto p = moving_scalars<Score>(lanes_of_scalars<Real>(op_.score, h),
                                         lanes_of_scalars<Real>(direction_.score, h));
    // Invariant: the rows of keys before j have all that this head gives them.
    for (Index j = 0; j < g.len_kv; j += kWidth) {
      const Index count = std::min(kWidth, g.len_kv - j), at = c_.keys.row(b, h, 0, j);
      tangents_.load(rows.value, rows.tangent, b, h, source, j, count);
      grads.fill(Real(0));
      for (int v = 0; v < kPanelVectors; ++v) chain_features(rows, grads, v, j, count, at, p, sums);
      if constexpr (Score::has_transform) {
        const Index numbers = c_.keys.needs().row_numbers();
        const auto add = [&](const std::vector<Real>& from, const LaneTile<Real>& to) {
          pack_lanes(from.data() + at * numbers, numbers, count, source.width, work.value.data,
                     kWidth);
          for (int v = 0; v < kPanelVectors; ++v)
            for (Index col = 0; col < source.width; ++col) to.add(col, v, work.value.load(col, v));
        };
        add(s_.drows, grads.value.x);
        add(s_.drow_tangents, grads.tangent.x);
        tangents_.load_rows(c_.key, b, source, j, count, before.value);
        tangents_.load_rows(d_.key, b, source, j, count, before.tangent);
        transform.run(RowSide::key, h, j, count, before, work, grads.x());
      }
      if (s_.grads.key.given())
        add_unpacked_lanes(grads.tangent.x.data, kWidth, count, source.width,
                           s_.grads.key.row(b, source.kv_head, j) + source.key_column,
                           s_.grads.key.strides().row);
      if constexpr (kInputs > 0) {
        const auto write = [&](const LaneTile<Real>& from, std::vector<Real>& to) {
          unpack_lanes(from.data, kWidth, count, kInputs, to.data() + at * kInputs, kInputs);
        };
        write(grads.value.input, s_.dkey_inputs);
        write(grads.tangent.input, s_.dkey_input_tangents);
      }
    }
    transform.for_each_tangent([&](Index n, Real tangent) {
      if (tangent != Real(0)) sums.transform.push_back({n, double(tangent)});
    });
  }

  // Of vector v of the keys from `key` on, whose first has its side values at row `at`.
  void chain_features(const MovingSides<Real>& rows, const MovingSides<Real>& grads, int v,
                      Index key, Index count, Index at, const ScalarsOf<Score, MovingPack<Real>>& p,
                      ParameterSums& sums) const {
    if constexpr (kFeatures > 0) {
      const Index first = v * kLanes<Real>;
      P df[std::size_t(kFeatures)], tangents[std::size_t(kFeatures)];
      const auto load = [&](const std::vector<Real>& from, int i) {
        Real lanes[kLanes<Real>] = {};
        for (Index n = first; n < std::min<Index>(count, first + kLanes<Real>); ++n)
          lanes[n - first] = from[std::size_t((at + n) * kFeatures + i)];
        return P::load(lanes);
      };
      for (int i = 0; i < kFeatures; ++i) {
        df[i] = load(s_.dfeatures, i);
        tangents[i] = load(s_.dfeature_tangents, i);
      }
      const MovingRow<Real> row{rows.value.row(v, key), rows.tangent};
      const auto dp = chain_moving_features<OfKeys>(op_.score, row, p, df, tangents, grads);
      for (std::size_t i = 0; i < dp.size(); ++i)
        sums.scalars[i] += sum_valid_lanes(dp[i], v, count);
    }
  }

  void add_in_order(const std::vector<ParameterSums>& sums, Score& to) const {
    const Geometry& g = c_.geometry;
    std::vector<double> of_transform;
    visit_parameters(to, [&](const char*, const auto& param) {
      of_transform.resize(of_transform.size() + std::size_t(param.size()));
    });
    for (Index h = 0; h < g.heads; ++h) {
      std::array<double, std::size_t(scalars_of<Score>)> scalars{};
      for (Index b = 0; b < g.batch; ++b) {
        const ParameterSums& own = sums[std::size_t(b * g.heads + h)];
        for (std::size_t i = 0; i < scalars.size(); ++i) scalars[i] += own.scalars[i];
        for (const auto& [n, tangent] : own.transform) of_transform[std::size_t(n)] += tangent;
      }
      if constexpr (scalars_of < Score >> 0) chain_scalars(to, h, scalars.data());
    }
    std::size_t n = 0;
    visit_parameters(to, [&](const char*, auto& param) {
      for (Index i = 0; i < param.size(); ++i) param[i] += Real(of_transform[n++]);
    });
  }

  const Op& op_;
  const CallContext<Real>& c_;
  TangentOperands<Real> d_;
  const KeyTangents<Op, Real>& tangents_;
  const Op& direction_;
  HvpShared<Real>& s_;
};

}  // namespace detail
}  // namespace HEED_ABI
}  // namespace heed
