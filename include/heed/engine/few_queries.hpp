// SPDX-License-Identifier: Apache-2.0
#pragma once

// Streaming panels of few queries, as in decoding: each query has a row of scores, keys along the lanes,
// so that vectors are full. What DerivedQueries and TileMask do to tiles, for rows. Panels of several heads that
// read the same keys or values read them together.

#include <heed/core/fixed_list.hpp>
#include <heed/engine/queries.hpp>

#include <span>

namespace heed {
inline namespace HEED_ABI {
namespace detail {

template <class Real>
class FewQueries {
 public:
  using P = Pack<Real>;

  // The pairs of a panel with some keys of a tile, which it sees.
  struct Part {
    const Panel<Real>* panel;
    PanelTile tile;
    LaneTile<Real> out;  // [dim_v][lanes], what is mixed
    Index first;         // its first query among those of all panels
  };

  FewQueries(const CallContext<Real>& c, Scratch<Real>& scratch)
      : c_(c),
        stride_(whole_vectors<Real>(c.plan.tile)),
        dots_(most_queries(c)),
        accumulates_(most_queries(c)) {
    const Index rows = most_queries(c);
    rows_ = scratch.take(rows * stride_);
    projected_ = scratch.take(c.keys.needs().rank > 0 ? stride_ : 0);
    hidden_ = scratch.take(stride_);
  }
  // The most queries of the panels that a worker takes together, where they may all be of few queries; else of the last
  // panel.
  [[nodiscard]] static Index most_queries(const CallContext<Real>& c) {
    const Index len = c.geometry.len_q, most = kFewRows<Real>;
    const bool together = len <= most || c.plan.lanes <= most;
    return (together ? c.plan.group : 1) * std::min(len, most);
  }

  // Scaled dot products of all queries.
  void dot(std::span<const Part> parts) {
    const auto& needs = c_.keys.needs();
    // Transformed keys, and weights of columns, may be others for each head.
    const bool shared = needs.keys_by_group && !c_.op.score.columns &&
                        (needs.transformed == 0 || !needs.per_query_head);
    for_runs(parts, shared, [&](std::span<const Part> run) {
      dots_.clear();
      for (const Part& part : run)
        for (Index i = 0; i < part.tile.at.rows; ++i)
          dots_.emplace(part.panel->query[0].few_row(i), row(part, i));
      const TilePlace& at = run[0].tile.at;
      run[0].panel->query[0].dot_keys(at, {dots_.data(), dots_.size()});
    });
  }

  // Dot products become scores; top[i] is raised to the largest of query i.
  void score(const Part& part, Real* top) const {
    const PanelTile& tile = part.tile;
    for (Index i = 0; i < tile.at.rows; ++i) {
      Real* row = this->row(part, i);
      part.panel->query[0].row_scores(tile.at, i, row, projected_);
      if (c_.mask.has_slopes()) add_slopes(tile.at, i, row);
      if (c_.mask.has_bias()) add_bias(tile.at, i, row);
      if (tile.hides_pairs) hide(tile.at, i, row);
      std::fill(row + tile.at.keys, row + whole_vectors<Real>(tile.at.keys), -kInfinity<Real>);
      P largest = top[i];
      for (Index j = 0; j < tile.at.keys; j += kLanes<Real>)
        largest = max(P::load(row + j), largest);
      top[i] = max_lanes(largest);
    }
  }

  // Scores become weights before finish(); their sums are added to the states.
  void weigh(const Part& part, const LaneTile<Real>& states) const {
    const PanelTile& tile = part.tile;
    for (Index i = 0; i < tile.at.rows; ++i)
      c_.op.normaliser.weigh_row(row(part, i), tile.at.keys, i, states);
  }
  void drop(const Part& part) const {
    const PanelTile& tile = part.tile;
    if (!part.panel->dropout.drops()) return;
    for (Index i = 0; i < tile.at.rows; ++i) {
      Real* row = this->row(part, i);
      Dropper<Real> dropper = part.panel->dropout.along_keys(i, tile.at.key);
      for (Index j = 0; j < tile.at.keys; j += kLanes<Real>) {
        dropper.next();
        dropper(P::load(row + j)).store(row + j);
      }
    }
  }

  // out[column][i] += sum over keys of weights * values, for parts that hide no pair. Values are read as they are
  // stored.
  void mix(std::span<const Part> parts) {
    for_runs(parts, true, [&](std::span<const Part> run) {
      accumulates_.clear();
      for (const Part& part : run)
        for (Index i = 0; i < part.tile.at.rows && !part.tile.hides_pairs; ++i)
          accumulates_.emplace(row(part, i), part.out.data + i);
      const TilePlace& at = run[0].tile.at;
      const StoredView<const Real>& value = c_.in.value;
      const Index head = c_.geometry.kv_head(at.head), columns = c_.geometry.dim_v;
      const Index count = Index(accumulates_.size()), lanes = c_.plan.lanes;
      if (value.narrow())
        value.storage()->mix(value.rows(at.batch, head, at.key), at.keys, columns,
                             accumulates_.data(), count, 1, lanes);
      else if (value.page_rows() == 1)
        row_accumulate(ScatteredRows<Real>{value.plain().page_table() + at.key}, at.keys, columns,
                       accumulates_.data(), count, 1, lanes);
      else
        row_accumulate(rows_of(value.plain(), at.batch, head, at.key), at.keys, columns,
                       accumulates_.data(), count, 1, lanes);
    });
  }
  // The same where pairs are hidden. What the value of a hidden key holds does not matter; `copy` has room for the
  // tile's values.
  void accumulate_visible(const Part& part, const Rows<Real>& values, Real* copy) {
    const Index rows = part.tile.at.rows;
    accumulates_.clear();
    for (Index i = 0; i < rows; ++i) accumulates_.emplace(row(part, i), part.out.data + i);
    const auto add = [&](const Rows<Real>& own, const AccumulateQuery<Real>* queries, Index count) {
      row_accumulate(StoredRows<Real>{own.data, own.stride}, own.count, own.columns, queries, count,
                     1, part.out.lanes);
    };
    if (all_finite(values)) return add(values, accumulates_.data(), rows);
    for (Index i = 0; i < rows; ++i)
      add(without_hidden(part.tile.at, i, values, copy), accumulates_.data() + i, 1);
  }

 private:
  [[nodiscard]] Real* row(const Part& part, Index i) const {
    return rows_ + (part.first + i) * stride_;
  }
  // body(run) for runs of parts of the same keys; of one part each unless they are `shared`.
  template <class Body>
  static void for_runs(std::span<const Part> parts, bool shared, Body&& body) {
    while (!parts.empty()) {
      const TilePlace& at = parts[0].tile.at;
      std::size_t count = 1;
      while (shared && count < parts.size() && parts[count].tile.at.key == at.key &&
             parts[count].tile.at.keys == at.keys)
        ++count;
      body(parts.first(count));
      parts = parts.subspan(count);
    }
  }

  void add_slopes(const TilePlace& at, Index i, Real* row) const {
    const Real slope = c_.mask.slope(at.head);
    const Real origin = Real(at.query + i + c_.mask.slope_shift() - at.key);
    for (Index j = 0; j < at.keys; ++j) row[j] -= slope * std::abs(origin - Real(j));
  }

  void add_bias(const TilePlace& at, Index i, Real* row) const {
    const Real* bias = c_.mask.bias_row(at.batch, at.head, at.query + i) + at.key;
    for (Index j = 0; j < at.keys; ++j)
      row[j] = bias[j] == -kInfinity<Real> ? -kInfinity<Real> : row[j] + bias[j];
  }

  // -infinity where the mask hides the pair.
  void hide(const TilePlace& at, Index i, Real* row) const {
    c_.mask.for_hidden_keys(at.batch, at.head, at.query + i, at.key, at.key + at.keys,
                            [&](Index j) { row[j - at.key] = -kInfinity<Real>; });
  }

  // A copy of the values with zeros where query i does not see the key.
  [[nodiscard]] Rows<Real> without_hidden(const TilePlace& at, Index i, const Rows<Real>& values,
                                          Real* copy) const {
    std::fill(hidden_, hidden_ + at.keys, Real(0));
    hide(at, i, hidden_);
    for (Index j = 0; j < values.count; ++j)
      for (Index col = 0; col < values.columns; ++col)
        copy[j * values.columns + col] = hidden_[j] == Real(0) ? values.row(j)[col] : Real(0);
    return {copy, values.count, values.columns, values.columns};
  }

  const CallContext<Real>& c_;
  Index stride_;
  FixedList<DotQuery<Real>> dots_;
  FixedList<AccumulateQuery<Real>> accumulates_;
  Real *rows_, *projected_, *hidden_;
};

}  // namespace detail
}  // namespace HEED_ABI
}  // namespace heed
