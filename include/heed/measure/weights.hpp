// SPDX-License-Identifier: Apache-2.0
#pragma once

// Measures which keys a query reads: numbers of each row of attention weights, for every op and
// head, without a matrix of len_q x len_kv.
//
//   forward(op, in, mask, out, &saved);
//   WeightMeasures read = measure_weights(op, in, mask, saved, {.links = 3});
//   read.links_of(read.row(b, h, i))[0].key      // the key that query i of head h in sequence b weighs most
//
// A weight w_ij is the factor of value j in row i, before the readout and before dropout: mixed_i =
// sum_j w_ij v_j. Hence it is
//
//   softmax, DAR, prototypes, dialectical, gates    the softmax; the readout comes behind it
//   differential                                    softmax_1 - lambda softmax_2, which may be negative
//   ODE                                             the row after its last step
//   your own normalisers                            the weights that they return
//
// Measures  of a row, with A = sum_j |w_ij|, which is 1 for a softmax
//   entropy   -sum_j p_j log p_j of p_j = |w_ij| / A, in nats: 0 where one key has all, log n where n have the same
//   total     sum_j w_ij, and size, A
//   distance  sum_j p_j |position of i - j|, in tokens; query 0 stands at Inputs::first_query
//   links     the keys of largest |w_ij|, other than 0, with w_ij; among equal ones the earlier key
//             comes first. If a row has fewer, the rest have key -1 and weight 0
//   mass      sum of w_ij over the keys of a KeySet; share, the sum of their p_j
// Shapes    rows are (batch, heads, len_q), in this order
// Bounds    a pair that the mask hides has weight 0 whatever it holds, and is no link. A row whose weights are all 0, for
//           example one that sees no key, has measures 0. A row with a weight that is not finite, and a row that forward()
//           makes NaN, has measures NaN and links without keys; other rows are not affected. Weights are those of forward()
//           up to rounding. Bits do not depend on the number of threads.
// Errors    std::invalid_argument where the arguments do not fit, or where `saved` is of another call; std::bad_alloc
// Memory    O(len_q (links + sets)) for the results, and what forward() has per thread
// Cost      the scores of forward(), one logarithm a pair, and no product with the values: 1.0 to 1.3 times forward() with up
//           to three links, 2.3 times with 16 (bench/NOTES.md)

#include <heed/engine/doors.hpp>
#include <heed/measure/weight_walk.hpp>

#include <numeric>

