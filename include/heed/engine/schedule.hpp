// SPDX-License-Identifier: Apache-2.0
#pragma once

// How busy a backward call keeps its workers: its visits, gates and masks as they are, on a clock that counts the flops of products
// alone. Every worker has a processor of its own, and all are equally fast.

#include <heed/engine/backward_walk.hpp>

#include <queue>
#include <vector>

namespace heed {
inline namespace HEED_ABI {
namespace detail {

template <class Real>
class BackwardSchedule {
 public:
  BackwardSchedule(const CallContext<Real>& c, const BackwardShared<Real>& shared)
      : c_(c),
        s_(shared),
        group_(c),
        gates_(std::size_t(s_.order.families() * c.plan.tiles * s_.gates.count()), 0.0),
        turns_(std::size_t(s_.order.families()), 0.0) {
    for (Index i = 0; i < c.plan.group; ++i) group_.emplace(c, none_);
  }

  // The share of their time in which so many workers compute; 1 where there is nothing to do.
  [[nodiscard]] double busy(int workers) {
    struct Worker {
      double free = 0;  // when it ends its visit
      Index family = Visits::kNone;
      bool operator<(const Worker& other) const { return free > other.free; }  // the first on top
    };
    std::priority_queue<Worker> all;
    for (int w = 0; w < workers; ++w) all.push({});
    Visits visits(s_.order);
    double end = 0;
    work_ = 0;
    // Invariant: all visits that began before now have been through all gates, at the times that gates_ has of the last of them.
    // Later ones of a family wait for them alone.
    while (!all.empty()) {
      Worker worker = all.top();
      all.pop();
      const auto visit = visits.next(worker.family);
      if (!visit) continue;
      now_ = worker.free;
      run(*visit);
      end = std::max(end, now_);
      worker.free = now_;
      all.push(worker);
    }
    return end > 0 ? work_ / (end * workers) : 1;
  }

 private:
  struct My {
    Panel<Real> panel;
    My(const CallContext<Real>& c, Scratch<Real>& scratch) : panel(c, scratch, true) {}
  };
  using Sum = TileGates::Sum;

  // As BackwardWorker::run().
  void run(const VisitingOrder::Visit& visit) {
    group_.move_to(visit.batch, visit.head, 1, visit.group);
    const bool own_rows = c_.op.readout.traits.uses_own_rows;
    const KeyRange tiles = own_rows ? KeyRange{0, c_.plan.tiles} : group_.tiles();
    for (Index t = tiles.begin; t < tiles.end; ++t) {
      double pairs = 0;
      KeyRange keys{(t + 1) * c_.plan.tile, t * c_.plan.tile};
      group_.for_parts(t, [&](const KeyRange& part) {
        for (const My& my : group_.active()) {
          const PanelTile tile = my.panel.tile(part);
          if (tile.kind == TileKind::empty) continue;
          pairs += computed_pairs<Real>(tile.at, c_.plan.vectors);
          keys = {std::min(keys.begin, tile.at.key),
                  std::max(keys.end, tile.at.key + tile.at.keys)};
        }
      });
      const bool one = group_.active().size() == 1 || c_.op.streams();
      run_tile(visit, t, keys, pairs, one && group_.parts(t) == 1 && !own_rows);
    }
    if (!s_.sums_queries) return;
    double& turn = turns_[std::size_t(visit.family)];
    turn = now_ = std::max(now_, turn);
  }
  // As PanelGradients::add() of all panels.
  void run_tile(const VisitingOrder::Visit& visit, Index t, const KeyRange& keys, double pairs,
                bool leaves) {
    const Index place = visit.family * c_.plan.tiles + t;
    const auto products = [&](Index width) { return 2 * pairs * double(width); };
    const Index dim_v = c_.geometry.dim_v;
    Index width = 0;  // of all maps
    for (int m = 0; m < c_.op.maps(); ++m)
      width += c_.op.normaliser.source(c_.geometry, visit.head, m).width;
    compute(products(width + dim_v + width));  // scores, X, dQ
    add(place, t, Sum::keys, keys, products(width), leaves);
    add(place, t, Sum::values, keys, products(dim_v), leaves);
    for (Index g = 0; g < s_.gates.count(); ++g) {
      now_ = std::max(now_, gate(place, g));
      if (!leaves) gate(place, g) = now_;
    }
  }
  // As Passage::add(). Gates that it does not pass are passed at the tile's end.
  void add(Index place, Index t, Sum sum, const KeyRange& keys, double flops, bool leaves) {
    for (Index s = 0; s < s_.gates.strips(); ++s) {
      const KeyRange strip = s_.gates.keys(t, s);
      const Index size =
          KeyRange{std::max(keys.begin, strip.begin), std::min(keys.end, strip.end)}.size();
      if (size == 0) continue;
      double& passed = gate(place, s_.gates.gate(sum, s));
      now_ = std::max(now_, passed);
      compute(flops * double(size) / double(keys.size()));
      if (leaves) passed = now_;
    }
  }
  void compute(double flops) {
    now_ += flops;
    work_ += flops;
  }
  [[nodiscard]] double& gate(Index place, Index gate) {
    return gates_[std::size_t(place * s_.gates.count() + gate)];
  }

  const CallContext<Real>& c_;
  const BackwardShared<Real>& s_;
  Scratch<Real> none_;
  PanelGroup<Real, My> group_;
  std::vector<double> gates_;  // [family][tile][gate]: when the last visitor passed
  std::vector<double> turns_;  // [family]: when the last visitor had added to rows of query
  double now_ = 0, work_ = 0;
};

}  // namespace detail
}  // namespace HEED_ABI
}  // namespace heed
