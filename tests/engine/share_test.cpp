// SPDX-License-Identifier: Apache-2.0
// Shares of a call (Inputs::share) together make the call: rows of queries have its bits, and sums
// over queries add up to its sums.

#include "forgetting_score.hpp"
#include "message_of.hpp"
#include "share_call.hpp"
#include "token_parts.hpp"
#include "turned_scores.hpp"

#include <heed/engine/doors.hpp>
#include <heed/mask/patterns.hpp>
#include <heed/mask/visible.hpp>
#include <heed/measure/weights.hpp>
#include <heed/variants.hpp>

#include <memory>

using namespace heed;
using namespace heed_test;

namespace {

// Cuts at each multiple of the step, with one share that has no row.
std::vector<Index> cuts_of(Index len, Index step) {
  std::vector<Index> cuts{0, 0};
  for (Index at = step; at < len; at += step) cuts.push_back(at);
  cuts.push_back(len);
  return cuts;
}

template <class Op>
void check_shares(const std::string& name, const Op& op, const Geometry& g,
                  const Mask<typename Op::Scalar>& mask, const Options& options = {}) {
  using T = typename Op::Scalar;
  INFO(name << ", " << g.heads << " heads of " << g.kv_heads << ", " << g.len_q << " queries");
  const OpCall<Op> whole = whole_call(op, g, mask, options);
  const Index step = share_step(op, g, options);
  const std::vector<Index> cuts = cuts_of(g.len_q, step);
  CHECK(cuts.size() > 3);
  std::vector<double> dk, dv, dbias, dkey_inputs, parameters;
  for (std::size_t n = 0; n + 1 < cuts.size(); ++n) {
    ShareTensors<Op> part(whole, cuts[n], cuts[n + 1] - cuts[n], 0, g.len_kv);
    Inputs<T> in = part.inputs();
    in.share = {cuts[n], g.len_q - cuts[n + 1], 0, 0};
    forward(op, in, mask, part.outputs(), &part.saved, options);
    backward(op, in, mask, part.saved, {part.out.data(), part.rows_of(g.dim_v)},
             part.output_gradients(), part.gradients(mask.bias.shape()), &part.grad_op, options);
    INFO("queries from " << cuts[n] << " to " << cuts[n + 1]);
    part.check_bits(whole);
    add_to(dk, part.dk);
    add_to(dv, part.dv);
    add_to(dbias, part.dbias);
    add_to(dkey_inputs, part.dkey_inputs);
    add_to(parameters, numbers_of(part.grad_op));
  }
  CHECK(worst_difference(whole.grad_key, dk) <= kShareBound<T>);
  CHECK(worst_difference(whole.grad_value, dv) <= kShareBound<T>);
  CHECK(worst_difference(whole.grad_bias, dbias) <= kShareBound<T>);
  CHECK(worst_difference(whole.grad_key_inputs, dkey_inputs) <= kShareBound<T>);
  CHECK(worst_difference(numbers_of(whole.grad_op), parameters) <= kShareBound<T>);
}

constexpr Geometry kSelf{2, 4, 4, 2, 150, 150, 6, 6};

}  // namespace

TEST_CASE("shares of a call of every variant have its bits", "[share]") {
  const Options narrow{.threads = 3,
                       .key_tile = 1,
                       .panel_vectors = 1,
                       .dropout = {.rate = 0.3, .seed = 11, .first_batch = 0}};
  for_each_variant<double>(kSelf, [&]<class Op>(const Variant<Op>& variant) {
    check_shares(variant.name, variant.op, variant.geometry, causal<double>(), {.threads = 2});
    check_shares(variant.name, variant.op, variant.geometry, window<double>(40, 3), narrow);
  });
  const Mask<float> lengths = causal<float>() & key_lengths<float>({150, 70});
  check_shares("dar of float", Dar<float>{}, kSelf, lengths, narrow);
  check_shares("differential of float", Differential<float>{}, kSelf, lengths, narrow);
  // Groups of panels that extend over several heads, and tiles that they divide.
  check_shares("narrow panels", Dar<double>{}, kSelf, causal<double>(), {.panel_vectors = 1});
}

