// SPDX-License-Identifier: Apache-2.0
#pragma once

// What the workers of a backward call share: what they read, and the accumulators.

#include <heed/engine/derived_queries.hpp>
#include <heed/engine/ordered_sums.hpp>

#include <algorithm>
#include <vector>

namespace heed {
inline namespace HEED_ABI {
namespace detail {

// Heads that share rows: where they read one key-value head, or where one row of bias or of query serves them all. Where a
// head may read any key-value head, all count as readers of one.
struct FamilySize {
  Index batches, heads;
};
template <class Real>
[[nodiscard]] FamilySize family_of(const OpTiles<Real>& op, const Geometry& g,
                                   const Shape& bias_shape, bool bias) {
  const bool all_heads =
      (bias && bias_shape.heads == 1) || !reads_keys_by_group(op, g) ||
      readers_of_queries(op, g, op.readout.traits.uses_query) == QueryReaders::several_heads;
  const Index one = 1;  // a call without batches or heads has no family at all
  return {std::max(one, bias && bias_shape.batch == 1 ? g.batch : one),
          std::max(one, all_heads ? g.heads : g.group())};
}

// What all workers of a backward call read and add to.
template <class Real>
struct BackwardShared : DerivedSums<Real> {
  const OpVjps<Real>& vjps;
  const Saved<Real>& saved;
  OutputGradientOperands<Real> output;
  GradientOperands<Real> grads;
  VisitingOrder order;
  bool sums_queries;  // is the gradient of query a sum over heads or maps?
  TileGates gates;
  DerivedSums<Real> tangents;  // where they move
  // Gradients of what normaliser and readout read of tokens, [batch][head][query or key][inputs].
  std::vector<Real> dnormaliser_query, dnormaliser_key, dreadout_query;

  // threads: that may be at work.
  BackwardShared(const CallContext<Real>& c, const OpVjps<Real>& of_op,
                 const Saved<Real>& of_forward, const OutputGradientOperands<Real>& of_output,
                 const GradientOperands<Real>& to, int threads, int planes = 1)
      : vjps(of_op),
        saved(of_forward),
        output(of_output),
        grads(to),
        order(visiting_order(c, to.bias.given())),
        sums_queries(readers_of_queries(c.op, c.geometry, c.op.readout.traits.uses_query) !=
                     QueryReaders::one),
        gates(order, c.plan.tiles, c.plan.tile, threads) {
    const DerivedNeeds<Real>& needs = c.keys.needs();
    const ScoreTraits& score = c.op.score.traits;
    const TokenColumns& columns = c.op.columns;
    const Geometry& g = c.geometry;
    const auto zeros = [](auto& numbers, Index count) { numbers.assign(std::size_t(count), 0); };
    for (int n = 0; n < planes; ++n) {
      zeros(sums(n).dfeatures, c.keys.row_count() * score.key_features);
      zeros(sums(n).drows, c.keys.row_count() * needs.row_numbers());
      zeros(sums(n).dquery_inputs, g.query_rows() * score.query_inputs);
      zeros(sums(n).dkey_inputs, c.keys.row_count() * score.key_inputs);
    }
    zeros(dnormaliser_query, g.query_rows() * columns.normaliser_query.count);
    zeros(dnormaliser_key, g.batch * g.heads * g.len_kv * columns.normaliser_key.count);
    zeros(dreadout_query, g.query_rows() * columns.readout_query.count);
    parameters_ = OpGradient<Real>(of_op).numbers();
    tables_ = c.geometry.heads * needs.table_rows * c.geometry.dim_qk;
  }

  // The sums of derived values' gradients, or their tangents.
  [[nodiscard]] DerivedSums<Real>& sums(int plane) { return plane > 0 ? tangents : *this; }
  // How many numbers OrderedSums adds up: all parameters, as visit() meets them, then tables
  // [head][table_rows][dim_qk].
  [[nodiscard]] Index numbers() const { return parameters_ + tables_; }
  // Where the gradients of the tables begin among them.
  [[nodiscard]] Index first_table() const { return parameters_; }
  [[nodiscard]] static Index places_for(int workers, Index families) {
    return std::clamp<Index>(2 * workers, 1, std::max<Index>(1, families));
  }
  // Places of OrderedSums: as many again as are at work, for families that end before an earlier one.
  [[nodiscard]] Index places(int workers) const { return places_for(workers, order.families()); }

  // Memory of a call with so many workers.
  [[nodiscard]] Index bytes(int workers) const {
    std::size_t count = 0;
    for (const auto* numbers :
         {&this->dfeatures, &this->drows, &this->dquery_inputs, &this->dkey_inputs,
          &dnormaliser_query, &dnormaliser_key, &dreadout_query})
      count += numbers->size();
    return Index(count * sizeof(Real)) + (1 + places(workers)) * numbers() * Index(sizeof(double));
  }

  // Where the gradients of keys, or their tangents, are added up that map `map` of the head of `at` reads, from the first key of
  // `at` on: rows of `stride` numbers. Not given where nobody asks for them.
  struct KeyRows {
    Real* data = nullptr;
    Index stride = 0;
  };
  [[nodiscard]] KeyRows key_rows(const CallContext<Real>& c, const TilePlace& at, int map,
                                 const Source& source, int plane = 0) {
    if (c.op.score.traits.has_transform) {
      const Index numbers = c.keys.needs().row_numbers();
      return {sums(plane).drows.data() + c.keys.row(at.batch, at.head, map, at.key) * numbers,
              numbers};
    }
    if (!grads.key.given()) return {};
    return {grads.key.row(at.batch, source.kv_head, at.key) + source.key_column,
            grads.key.strides().row};
  }

  // Adds the sums of all visits to the gradients of the parameters.
  void add_parameter_gradients(const CallContext<Real>& c, const std::vector<double>& sums,
                               OpGradient<Real>& to) const {
    to.add_from(sums.data());
    if (!c.op.score.traits.has_table) return;
    const Index width = c.geometry.dim_qk, size = c.keys.needs().table_rows * width;
    for (Index h = 0; h < c.geometry.heads; ++h)
      vjps.score.table_vjp(h, width, sums.data() + first_table() + h * size, *to.score);
  }

 private:
  [[nodiscard]] static VisitingOrder visiting_order(const CallContext<Real>& c, bool bias) {
    const Geometry& g = c.geometry;
    const FamilySize family = family_of(c.op, g, c.mask.bias().shape(), bias);
    // Groups of a head at hand.
    const Index queries = c.plan.group * c.plan.lanes, begin = g.share.queries_before / queries;
    const Index end = g.held_queries() > 0 ? (g.held_queries_end() + queries - 1) / queries : begin;
    return {g.batch, g.heads, end - begin, family.batches, family.heads, begin};
  }

  Index parameters_ = 0, tables_ = 0;  // numbers in them
};

}  // namespace detail
}  // namespace HEED_ABI
}  // namespace heed
