// SPDX-License-Identifier: Apache-2.0
#pragma once

// Plug point 2, first kind: a normaliser that weighs a row while it passes, a chunk of keys at a time, and keeps a few
// numbers of it. With weights w_j, values v_j and the numbers of a row as its state:
//
//   out = finish(state) * sum_j weight(state, score_j) v_j
//
// It inherits StreamedRows<Real, own>, where `own` is how many numbers per row it keeps beside the sum of its weights, and
// overrides the members that differ; this is the whole list. P is a pack of queries, and scores are in natural-log units:
//
//   begin(queries) -> State                the state of a row before its first key: by default a sum of 0. It may read
//                                          numbers of the query's token, queries.input(c), where it has query_inputs
//   move(state, top, moved) -> P           notes the largest visible score of the next chunk. Returns the factor of
//                                          all earlier weights, and sets `moved` where it is not 1; the engine
//                                          rescales the sum. 1 by default
//   weight(state, score) -> P              the weight of a pair before finish(), exactly 0 where score is -infinity:
//                                          there the pair is hidden. No default
//   with_weight(normaliser, state, f)      static: calls f(weigh) once, where weigh(score) is normaliser.weight(state,
//                                          score) in a loop, so that a choice by the state is made once
//   finish(state) -> P                     the factor of all weights, once every key was seen. 1 by default
//   lse(state) -> P                        log of what exp(score) is divided by, after finish(). 0 by default
//   dscore(state, score, weight, pull, delta) -> P
//                                          dL/dscore of a pair, from weight = weight(state, score) finish(state),
//                                          pull = dL/dweight and delta = sum_j weight_j pull_j - dL/dlse. No default
//   vjp(queries, state, delta, grad)       adds parameter gradients to `grad`, and gradients of numbers of the query's token
//                                          by queries.add_input(c, g)
//   join(state, other, factor, other_factor)
//                                          joins the states of two parts of a row: `state` then stands for the keys of
//                                          both, and the weights of each part are multiplied by its factor; the engine
//                                          adds the sums. Only for normalisers that promise Mergeable
//   needs_weight                   false   a row that sees keys and has a sum of 0 is NaN: its output is not defined
//   differentiates_lse             false   dscore() and vjp() use dL/dlse, which `delta` contains
//   counts_visible                 false   reads queries.visible
//   query_inputs                   0       numbers of each query's token that begin() and vjp() read
//                                          (plug/token_inputs.hpp). None of keys: a number of a key belongs into its score
//   learnt_keys, learnt_values            pointers to its parameters of shape (heads or 1, n, dim_qk) and (heads or 1, n,
//                                         dim_v): n keys that belong to the op. Every query sees them with the scores scale
//                                         q.k, without a soft cap; they are not masked, have no position, and no cache stores
//                                         them. Without learnt_values their values are 0. Where keys are split (key_range,
//                                         parts, ranks), the part that has key 0 counts them
//   reference, source, check, ...          see plug/normaliser.hpp
//
// Where weight() and dscore() are templates of their vectors, template <class S> S weight(const auto& state, S score), a
// mistake such as std::exp in them ends in one sentence (plug/formula_probe.hpp). Where they name P it ends in the compiler's
// own error about that line: a Pack that turned into a number to say the sentence would make `pack * 2` ambiguous.
//
// Laws  a hidden pair has weight 0; a row's numbers depend on its own scores alone; a state moved to any larger `top`
//       gives the same weights after finish(), up to rounding.

#include <heed/plug/formula_probe.hpp>
#include <heed/plug/streamed_rows.hpp>
