// SPDX-License-Identifier: Apache-2.0
#pragma once

// Visits the visible pairs of queries and keys as a score sees them, in the engine's tiles, for
// reports that measure pairs without a matrix of len_q x len_kv.
//
// Order  Units of work are handed out to the threads. Each is one panel of queries of one head against all keys, and
//        visits its pairs in the same order whichever thread takes it: sums per unit, added up in the order of the
//        units, have the same bits for any number of threads.

#include <heed/core/parallel.hpp>
#include <heed/engine/op_tiles.hpp>
#include <heed/engine/queries.hpp>
#include <heed/plug/attention.hpp>

namespace heed {
inline namespace HEED_ABI {

// A vector of queries and one key.
template <class Score, class Real>
struct VisitedPairs {
  Index unit, batch, head;
  Index query, queries;  // the first query, and their number
  Index key;
  const PairOf<Score, Pack<Real>>& pair;
  const ScalarsOf<Score, Pack<Real>>& scalars;
  Pack<Real> hidden;  // -infinity where a pair is hidden, else 0

  // Calls f(lane) for each visible pair; its query is query + lane.
  template <class F>
  void for_each_visible(F&& f) const {
    for (Index lane = 0; lane < queries; ++lane)
      if (hidden.lane(int(lane)) == Real(0)) f(lane);
  }
};

template <class Score, class Real>
class PairWalk {
  using Op = Attention<Real, Score, Softmax<Real>, Identity<Real>>;

 public:
  // `g` has the sizes of query and key; the arguments must outlive the walk.
  PairWalk(const Score& score, const TensorView<const Real>& query,
           const TensorView<const Real>& key, const Geometry& g, const BoundMask<Real>& mask)
      : op_{score, {}, {}},
        of_op_(op_),
        tiles_(of_op_.tiles()),
        keys_(tiles_, g, key),
        c_(make_context(tiles_, g, mask, Operands<Real>{{query, key}}, keys_, Options{},
                        detail::plan_call<Real>(tiles_, g, mask, {}, 0, false))) {}
  PairWalk(const PairWalk&) = delete;  // the context refers to its op and keys

  [[nodiscard]] Index units() const {
    return c_.geometry.batch * c_.geometry.heads * c_.plan.panels;
  }

  // Calls visit(VisitedPairs) for every vector of queries and every key that one of them may see.
  template <class Visit>
  void run(int threads, Visit&& visit) {
    keys_.build(threads);
    const auto build = [&](Scratch<Real>& scratch) { return Room(c_, scratch); };
    const Index elements = scratch_elements<Real>(build);
    parallel_for(units(), threads, [&](Index unit) {
      Scratch<Real> scratch(elements);
      Room room = build(scratch);
      const Index row = unit / c_.plan.panels;
      room.panel.move_to(row / c_.geometry.heads, row % c_.geometry.heads, unit % c_.plan.panels);
      room.panel.load_queries();
      for (Index t = 0; t < c_.plan.tiles; ++t) {
        const Index end = std::min((t + 1) * c_.plan.tile, c_.geometry.len_kv);
        visit_tile(room, room.panel.tile({t * c_.plan.tile, end}), unit, visit);
      }
    });
  }

 private:
  struct Room {
    detail::Panel<Real> panel;
    LaneTile<Real> dots, projected, hidden;

    Room(const CallContext<Real>& c, Scratch<Real>& scratch) : panel(c, scratch, false) {
      for (LaneTile<Real>* tile : {&dots, &projected, &hidden})
        *tile = {scratch.take(c.plan.tile * c.plan.lanes), c.plan.tile, c.plan.lanes};
    }
  };

  template <class Visit>
  void visit_tile(Room& room, const detail::PanelTile& tile, Index unit, Visit&& visit) const {
    if (tile.kind == TileKind::empty) return;
    const TilePlace& at = tile.at;
    const auto& side = room.panel.query[0];
    const LaneTile<Real> dots = room.dots.part(0, at.keys), hidden = room.hidden.part(0, at.keys);
    side.dots(at, dots);
    side.projected_dots(at, room.projected);
    room.panel.fill_hidden(at, tile.kind, hidden);
    const auto scalars = scalars_in_lanes<Score>(side.scalars());
    const ScoreTile<Real> score_tile = side.score_tile(at, dots, room.projected);
    for (int v = 0; v < c_.plan.vectors && v * kLanes<Real> < at.rows; ++v) {
      const LanePairs<Score, Real> pairs(score_tile, v);
      const Index first = v * kLanes<Real>,
                  queries = std::min<Index>(kLanes<Real>, at.rows - first);
      const KeyRange keys = at.keys_of(v);
      for (Index j = keys.begin; j < keys.end; ++j) {
        const auto pair = pairs(j, dots.load(j, v));
        visit(VisitedPairs<Score, Real>{unit, at.batch, at.head, at.query + first, queries,
                                        at.key + j, pair, scalars, hidden.load(j, v)});
      }
    }
  }

  Op op_;
  detail::OpTilesOf<Op> of_op_;
  OpTiles<Real> tiles_;
  DerivedKeys<Real> keys_;
  CallContext<Real> c_;
};

}  // namespace HEED_ABI
}  // namespace heed
