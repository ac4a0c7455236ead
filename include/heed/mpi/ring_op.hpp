// SPDX-License-Identifier: Apache-2.0
#pragma once

// An op as the ring takes it: the shards' keys are computed map by map, by an op of one softmax without a readout, and the maps
// of a row are joined over the shards and added up, out = readout(sum over m of f_m out_m) (mpi/ring.hpp). Code that knows the
// op's type ends here.

#include <heed/engine/op_door.hpp>
#include <heed/engine/shared_op.hpp>

#include <functional>
#include <memory>
#include <type_traits>
#include <utility>
#include <vector>

namespace heed {
inline namespace HEED_ABI {
namespace mpi {
namespace detail {

// The softmax of one map of `of`.
template <class Real, class Of, int map>
struct OneMap : Softmax<Real> {
  using Mergeable = OneMap;
  Of of;
  [[nodiscard]] Index query_heads(Index heads) const { return of.query_heads(heads); }
  [[nodiscard]] Source source(const Geometry& g, Index h, int) const {
    return of.source(g, h, map);
  }
};

// A score that reads sums of numbers of tokens. The ring computes the sums from the tokens of all
// ranks, so that the score reads them as plain numbers.
template <class Score>
struct OfSums : Score {
  static constexpr bool sums_inputs = false;
  static constexpr int query_inputs = key_inputs_of<Score>;
};

// A normaliser that reads numbers of the query's token would count them once for each shard.
template <class Op>
inline constexpr bool ring_normaliser =
    !reads_inputs<typename Op::NormaliserType> &&
    (mergeable<typename Op::NormaliserType> || sum_of_softmaxes<typename Op::NormaliserType>);

// The op that computes map `map`, with parameters that are the first of the op's.
template <int map, class Op>
[[nodiscard]] auto op_of_map(const Op& op) {
  using Real = typename Op::Scalar;
  using Score = typename Op::ScoreType;
  using ScoreOfMap = std::conditional_t<sums_inputs<Score>, OfSums<Score>, Score>;
  using Normaliser = typename Op::NormaliserType;
  const auto with = [&]<class Of>(Attention<Real, ScoreOfMap, Of, Identity<Real>> of) {
    static_cast<Score&>(of.score) = op.score;
    return of;
  };
  if constexpr (mergeable<Normaliser>) {
    return with(Attention<Real, ScoreOfMap, Normaliser, Identity<Real>>{{}, op.normaliser, {}});
  } else {
    using Map = OneMap<Real, Normaliser, map>;
    Attention<Real, ScoreOfMap, Map, Identity<Real>> of;
    of.normaliser.of = op.normaliser;
    return with(of);
  }
}

// The op of a map as the engine takes it.
template <class Real>
struct RingMap {
  OpTiles<Real> tiles;
  OpVjps<Real> vjps;
  std::shared_ptr<const void> op;  // what these refer to
};
template <class OfMap>
struct RingMapOf {
  OfMap op;
  heed::detail::OpTilesOf<OfMap> tiles;
  heed::detail::OpVjpsOf<OfMap> vjps;
  explicit RingMapOf(OfMap of) : op(std::move(of)), tiles(op), vjps(op) {}
};

template <class Real>
struct RingOp {
  std::vector<RingMap<Real>> maps;  // none: the weights of the op are of another kind

  // For a sum of softmaxes: the factor f_m of map m in a row of head h whose extra input is `extra`; null: the one factor is 1.
  std::function<Real(Index h, int m, Real extra)> factor;
  // df_m/dextra, of ops that read an extra input
  std::function<Real(int m, Real extra)> factor_slope;
  // For other ops: adds to the gradients of the parameters, in the order of visit(), those from dL/df_m of each head.
  std::function<void(int m, const std::vector<double>& of_heads, double* sums)> add_factors;
};

// The op must outlive it.
template <class Op, class Real = typename Op::Scalar>
[[nodiscard]] RingOp<Real> ring_op(const Op& op) {
  using Normaliser = typename Op::NormaliserType;
  RingOp<Real> ring;
  if constexpr (ring_normaliser<Op>) {
    const auto add = [&]<class OfMap>(OfMap of_map) {
      const auto parts = std::make_shared<const RingMapOf<OfMap>>(std::move(of_map));
      ring.maps.push_back({parts->tiles.tiles(), parts->vjps.vjps(), parts});
    };
    [&]<int... map>(std::integer_sequence<int, map...>) { (add(op_of_map<map>(op)), ...); }
    (std::make_integer_sequence<int, Normaliser::maps>{});
  }
  if constexpr (sum_of_softmaxes<Normaliser>) {
    ring.factor = [&op](Index h, int m, Real extra) {
      return op.normaliser.map_factor(h, m, extra);
    };
    if constexpr (Normaliser::uses_extra)
      ring.factor_slope = [&op](int m, Real extra) {
        return op.normaliser.map_factor_slope(m, extra);
      };
    else
      ring.add_factors = [&op](int m, const std::vector<double>& of_heads, double* sums) {
        Op grad = zeros_like(op);
        for (std::size_t h = 0; h < of_heads.size(); ++h)
          op.normaliser.add_map_factor(Index(h), m, of_heads[h], grad.normaliser);
        grad.visit([&](const char*, const auto& param) {
          for (Index i = 0; i < param.size(); ++i) *sums++ += double(param[i]);
        });
      };
  }
  return ring;
}

}  // namespace detail
}  // namespace mpi
}  // namespace HEED_ABI
}  // namespace heed
