// SPDX-License-Identifier: Apache-2.0
// Differential attention in its three forms and five pairings.

#include "fuzz/op.hpp"
#include "fuzz/plain_ops.hpp"

namespace fuzz {
namespace {

constexpr heed::HeadPairing kPairings[] = {
    heed::HeadPairing::halves, heed::HeadPairing::halves_repeated_keys,
    heed::HeadPairing::halves_apart, heed::HeadPairing::heads, heed::HeadPairing::heads_apart};
constexpr const char* kNames[] = {"halves", "halves_repeated_keys", "halves_apart", "heads",
                                  "heads_apart"};

// Draws the pairing of `op` and changes the sizes to fit it; returns the settings.
template <class Op>
std::string draw_pairing(Draw& draw, Sizes& s, Op& op, DifferentialFormula& f) {
  const Index n = draw.below(5);
  op.normaliser.pairing = kPairings[n];
  f.pairing = DifferentialFormula::Pairing(n);
  if (n >= 3)
    s.query_heads = 2 * s.heads;
  else
    s.dim_qk += s.dim_qk % 2;
  return kNames[n];
}

}  // namespace

std::unique_ptr<AnyOp> draw_differential(Draw& draw, Sizes& s) {
  heed::Differential<double> op;
  DifferentialFormula f;
  const std::string settings = draw_pairing(draw, s, op, f);
  op.normaliser.lambda = draw_param(draw, s, -0.5, 1.5);
  if (draw.chance(0.1)) op.normaliser.lambda = 0.0;
  return make_op(op, f, settings);
}

std::unique_ptr<AnyOp> draw_differential_v1(Draw& draw, Sizes& s) {
  heed::DifferentialV1<double> op;
  DifferentialFormula f;
  const std::string settings = draw_pairing(draw, s, op, f);
  const Index width = op.normaliser.pairs_whole_heads() ? s.dim_qk : s.dim_qk / 2;
  f.lambda = DifferentialFormula::four_vectors;
  f.lambda_init = op.normaliser.lambda_init = heed::lambda_init_at(draw.between(1, 6));
  visit_parameters(op.normaliser,
                   [&](const char*, auto& p) { p = draw_tensor(draw, {width}, 0.2); });
  f.normed = true;
  f.factor = op.readout.factor = 1 - f.lambda_init;
  f.eps = op.readout.eps = draw.pick({1e-5, 1e-3});
  if (draw.chance(0.7)) op.readout.weight = draw_tensor(draw, {s.dim_v}, 1);
  auto made = make_op(op, f, settings);
  made->terms_known = true;
  return made;
}

std::unique_ptr<AnyOp> draw_differential_v2(Draw& draw, Sizes& s) {
  heed::DifferentialV2<double> op;
  DifferentialFormula f;
  const std::string settings = draw_pairing(draw, s, op, f);
  f.lambda = DifferentialFormula::token;
  s.extra = 1;
  return make_op(op, f, settings);
}

}  // namespace fuzz