TEST_CASE("shares of a call have its bits under every part of a mask", "[share]") {
  const Geometry g = kSelf;
  Geometry cross = g;
  cross.len_kv = 97;
  cross.first_query = 5;
  const Dar<double> op;
  std::vector<double> numbers(std::size_t(4 * 150 * 150));
  for (std::size_t i = 0; i < numbers.size(); ++i)
    numbers[i] = i % 9 == 0 ? -std::numeric_limits<double>::infinity() : std::sin(double(i));
  std::vector<Index> ids;
  for (Index i = 0; i < 300; ++i) ids.push_back(i / 37);
  const Shape shape{1, 4, 150, 150};
  const auto flags = std::make_unique<bool[]>(std::size_t(150 * 150));
  for (Index i = 0; i < 150 * 150; ++i) flags[std::size_t(i)] = i % 5 != 2;
  const Options options{.threads = 2, .key_tile = 32, .panel_vectors = 2};
  check_shares("bias", op, g, bias<double>({numbers.data(), shape}) & causal<double>(), options);
  check_shares("bias of one row", op, g, bias<double>({numbers.data(), {2, 1, 1, 150}}), options);
  check_shares("boolean", op, g, boolean<double>({flags.get(), {1, 1, 150, 150}}), options);
  check_shares("documents", op, g, documents<double>(ids, ids) & causal<double>(), options);
  check_shares("slopes", op, g, alibi<double>({0.1, 0.2, 0.3, 0.4}) & soft_cap<double>(2), options);
  check_shares("function", op, g, neighbourhood<double>(150, 21), options);
  check_shares("bottom right", op, cross, causal<double>(Align::bottom_right), options);
  check_shares("dropout", op, cross, {}, {.dropout = {.rate = 0.4, .seed = 3, .first_batch = 1}});
}

TEST_CASE("shares of a call have its bits where parts of an op read positions and tokens",
          "[share]") {
  check_shares("turned rows", OwnAttention<NormedTurned, double>{}, kSelf, causal<double>());
  check_shares("sums of tokens, a sink and a gate",
               Attention<double, OwnScore<Forgetting, double>, GatedSink<double>, Gate<double>>{},
               kSelf, causal<double>());
}

TEST_CASE("what does not fit a share is refused in one sentence", "[share]") {
  const ScaledDot<double> op;
  const OpCall<ScaledDot<double>> whole = whole_call(op, kSelf, Mask<double>{}, {});
  const Index step = share_step(op, kSelf);
  ShareTensors<ScaledDot<double>> part(whole, 0, step, 0, 150);
  const auto refusal = [&](const Share& share) {
    Inputs<double> in = part.inputs();
    in.share = share;
    return message_of([&] { forward(op, in, {}, part.outputs()); });
  };
  CHECK(refusal({-1, 0, 0, 0}).find("share has -1 queries before") != std::string::npos);
  CHECK(refusal({1, 0, 0, 0}).find("must begin and end at multiples of") != std::string::npos);
  Inputs<double> in = part.inputs();
  in.share = {0, 150 - step, 0, 0};
  forward(op, in, {}, part.outputs(), &part.saved);
  const auto backward_of = [&](const Share& share) {
    in.share = share;
    return message_of([&] {
      backward(op, in, {}, part.saved, {part.out.data(), part.rows_of(6)}, part.output_gradients(),
               part.gradients());
    });
  };
  // A share with as many queries that are not the first ones.
  CHECK(backward_of({step, 150 - 2 * step, 0, 0}).find("is of a share with queries from 0") !=
        std::string::npos);
  in.share = {0, 150 - step, 0, 0};
  CHECK(message_of([&] { (void)measure_weights(op, in); }).find("forward() and backward() alone") !=
        std::string::npos);
}
