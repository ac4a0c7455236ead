// SPDX-License-Identifier: Apache-2.0
#pragma once

// Plug point 2, the normaliser: how do the scores of a row become weights?
//
// Two kinds. A *streaming* normaliser weighs a row as it passes (plug/streaming.hpp; plug/softmax.hpp is one). A *row*
// normaliser sees whole rows of a panel at once, in scratch. It inherits PlainRows and either writes forward(row) alone, a
// formula that heed differentiates (plug/row_formula.hpp), or works on blocks itself. It overrides the members that differ.
// This is the whole list; members that name neither a block nor a row serve both kinds:
//
//   forward(row) -> a number per pair      the weights of a row as a formula; then without the next three
//   forward(block)                         block.scores[0] becomes the weights of the row. No default
//   vjp(block, grad)                       from scores and block.dweights: block.weights and
//                                          block.dscores[m]; adds parameter gradients to `grad`. No default
//   jvp(block, tangents, direction)        forward(block), and tangents of weights and lse from those of the scores
//                                          (RowTangents); `direction`, of its own type, holds those of its parameters.
//                                          Without it reference() is run on dual numbers, row by row
//   reference<S>(row) -> vector<S>         the weights of one row in plain loops (LongHandRow). No default
//   reference_lse<S>(row, map) -> S        lse in plain loops: log sum exp of the scores
//   parameters                             names its parameters and options (plug/parameters.hpp)
//   maps                             1     score maps per output head, at most kMostMaps (8)
//   diagnostics, diagnostic_name(i)  0     numbers per row that it reports
//   diagnostic_is_index(i)       false     report i is an index: it has no mean over rows
//   uses_extra                   false     reads the op's extra input, one number per row
//   query_inputs, key_inputs         0     numbers of tokens that it reads (plug/token_inputs.hpp): block.query_inputs and
//                                          block.key_inputs, adds to block.dquery_inputs and block.dkey_inputs
//   uses_query                   false     reads block.query, adds to block.dquery
//   counts_visible               false     reads block.visible
//   differentiates_lse           false     vjp adds what block.dlse asks for; else a call with a gradient of lse is
//                                          refused
//   source(geometry, h, map) -> Source     which head and columns feed map `map` of output head h; heads and
//                                          maps may read the same ones, their gradients are then summed
//   query_heads(heads) -> Index            heads that the query tensor must have
//   work_tiles(backward) -> Index    0     scratch tiles of the size of one map that it needs; a formula's are counted
//   weight_terms<S>(rows, weights) -> vector<double>      where weights are differences: the sizes of their
//                                          terms, relative to which rounding errors are measured
//   check(geometry, where), keep_jointly() see plug/parameters.hpp
//   using PlaceFree                        a promise (plug/promises.hpp)
//
// plug/row_kit.hpp has tools for whole rows that keep the laws below: sums over keys, exponentials and their
// derivatives.
//
// Rows of a block are keys, lanes are queries. A hidden pair has score -infinity; its weight and its
// dscore must be exactly 0 (select, never multiply), even where dweights is NaN, and so must be what it adds to
// dkey_inputs, even where key_inputs are NaN. A lane that sees no key has only such scores. No result of a lane may depend
// on another lane, not in its last bit.

#include <heed/core/geometry.hpp>
#include <heed/core/scalar.hpp>
#include <heed/plug/parameters.hpp>
#include <heed/plug/promises.hpp>
#include <heed/plug/tile.hpp>

#include <algorithm>
#include <array>
#include <cmath>
#include <limits>
#include <vector>

