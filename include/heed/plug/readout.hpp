// SPDX-License-Identifier: Apache-2.0
#pragma once

// Plug point 3, the readout: what happens to the mixed values of a row?
//
// A formula of the row is enough: plug/readout_formula.hpp derives the rest from it. What no formula says is written by hand: a
// readout inherits PlainReadout and overrides the members that differ; this is the whole list:
//
//   forward(panel)                          panel.tile: mixed rows in, output rows out. No default
//   vjp(panel, grad)                        panel.tile: gradient of the output in, gradient of the
//                                           mixed rows out; sets panel.delta = rowsum(dmixed o mixed),
//                                           adds to dquery, down_key, down_value, sets dextra, adds
//                                           parameter gradients to `grad`. No default
//   reference<S>(context) -> void           the same in plain loops, over all rows of a call. No default
//   parameters                              names its parameters and options (plug/parameters.hpp)
//   identity                      false     the engine skips it
//   saves_mixed                   false     vjp needs the mixed rows (else it gets the output rows)
//   uses_query                    false     reads panel.query
//   uses_own_rows                 false     reads panel.own_key and panel.own_value, rows of the query's own token: those of
//                                           the key at the query's position (Inputs::first_query), which must exist
//   value(x)                                f(x) of one number: each number of the values becomes f of it before rows are
//                                           mixed; heed derives f'. own_value, too, is then f of the caller's. It reads no
//                                           parameter. Each call, a step from a cache too, transforms all values anew
//   uses_lse                      false     reads panel.lse, adds to panel.dlse; the normaliser differentiates_lse
//   uses_extra                    false     reads panel.extra; extra_dim(geometry), its width, and extra_name(): one dense input
//                                           per query row, as wide as a geometry asks for. Several inputs, or one that heads
//                                           share, are query_inputs
//   query_inputs                  0         numbers of the query's token that it reads (plug/token_inputs.hpp):
//                                           panel.query_inputs, adds to panel.dquery_inputs
//   uses_score                    false     works on the parameters of the score beside it: forward, vjp, reference,
//                                           work_rows and check get the score as their last argument, vjp the
//                                           score's gradient behind it
//   work_rows(geometry, backward)     0     scratch lane rows that it needs
//   counts_steps                  false     writes panel.steps, a row's result about its steps, which a loss may read, and
//                                           reads panel.dsteps; forward() and backward() of a call have them beside out.
//                                           Reference: context.steps. without_steps() is null if the current options give
//                                           steps, else it says why there are none. step_columns(geometry), 1: numbers per
//                                           row; steps_are_time(), true: they are the time that the row takes
//   diagnostics, diagnostic_name(i)   0     numbers per row that it reports
//   diagnostic_is_index(i)        false     report i is an index: it has no mean over rows
//   gates                         false     its output for mixed rows of ones is a gate, which reports show
//   rehearses                     false     may ask for a rehearsal: see below
//   check(geometry, where), keep_jointly()  see plug/parameters.hpp
//   using PlaceFree                         a promise (plug/promises.hpp)
//
// A row's answer may depend on the other rows of the call, if the readout says so by rehearses. Where needs_rehearsal() is
// true, forward() first runs the op with rehearsal() in place of the readout. Both passes then run the op after
// settle(saved), which sees the reports of the rehearsal, or of the forward pass.
//
// Rows of a tile are columns of the value, lanes are queries: a product with a learnt matrix, and its derivatives, are a
// LinearMap (plug/linear_map.hpp). Lanes from valid_lanes on are padding: they may hold any finite number and must add to no
// parameter gradient. No result of a lane may depend on another lane.

#include <heed/core/geometry.hpp>
#include <heed/plug/parameters.hpp>
#include <heed/plug/promises.hpp>
#include <heed/plug/tile.hpp>

#include <vector>

