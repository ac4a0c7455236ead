// SPDX-License-Identifier: Apache-2.0
// A user's own ops.

#include <heed/compiled_engine.hpp>
#include <heed/engine/doors.hpp>

#include "fuzz/op.hpp"
#include "fuzz/own.hpp"

namespace fuzz {

std::unique_ptr<AnyOp> draw_recency(Draw& draw, Sizes& s) {
  heed::OwnAttention<Recency, double> op;
  op.score.slope = draw_param(draw, s, -0.1, 0.5);
  op.score.angle = draw_param(draw, s, -1, 1);
  auto made = make_op(op, RecencyFormula{});
  made->mixed_slope = made->mixed_largest = largest_of(op.score.angle);
  made->short_rows = made->steep_zeros = made->reads_positions = true;
  return made;
}
std::unique_ptr<AnyOp> draw_bump(Draw& draw, Sizes& s) {
  heed::OwnAttention<Bump, double> op;
  op.score.height = draw_param(draw, s, -1, 2);
  auto made = make_op(op, BumpFormula{});
  // Slopes of height exp(-|q - k|^2 / 20), a little more where rounding takes the distance below 0, and of tanh.
  made->mixed_per_product = 1.1 * largest_of(op.score.height) / 10 + 1;
  return made;
}
std::unique_ptr<AnyOp> draw_apart(Draw& draw, Sizes& s) {
  heed::OwnAttention<Apart, double> op;
  op.score.rate = draw_param(draw, s, -0.5, 0.5);
  auto made = make_op(op, ApartFormula{});
  made->reads_squares = true;  // a sum of columns, which is at most |q - k|^2
  return made;
}
std::unique_ptr<AnyOp> draw_own_parts(Draw& draw, Sizes& s) {
  OwnParts<double> op;
  op.score.weight = draw_param(draw, s, -1, 1);
  op.normaliser.height = draw_param(draw, s, -1, 1);
  op.readout.factor = draw_tensor(draw, {s.dim_v}, 1);
  OwnPartsFormula f;
  f.shares = op.normaliser.shares = draw.chance(0.4);
  auto made = make_op(op, f, f.shares ? "heads share queries" : "");
  made->terms_known = true;
  made->reads_query = f.shares;  // another head may read a row that its own head does not read
  return made;
}

}  // namespace fuzz