namespace heed {
inline namespace HEED_ABI {

// The tensor columns that one score map of one output head reads.
struct Source {
  Index query_head = 0, kv_head = 0;
  Index query_column = 0, key_column = 0, width = 0;
};

// The source of a map that reads the whole width of its own head.
[[nodiscard]] inline Source whole_head(const Geometry& g, Index h) {
  return {h, g.kv_head(h), 0, 0, g.dim_qk};
}

// Most score maps of an output head. Each is a row of scores per query in scratch memory, so that a
// normaliser of 8 maps over 8,192 keys takes 4 MiB of it per panel of 16 queries in float.
inline constexpr int kMostMaps = 8;

// Numbers of the tokens of keys: number c of key j, counted from the first key of a block.
template <class Real>
struct TokenRows {
  Real* data = nullptr;
  Index stride = 0;
  [[nodiscard]] Real& operator()(Index j, Index c) const { return data[j * stride + c]; }
};

// The rows of one panel, all visited keys at once.
template <class Real>
struct RowBlock {
  Index head = 0;
  int vectors = 0;                               // lanes = vectors * kLanes<Real>
  std::array<LaneTile<Real>, kMostMaps> scores;  // [keys][lanes] per map, natural-log units
  std::array<const Real*, kMostMaps>
      score_max;                // [lanes]: largest visible score, -infinity for none
  const Real* extra = nullptr;  // [lanes] (uses_extra)
  LaneTile<Real> work;          // [work_tiles * keys][lanes]
  std::array<Real*, kMostMaps>
      lse;  // out, [lanes]: log-sum-exp of each map, -infinity for no key; 0 unless set
  Index first_query = 0, first_key = 0;  // positions of lane 0 and of the first key
  const Real* visible = nullptr;         // [lanes]: keys that each query sees (counts_visible)
  LaneTile<const Real> query;            // [dim_qk][lanes], unscaled (uses_query)
  LaneTile<const Real> query_inputs;     // [query_inputs][lanes]
  TokenRows<const Real> key_inputs;      // rows of keys 0 ... keys() - 1
  Real* diagnostics = nullptr;           // out, [diagnostics][lanes]
  // Backward only.
  LaneTile<Real> dweights;                        // [keys][lanes]: gradient of the weights
  LaneTile<Real> weights;                         // out: may alias dweights
  std::array<LaneTile<Real>, kMostMaps> dscores;  // out: may alias scores
  Real* dextra = nullptr;                         // out, [lanes] (uses_extra)
  std::array<const Real*, kMostMaps>
      dlse{};                    // [lanes]: gradients of lse, null where there are none
  LaneTile<Real> dquery;         // add, [dim_qk][lanes] (uses_query)
  LaneTile<Real> dquery_inputs;  // add, [query_inputs][lanes]
  TokenRows<Real> dkey_inputs;   // add, over the lanes that are queries
  Index valid_lanes = 0;         // lanes from here on are padding and add to no parameter

  [[nodiscard]] Index keys() const { return scores[0].rows; }
  [[nodiscard]] Index lanes() const { return scores[0].lanes; }
};

// The tangents of a block's numbers, in forward mode.
template <class Real>
struct RowTangents {
  // [keys][lanes] per map. In: tangents of the scores, which may be any number where a pair is
  // hidden. Out, in map 0: tangents of the weights, 0 where hidden.
  std::array<LaneTile<Real>, kMostMaps> scores;
  std::array<Real*, kMostMaps> lse;   // out, [lanes]: 0 unless set
  const Real* extra = nullptr;        // [lanes] (uses_extra)
  LaneTile<const Real> query_inputs;  // [query_inputs][lanes]
  TokenRows<const Real> key_inputs;   // any number where a key is hidden
  LaneTile<const Real> query;         // [dim_qk][lanes] (uses_query)
};

// One row of the reference: the visible scores and the numbers of their tokens.
template <class S>
struct LongHandRow {
  std::vector<std::vector<S>> scores;  // [map][n], of visible keys
  std::vector<Index> keys;             // [n]: their positions
  Index head = 0, query = 0;           // and the position of the query (Inputs::first_query)
  S extra{};                           // (uses_extra)
  std::vector<S> query_row = {};       // [dim_qk]
  std::vector<S> query_inputs = {};    // [query_inputs]
  std::vector<std::vector<S>> key_inputs = {};  // [n][key_inputs]
};

// log sum exp of the scores, computed relative to the largest of them; -infinity for an empty row.
template <class S>
[[nodiscard]] S log_sum_exp(const std::vector<S>& scores) {
  if (scores.empty()) return math::constant<S>(-std::numeric_limits<double>::infinity());
  auto top = math::value_of(scores[0]);
  for (const S& score : scores) top = std::max(top, math::value_of(score));
  S sum = math::constant<S>(0);
  for (const S& score : scores) sum += math::exp(S(score - math::constant<S>(top)));
  return math::constant<S>(top) + math::log(sum);
}

// Weights exp(s_j) / sum exp(s_j) of one row of visible scores, computed relative to the largest.
template <class S>
[[nodiscard]] std::vector<S> long_hand_softmax(const std::vector<S>& scores) {
  std::vector<S> weights;
  if (scores.empty()) return weights;
  auto top = math::value_of(scores[0]);
  for (const S& s : scores)
    if (math::value_of(s) > top) top = math::value_of(s);
  S sum = math::constant<S>(0);
  for (const S& s : scores) {
    weights.push_back(math::exp(S(s - math::constant<S>(top))));
    sum += weights.back();
  }
  for (S& w : weights) w = w / sum;
  return weights;
}

// Base of every normaliser: one score map per head, over its whole width.
struct NormaliserDefaults {
  static constexpr int maps = 1, diagnostics = 0, query_inputs = 0, key_inputs = 0;
  static constexpr bool uses_extra = false, uses_query = false, counts_visible = false;
  static constexpr bool differentiates_lse = false;
  [[nodiscard]] static const char* diagnostic_name(int) { return ""; }
  [[nodiscard]] static bool diagnostic_is_index(int) { return false; }
  [[nodiscard]] Source source(const Geometry& g, Index h, int) const { return whole_head(g, h); }
  [[nodiscard]] Index query_heads(Index heads) const { return heads; }
  template <class S>
  [[nodiscard]] S reference_lse(const LongHandRow<S>& row, std::size_t map) const {
    return log_sum_exp(row.scores[map]);
  }
  // The sizes of the terms of each weight, for two maps: softmax(map 0), and the part that map 1 takes away.
  template <class S>
  [[nodiscard]] std::vector<double> weight_terms(const std::vector<std::vector<S>>& rows,
                                                 const std::vector<S>& weights) const {
    std::vector<S> first(weights.size(), math::constant<S>(0));
    if (rows.size() > 1) first = long_hand_softmax(rows[0]);
    std::vector<double> terms;
    for (std::size_t n = 0; n < weights.size(); ++n) {
      const double p = double(math::value_of(first[n]));
      terms.push_back(p + std::abs(p - double(math::value_of(weights[n]))));
    }
    return terms;
  }
  void check(const Geometry&, const char*) const {}
  void keep_jointly() {}
};

// Base of a row normaliser.
struct PlainRows : NormaliserDefaults {
  static constexpr bool streams = false;
  [[nodiscard]] Index work_tiles(bool) const { return 0; }
};

}  // namespace HEED_ABI
}  // namespace heed