namespace heed {
inline namespace HEED_ABI {

namespace detail {

template <class Real>
[[nodiscard]] WeightMeasures drive_weights(const OpTiles<Real>& op, const Inputs<Real>& in,
                                           const Mask<Real>& mask, const Saved<Real>* saved,
                                           const WeightRequest& request, const Options& options) {
  using Worker = WeightWorker<Real>;
  const OpenCall<Real> open = open_call({.name = "heed::measure_weights", .pages = true}, op,
                                        CallArguments<Real>{in, mask, options});
  const Geometry& g = open.geometry;
  const std::string& where = open.where;
  const BoundMask<Real> bound = open.bound_mask(options.threads);
  if (saved) open.check(*saved);
  require(request.links >= 1, where, ": links is ", request.links, ", it must be at least 1");
  // A row has no more links than keys.
  const Index per_row = std::min(request.links, std::max<Index>(1, g.len_kv));
  std::vector<OrderedKeys> sets;
  for (const KeySet& set : request.sets) sets.emplace_back(set, g, where, sets.size());

  WeightMeasures to;
  to.batch = g.batch;
  to.heads = g.heads;
  to.len_q = g.len_q;
  to.links_per_row = per_row;
  const auto rows = std::size_t(to.rows());
  for (auto* numbers : {&to.entropy, &to.total, &to.size, &to.distance}) numbers->resize(rows);
  to.links.resize(std::size_t(element_count({g.batch, g.heads, g.len_q, per_row}, where.c_str())));
  for (auto* numbers : {&to.mass, &to.share})
    numbers->assign(sets.size(), std::vector<double>(rows));

  WidenedTensors<Real> copies(options.threads);
  Operands<Real> operands{{.query = copies.read(in.query),
                           .key = copies.read(in.key),
                           .value = in.value,
                           .extra = copies.read(in.extra),
                           .query_inputs = copies.read(in.query_inputs),
                           .key_inputs = copies.read(in.key_inputs)}};
  [[maybe_unused]] const auto inputs = take_inputs(op, g, open.threads(), operands);
  DerivedKeys<Real> keys(op, g, operands.key, nullptr, {}, operands.key_inputs);
  const Index pages = std::gcd(operands.key.page_rows(), operands.value.page_rows());
  CallContext<Real> c = make_context(op, g, bound, operands, keys, options,
                                     plan_call<Real>(op, g, bound, options, pages, false));
  c.plan.group = 1;
  run_groups(
      c, options, [&](Scratch<Real>& scratch) { return Worker(c, saved, sets, to, scratch); },
      [&](int workers) { keys.build(workers); });
  return to;
}

template <class Op, class Real>
[[nodiscard]] WeightMeasures open_weights(const Op& op, const Inputs<Real>& in,
                                          const Mask<Real>& mask, const Saved<Real>* saved,
                                          const WeightRequest& request, const Options& options) {
  static_assert(check_attention_op<Op>());
  WeightMeasures measures;
  Door<Op>::with_tiles(op, [&](const OpTiles<Real>& tiles) {
    measures = drive_weights<Real>(tiles, in, mask, saved, request, options);
  });
  return measures;
}

}  // namespace detail

// The measures of the rows of a call; `saved` comes from forward() with the same op, inputs, mask,
// scale, dropout and precision.
template <AttentionOp Op, std::same_as<typename Op::Scalar> Real = typename Op::Scalar>
[[nodiscard]] WeightMeasures measure_weights(const Op& op, const Inputs<Real>& in,
                                             const Mask<typename Op::Scalar>& mask,
                                             const Saved<typename Op::Scalar>& saved,
                                             const WeightRequest& request = {},
                                             const Options& options = {}) {
  return detail::open_weights(op, in, mask, &saved, request, options);
}

// The same without an earlier forward(). Streaming normalisers need the states of their rows:
// forward() is run here for them, and its `out` is dropped.
template <AttentionOp Op, std::same_as<typename Op::Scalar> Real = typename Op::Scalar>
[[nodiscard]] WeightMeasures measure_weights(const Op& op, const Inputs<Real>& in,
                                             const Mask<typename Op::Scalar>& mask = {},
                                             const WeightRequest& request = {},
                                             const Options& options = {}) {
  if constexpr (Op::NormaliserType::streams) {
    const std::string where = detail::door_name("heed::measure_weights", options.name);
    detail::refuse_share(in, where);
    Geometry g;
    detail::Door<Op>::with_tiles(
        op, [&](const OpTiles<Real>& tiles) { g = geometry_of(tiles, in, where); });
    std::vector<Real> out(std::size_t(element_count(g.out_shape(), where.c_str())));
    Saved<Real> saved;
    forward(op, in, mask, {out.data(), g.out_shape()}, &saved, options);
    return detail::open_weights(op, in, mask, &saved, request, options);
  } else {
    return detail::open_weights<Op, Real>(op, in, mask, nullptr, request, options);
  }
}

// Overloads for calls that do not fit (engine/mistakes.hpp).
template <class Op>
WeightMeasures measure_weights(const Op& op, const detail::Given<Op, detail::InputsArgument>& in,
                               const detail::Given<Op, detail::MaskArgument>& mask,
                               const detail::Given<Op, detail::SavedArgument>& saved,
                               const WeightRequest& request = {}, const Options& options = {});
template <class Op>
WeightMeasures measure_weights(const Op& op, const detail::Given<Op, detail::InputsArgument>& in,
                               const detail::Given<Op, detail::MaskArgument>& mask = {},
                               const WeightRequest& request = {}, const Options& options = {});

}  // namespace HEED_ABI
}  // namespace heed
