// SPDX-License-Identifier: Apache-2.0
#pragma once

// An op's readout by itself, on mixed rows that were computed elsewhere: by parts of the keys whose states were joined. It asks of
// no key but, where it uses_own_rows, those of the queries' own tokens.
//
//   forward    out, steps, diagnostics = readout(mixed rows)
//   backward   dL/dmixed from dL/dout, dL/d of the numbers of tokens that it reads; adds to the gradients of query, extra and
//              own rows, and to dL/dlse

#include <heed/core/parallel.hpp>
#include <heed/engine/queries.hpp>

#include <algorithm>
#include <vector>

namespace heed {
inline namespace HEED_ABI {
namespace detail {

// The queries of a call, or of a share of it, panel by panel. `in` has its tensors as the engine reads them (rows_of_call()).
template <class Real>
class ReadoutPass {
 public:
  ReadoutPass(const OpTiles<Real>& op, const Geometry& g, const Operands<Real>& in,
              const Options& options)
      : mask_(none_, g, "heed: a readout"),
        keys_(op, g, in.key),
        c_(make_context(op, g, mask_, in, keys_, options,
                        plan_call<Real>(op, g, mask_, options, 0, true))),
        threads_(resolve_threads(options.threads)) {
    c_.plan.vectors = kPanelVectors;
    c_.plan.lanes = kPanelLanes<Real>;
  }
  ReadoutPass(const ReadoutPass&) = delete;  // c_ refers to its other members

  // rows (batch, heads, queries at hand, dim_v) in place: mixed rows become those of out. lse [map][row]. `saved`, if it is
  // given, receives the readout's diagnostics behind those of the normaliser.
  void forward(Real* rows, const Real* lse, const TensorView<Real>& steps,
               Saved<Real>* saved) const {
    for_panels(false, [&](const TilePlace& place, Lanes& lanes) {
      ReadoutPanel<Real> panel = load(place, lanes, lanes.tile, rows, lse);
      c_.op.readout.read_out(panel);
      unload(place, lanes.tile, rows);
      const ReadoutTraits& readout = c_.op.readout.traits;
      if (readout.counts_steps && steps.given())
        unpack_lanes(panel.steps.data, lanes.tile.lanes, place.rows, panel.steps.rows,
                     row_of(steps, place), steps.strides().row);
      for (int d = 0; saved && d < readout.diagnostics; ++d)
        std::copy_n(
            panel.diagnostics.row(d), place.rows,
            saved->diagnostics[std::size_t(c_.op.normaliser.traits.diagnostics + d)].data() +
                first_row(place));
    });
  }

  // What backward adds to. Views that are not given are left out.
  struct Gradients {
    TensorView<Real> query, key, value, extra;
    Real* dlse;           // [map][row]
    Real* dquery_inputs;  // [row][inputs of the readout], written
  };
  // rows in place: dL/dout becomes dL/dmixed. `known`: mixed rows, or those of out, as the readout asks (saves_mixed). The
  // gradients of the parameters are added to `sums`, in the order of visit().
  void backward(const OpVjps<Real>& vjps, Real* rows, const Real* known, const Real* lse,
                const TensorView<const Real>& grad_steps, const Gradients& to,
                std::vector<double>& sums) const {
    const Geometry& g = c_.geometry;
    std::vector<std::vector<double>> of_head(std::size_t(g.batch * g.heads));
    for_panels(true, [&](const TilePlace& place, Lanes& lanes) {
      OpGradient<Real> own(vjps);
      ReadoutPanel<Real> panel = load(place, lanes, lanes.tile, rows, lse);
      pack(place, known, lanes.known);
      panel.saved = lanes.known.constant();
      panel.delta = lanes.delta;
      for (const auto& tile :
           {lanes.dquery, lanes.dextra, lanes.down_key, lanes.down_value, lanes.dinputs})
        tile.fill(Real(0));
      panel.dquery = lanes.dquery;
      panel.dextra = lanes.dextra;
      panel.dquery_inputs = lanes.dinputs;
      panel.down_key = lanes.down_key;
      panel.down_value = lanes.down_value;
      lanes.dlse.fill(Real(0));
      panel.dlse = lanes.dlse;
      if (c_.op.readout.traits.counts_steps) {
        panel.steps.fill(Real(0));
        if (grad_steps.given())
          pack_lanes(row_of(grad_steps, place), grad_steps.strides().row, place.rows,
                     panel.steps.rows, panel.steps.data, lanes.tile.lanes);
        panel.dsteps = panel.steps.constant();
      }
      vjps.readout.read_out_vjp(panel, *own.readout, *own.score);
      unload(place, lanes.tile, rows);
      const auto add = [&](const LaneTile<Real>& from, const TensorView<Real>& view, Index head) {
        if (view.given() && from.rows > 0)
          add_unpacked_lanes(from.data, from.lanes, place.rows, from.rows,
                             view.row(place.batch, head, place.query), view.strides().row);
      };
      add(lanes.dquery, to.query, place.head);
      if (c_.op.readout.traits.uses_extra) add(lanes.dextra, to.extra, place.head);
      add(lanes.down_key, to.key, g.kv_head(place.head));
      add(lanes.down_value, to.value, g.kv_head(place.head));
      if (lanes.dinputs.rows > 0)
        unpack_lanes(lanes.dinputs.data, lanes.dinputs.lanes, place.rows, lanes.dinputs.rows,
                     to.dquery_inputs + first_row(place) * lanes.dinputs.rows, lanes.dinputs.rows);
      for (int m = 0; m < c_.op.maps(); ++m)
        for (Index i = 0; i < place.rows; ++i)
          to.dlse[m * g.query_rows() + first_row(place) + i] += lanes.dlse.row(m)[i];
      std::vector<double>& head_sums = of_head[std::size_t(place.batch * g.heads + place.head)];
      head_sums.resize(sums.size());
      own.add_to(head_sums.data());
    });
    for (const std::vector<double>& terms : of_head)
      for (std::size_t i = 0; i < terms.size(); ++i) sums[i] += terms[i];
  }

 private:
  // A worker's lane tiles.
  struct Lanes {
    PanelReadout<Real> readout;
    LaneTile<Real> tile, known, lse, dlse, dquery, dextra, down_key, down_value, dinputs;
    Real* delta;

    Lanes(const CallContext<Real>& c, Scratch<Real>& scratch, bool backward)
        : readout(c, scratch, backward) {
      const Geometry& g = c.geometry;
      const Index lanes = c.plan.lanes;
      const auto take = [&](Index rows) {
        return LaneTile<Real>{scratch.take(rows * lanes), rows, lanes};
      };
      tile = take(g.dim_v);
      known = take(g.dim_v);
      lse = take(c.op.maps());
      dlse = take(c.op.maps());
      dquery = take(c.op.own_query_dim(g));
      dextra = take(c.op.extra_dim(g));
      down_key = take(c.op.own_row_dim(g.dim_qk));
      down_value = take(c.op.own_row_dim(g.dim_v));
      dinputs = take(c.op.readout.traits.query_inputs);
      delta = scratch.take(lanes);
    }
  };

  [[nodiscard]] Index first_row(const TilePlace& place) const {
    return c_.geometry.row_index(place.batch, place.head, place.query);
  }
  template <class Element>
  [[nodiscard]] static Element* row_of(const TensorView<Element>& view, const TilePlace& place) {
    return view.row(place.batch, place.head, place.query);
  }
  void pack(const TilePlace& place, const Real* rows, const LaneTile<Real>& to) const {
    const Index dim = c_.geometry.dim_v;
    pack_lanes(rows + first_row(place) * dim, dim, place.rows, dim, to.data, to.lanes);
  }
  void unload(const TilePlace& place, const LaneTile<Real>& from, Real* rows) const {
    const Index dim = c_.geometry.dim_v;
    unpack_lanes(from.data, from.lanes, place.rows, dim, rows + first_row(place) * dim, dim);
  }
  [[nodiscard]] ReadoutPanel<Real> load(const TilePlace& place, Lanes& lanes,
                                        const LaneTile<Real>& tile, const Real* rows,
                                        const Real* lse) const {
    pack(place, rows, tile);
    ReadoutPanel<Real> panel = lanes.readout.load(place, tile);
    lanes.lse.fill(Real(0));
    for (int m = 0; m < c_.op.maps(); ++m)
      std::copy_n(lse + m * c_.geometry.query_rows() + first_row(place), place.rows,
                  lanes.lse.row(m));
    panel.lse = lanes.lse.constant();
    return panel;
  }

  // body(place, lanes) for all panels; those of the heads that share a key-value head one after the other.
  template <class Body>
  void for_panels(bool backward, Body&& body) const {
    const Geometry& g = c_.geometry;
    const auto build = [&](Scratch<Real>& scratch) { return Lanes(c_, scratch, backward); };
    const Index elements = scratch_elements<Real>(build);
    parallel_for(g.batch * g.kv_heads, threads_, [&](Index unit) {
      Scratch<Real> scratch(elements);
      Lanes lanes = build(scratch);
      for (Index h = 0; h < g.group(); ++h)
        for (Index i = g.share.queries_before; i < g.held_queries_end(); i += c_.plan.lanes) {
          TilePlace place;
          place.batch = unit / g.kv_heads;
          place.head = unit % g.kv_heads * g.group() + h;
          place.query = i;
          place.rows = std::min(c_.plan.lanes, g.held_queries_end() - i);
          body(place, lanes);
        }
    });
  }

  Mask<Real> none_;
  BoundMask<Real> mask_;
  DerivedKeys<Real> keys_;
  CallContext<Real> c_;
  int threads_;
};

}  // namespace detail
}  // namespace HEED_ABI
}  // namespace heed
