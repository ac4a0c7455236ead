// SPDX-License-Identifier: Apache-2.0
#pragma once

// Plug point 2, the normaliser: how do the scores of a row become weights?
//
// Two kinds. A *streaming* normaliser sees a row chunk by chunk (plug/softmax.hpp is the one that
// exists). A *row* normaliser sees whole rows of a panel at once, in scratch, and has these members:
//
//   static constexpr bool streams = false
//   static constexpr int maps              score maps per output head (1 or 2)
//   static constexpr int diagnostics       numbers per row that it reports; diagnostic_name(i)
//   static constexpr bool uses_extra       reads the op's extra input, one number per row
//   visit(f), validate(geometry, where)    as in plug/score.hpp
//   source(geometry, h, map) -> Source     which head and columns feed map `map` of output head h
//   query_heads(heads) -> Index            heads that the query tensor must have
//   work_tiles(backward) -> Index          scratch tiles of the size of one map that it needs
//   forward(block)                         block.scores[0] becomes the weights of the row
//   vjp(block, grad)                       from scores and block.dweights: block.weights and
//                                          block.dscores[m]; adds parameter gradients to `grad`
//   reference<S>(rows, h, extra) -> vector<S>       the same in long hand, for one row
//   weight_terms<S>(rows, weights) -> vector<double>      optional, where weights are differences: the
//                                          sizes of their terms, which rounding errors are measured by
//
// Rows of a block are keys, lanes are queries. A hidden pair has score -infinity; its weight and its
// dscore must be exactly 0 (select, never multiply), even where dweights is NaN. A lane that sees no
// key has only such scores. No result of a lane may depend on another lane, not in its last bit.

#include <heed/core/geometry.hpp>
#include <heed/core/param.hpp>
#include <heed/plug/tile.hpp>

#include <array>

namespace heed::inline HEED_ABI {

// What one score map of one output head reads.
struct Source {
  Index query_head = 0, kv_head = 0;
  Index query_column = 0, key_column = 0, width = 0;
};

// The head itself over the full width.
[[nodiscard]] inline Source whole_head(const Geometry& g, Index h) {
  return {h, g.kv_head(h), 0, 0, g.dim_qk};
}

// The rows of one panel, all visited keys at once.
template <class T>
struct RowBlock {
  Index head = 0;
  int vectors = 0;  // lanes = vectors * kLanes<T>
  std::array<LaneTile<T>, 2> scores;   // [keys][lanes] per map, natural-log units
  std::array<const T*, 2> score_max;   // [lanes]: largest visible score, -infinity for none
  const T* extra = nullptr;            // [lanes] (uses_extra)
  LaneTile<T> work;                    // [work_tiles * keys][lanes]
  std::array<T*, 2> lse;               // out, [lanes]: log-sum-exp of each map; -infinity for none
  T* diagnostics = nullptr;            // out, [diagnostics][lanes]
  // Backward only.
  LaneTile<T> dweights;                // [keys][lanes]: gradient of the weights
  LaneTile<T> weights;                 // out: may alias dweights
  std::array<LaneTile<T>, 2> dscores;  // out: may alias scores
  T* dextra = nullptr;                 // out, [lanes] (uses_extra)
  Index valid_lanes = 0;               // lanes beyond it are padding and add to no parameter

  [[nodiscard]] Index keys() const { return scores[0].rows; }
  [[nodiscard]] Index lanes() const { return scores[0].lanes; }
};

// Sum of the first `count` lanes, in double: how lane-wise parameter gradients are reduced.
template <class T>
[[nodiscard]] inline double sum_valid_lanes(const T* lanes, Index count) {
  double sum = 0.0;
  for (Index i = 0; i < count; ++i) sum += double(lanes[i]);
  return sum;
}

}  // namespace heed::inline HEED_ABI
