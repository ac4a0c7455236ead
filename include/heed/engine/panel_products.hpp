// SPDX-License-Identifier: Apache-2.0
#pragma once

// The products of a panel's weights with rows of keys, values and queries, one tile after the other:
//
//   add_lanes   out[column][lane] += sum over keys of rows[key][column] weights[key][lane]        O, dQ
//   add_rows    out[key][column]  += sum over lanes of weights[key][lane] rows[lane][column]      dV, dK
//
// Hidden pairs give nothing, whatever stands in their rows (tile/products.hpp). What that takes is found once per tile at most, and
// only if a product asks: which pairs are hidden, and whether rows of the tile are finite.

#include <heed/engine/queries.hpp>
#include <heed/engine/tile/panel_rows.hpp>

#include <utility>

namespace heed {
inline namespace HEED_ABI {
namespace detail {

// to[key][feature] += sum over lanes of from[feature][key][lane], for the first `count` of so many features.
template <class Real>
void add_sums_of_lanes(const Real* from, Index keys, Index count, Real* to, Index features) {
  constexpr Index W = kLanes<Real>;
  for (Index i = 0; i < count; ++i)
    for (Index j = 0; j < keys; j += W) {
      const Index some = std::min(W, keys - j);
      Pack<Real> lanes[std::size_t(W)];
      for (Index k = 0; k < W; ++k)
        lanes[k] = k < some ? Pack<Real>::load(from + (i * keys + j + k) * W) : Pack<Real>(Real(0));
      const Pack<Real> sums = sums_of_lanes(lanes);
      for (Index k = 0; k < some; ++k) to[(j + k) * features + i] += sums.v[k];
    }
}

// Sums in lanes. Empty ones stand for zeros, whatever the tile holds, and begin with the first product instead.
template <class Real>
struct LaneSums {
  LaneTile<Real> tile;
  bool empty = true;

  void fill() {
    if (std::exchange(empty, false)) tile.fill(Real(0));
  }
};

template <class Real>
class PanelProducts {
 public:
  PanelProducts(const CallContext<Real>& c, Scratch<Real>& scratch)
      : c_(c),
        hidden_(take_lanes(scratch, c.plan.tile, c.plan.lanes)),
        copy_(scratch.take(c.plan.tile * std::max(c.geometry.dim_qk, c.geometry.dim_v))) {}

  // Keys and values of another head come.
  void forget() { finite_at_ = -1; }
  // The tile at hand, of which `panel` sees some pair.
  void begin(const Panel<Real>& panel, const PanelTile& tile) {
    panel_ = &panel;
    tile_ = tile;
    filled_ = false;
  }

  // May a pair be hidden? Lanes beyond the last query are: what they hold must not enter sums over lanes.
  [[nodiscard]] bool hides() const { return tile_.kind == TileKind::partial || c_.mask.has_bias(); }
  // -infinity where a pair is hidden, else 0.
  [[nodiscard]] LaneTile<Real> hidden() {
    const LaneTile<Real> own = hidden_.part(0, tile_.at.keys);
    if (!filled_) panel_->fill_hidden(tile_.at, tile_.kind, own);
    filled_ = true;
    return own;
  }
  // Room for a tile of rows.
  [[nodiscard]] Real* copy() const { return copy_; }
  [[nodiscard]] LaneTile<Real> hidden_or_none() { return hides() ? hidden() : LaneTile<Real>{}; }

  // pairs: what holds such rows in pairs, where precision is mixed.
  void add_lanes(const Rows<Real>& rows, const LaneTile<Real>& weights, const LaneTile<Real>& out,
                 PairedRows* pairs = nullptr) {
    LaneSums<Real> sums{out, false};
    add_lanes(rows, weights, sums, pairs);
  }
  void add_lanes(const Rows<Real>& rows, const LaneTile<Real>& weights, LaneSums<Real>& out,
                 PairedRows* pairs = nullptr) {
    const TilePlace& at = tile_.at;
    if constexpr (std::is_same_v<Real, float>)
      if (pairs && c_.in_bf16(at.rows)) {
        out.fill();
        const bool guarded = tile_.hides_pairs && !pairs->finite(rows);
        return c_.bf16->add_lane_product(*pairs, rows, weights,
                                         guarded ? hidden() : LaneTile<Real>{}, c_.plan.vectors,
                                         out.tile);
      }
    const bool plainly = !tile_.hides_pairs || finite(rows);
    const LaneTile<Real> hidden = plainly ? LaneTile<Real>{} : this->hidden();
    if (!plainly || at.rows <= kFewRows<Real>) out.fill();
    for_strips(at, c_.plan.vectors, [&](const Strip& strip) {
      const Rows<Real> own = rows.part(strip.keys.begin, strip.keys.size());
      const LaneTile<Real> of = strip.of(weights), to = strip.lanes_of(out.tile);
      // The first product fills all lanes, or finds zeros in them.
      const bool begins = out.empty && strip.vectors == c_.plan.vectors;
      if (begins) out.empty = false;
      out.fill();
      if (plainly)
        add_lane_product(own, of, strip.vectors, at.rows, to,
                         begins ? Store::overwrite : Store::add);
      else
        add_lane_product_guarded(own, of, strip.of(hidden), strip.vectors, at.rows, to, copy_);
    });
  }
  // For some keys of the tile, counted from its first, as `out` is. plainly: no pair needs a guard; else of.clean is made.
  void add_rows(const LaneTile<Real>& weights, const KeyRange& keys, const PanelRows<Real>& of,
                bool plainly, Real* out, Index stride) {
    const LaneTile<Real> hidden = plainly ? LaneTile<Real>{} : this->hidden();
    for_strips(tile_.at, c_.plan.vectors, [&](Strip strip) {
      strip.keys = {std::max(strip.keys.begin, keys.begin), std::min(strip.keys.end, keys.end)};
      if (strip.keys.size() == 0) return;
      const Index first = strip.first_vector * kLanes<Real>;
      const Index count = std::min<Index>(strip.vectors * kLanes<Real>, of.rows.count - first);
      const LaneTile<Real> own = strip.of(weights);
      Real* to = out + strip.keys.begin * stride;
      if (plainly)
        add_row_product(own, of.rows.part(first, count), to, stride);
      else
        add_row_product_guarded(own, strip.of(hidden), of.rows.part(first, count),
                                of.clean.part(first, count), to, stride);
    });
  }
  // Adds the tile's dscores to the gradient of a bias, which may be shared by queries.
  void add_bias(const LaneTile<Real>& dscores, const TensorView<Real>& bias) const {
    const TilePlace& at = tile_.at;
    Real* to = BoundMask<Real>::broadcast_row(bias, at.batch, at.head, at.query) + at.key;
    const Index step = bias.strides().row;
    for_strips(at, c_.plan.vectors, [&](const Strip& strip) {
      const Index first = strip.first_vector * kLanes<Real>;
      const Index rows = std::min<Index>(strip.vectors * kLanes<Real>, at.rows - first);
      const LaneTile<Real> own = strip.of(dscores);
      Real* from = to + strip.keys.begin;
      if (bias.shape().len > 1)
        return add_unpacked_lanes(own.data, own.lanes, rows, own.rows, from + first * step, step);
      for (Index i = 0; i < rows; ++i)
        for (Index j = 0; j < own.rows; ++j) from[j] += own.row(j)[i];
    });
  }

 private:
  // The panels of a group ask in turn about the same rows.
  [[nodiscard]] bool finite(const Rows<Real>& rows) {
    const bool known = tile_.at.key == finite_at_ && rows.data == finite_rows_.data &&
                       rows.count == finite_rows_.count && rows.columns == finite_rows_.columns;
    if (!known) finite_ = all_finite(rows);
    finite_at_ = tile_.at.key;
    finite_rows_ = rows;
    return finite_;
  }

  const CallContext<Real>& c_;
  LaneTile<Real> hidden_;
  Real* copy_;  // a finite copy of a tile of keys or values
  const Panel<Real>* panel_ = nullptr;
  PanelTile tile_{};
  bool filled_ = false;
  Index finite_at_ = -1;  // the first key of the rows that were looked at last
  Rows<Real> finite_rows_;
  bool finite_ = true;
};

}  // namespace detail
}  // namespace HEED_ABI
}  // namespace heed