namespace heed {
inline namespace HEED_ABI {

template <class Real>
struct ReadoutPanel {
  Geometry geometry;
  // Lane 0 is query `first_row` of the call; its position is geometry.query_position(first_row).
  Index batch = 0, head = 0, first_row = 0;
  Index valid_lanes = 0;
  int vectors = 0;
  LaneTile<Real> tile;                      // [dim_v][lanes]
  LaneTile<const Real> query;               // [dim_qk][lanes], unscaled
  LaneTile<const Real> own_key, own_value;  // [dim_qk][lanes], [dim_v][lanes]
  LaneTile<const Real> extra;               // [extra_dim][lanes]
  LaneTile<const Real> query_inputs;        // [query_inputs][lanes]
  LaneTile<const Real> lse;                 // [map][lanes]: -infinity for a row that sees no key
  LaneTile<Real> work;                      // [work_rows][lanes]
  LaneTile<Real> diagnostics;               // out, [diagnostics][lanes]
  LaneTile<Real> steps;                     // out, [step_columns][lanes] (counts_steps)
  // Backward only.
  LaneTile<const Real> saved;           // [dim_v][lanes]: mixed rows or output rows (saves_mixed)
  Real* delta = nullptr;                // out, [lanes]
  LaneTile<Real> dquery;                // add, [dim_qk][lanes]
  LaneTile<Real> down_key, down_value;  // add: gradients of own_key and own_value
  LaneTile<Real> dextra;                // out, [extra_dim][lanes]
  LaneTile<Real> dquery_inputs;         // add, [query_inputs][lanes]
  LaneTile<Real> dlse;                  // add, [map][lanes] (uses_lse)
  LaneTile<const Real> dsteps;          // [step_columns][lanes]: dL/dsteps (counts_steps)
};

// The rows that a reference() of a readout may read, dense and in (batch, heads, len, dim) order.
// `out` holds the mixed rows at first.
template <class S>
struct ReadoutContext {
  Geometry geometry;
  std::vector<S> out;
  std::vector<S> query, key, value, extra;
  std::vector<std::vector<S>> lse;               // [map][batch * heads * len_q]
  std::vector<std::vector<double>> diagnostics;  // [diagnostics][rows]
  std::vector<S> query_inputs = {};              // (batch, heads, len_q, query_inputs)
  std::vector<S> steps = {};  // out, [row][step_columns], if the readout gives steps

  [[nodiscard]] S* out_row(Index b, Index h, Index i) {
    return out.data() + geometry.row_index(b, h, i) * geometry.dim_v;
  }
  [[nodiscard]] const S* query_row(Index b, Index h, Index i) const {
    return query.data() + ((b * geometry.query_heads + h) * geometry.len_q + i) * geometry.dim_qk;
  }
  [[nodiscard]] const S* key_row(Index b, Index kv_head, Index j) const {
    return key.data() + ((b * geometry.kv_heads + kv_head) * geometry.len_kv + j) * geometry.dim_qk;
  }
  [[nodiscard]] const S* value_row(Index b, Index kv_head, Index j) const {
    return value.data() +
           ((b * geometry.kv_heads + kv_head) * geometry.len_kv + j) * geometry.dim_v;
  }
  // Rows of the query's own token.
  [[nodiscard]] const S* own_key_row(Index b, Index h, Index i) const {
    return key_row(b, geometry.kv_head(h), geometry.query_position(i));
  }
  [[nodiscard]] const S* own_value_row(Index b, Index h, Index i) const {
    return value_row(b, geometry.kv_head(h), geometry.query_position(i));
  }
  [[nodiscard]] const S* extra_row(Index b, Index h, Index i, Index extra_dim) const {
    return extra.data() + geometry.row_index(b, h, i) * extra_dim;
  }
  // Number c of the `count` numbers that the readout reads of a query's token.
  [[nodiscard]] const S& query_input(Index b, Index h, Index i, Index c, Index count) const {
    return query_inputs[std::size_t(geometry.row_index(b, h, i) * count + c)];
  }
};

namespace detail {

// Has the readout a value(x)?
template <class Readout>
inline constexpr bool maps_values = requires(const Readout& readout, const double& x) {
  readout.value(x);
};

}  // namespace detail

// delta = rowsum(a o b) per lane, summed in the order and with the roundings of panel_gemm: in a row that attends to one
// key alone, delta then equals that key's X bit by bit, and dscore is exactly 0.
template <class Real, class A, class B>
inline void lane_dot(const LaneTile<A>& a, const LaneTile<B>& b, int vectors, Real* delta) {
  for (int v = 0; v < vectors; ++v) {
    Pack<Real> sum = Real(0);
    for (Index c = 0; c < a.rows; ++c)
      sum = mul_add(Pack<Real>(a.load(c, v)), Pack<Real>(b.load(c, v)), sum);
    sum.store(delta + v * kLanes<Real>);
  }
}

// Base of a readout that needs nothing but the mixed rows.
struct PlainReadout {
  static constexpr bool identity = false, saves_mixed = false;
  static constexpr bool uses_query = false, uses_own_rows = false, uses_extra = false;
  static constexpr bool uses_lse = false;
  static constexpr bool uses_score = false, gates = false, rehearses = false, counts_steps = false;
  static constexpr int diagnostics = 0, query_inputs = 0;
  [[nodiscard]] static const char* diagnostic_name(int) { return ""; }
  [[nodiscard]] static bool diagnostic_is_index(int) { return false; }
  [[nodiscard]] static const char* extra_name() { return "extra"; }
  [[nodiscard]] Index extra_dim(const Geometry&) const { return 0; }
  [[nodiscard]] Index work_rows(const Geometry&, bool) const { return 0; }
  [[nodiscard]] Index step_columns(const Geometry&) const { return 1; }
  [[nodiscard]] bool steps_are_time() const { return true; }
  [[nodiscard]] bool needs_rehearsal() const { return false; }
  // The end of an error's sentence about steps that were requested.
  [[nodiscard]] const char* without_steps() const {
    return "the op's readout counts no steps (plug/readout.hpp)";
  }
  void check(const Geometry&, const char*) const {}
  void keep_jointly() {}
};

// out = mixed
template <class Real>
struct Identity : PlainReadout {
  static constexpr bool identity = true;
  using PlaceFree = Identity;

  void forward(const ReadoutPanel<Real>&) const {}
  void vjp(const ReadoutPanel<Real>& panel, Identity&) const {
    lane_dot<Real>(panel.tile, panel.saved, panel.vectors, panel.delta);
  }
  template <class S>
  void reference(ReadoutContext<S>&) const {}
};

}  // namespace HEED_ABI
}  // namespace heed
