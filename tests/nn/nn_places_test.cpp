// SPDX-License-Identifier: Apache-2.0
// A layer tells scores with a first_query where the queries of a step stand.

#include "catch.hpp"

#include <heed/engine/doors.hpp>
#include <heed/nn/projected_attention.hpp>
#include <heed/plug/own_score.hpp>

#include <cmath>
#include <vector>

namespace {

using namespace heed;

template <class T>
struct Turned {
  using Transform = Rotation<T>;
  template <class S>
  S score(const auto& pair, const auto&) const {
    return pair.logit;
  }
};

}  // namespace

TEST_CASE("A layer rotates the rows of a step by their places behind the cache") {
  using Op = OwnAttention<Turned, double>;
  const Index width = 8, len = 11;
  Op op;
  op.score.log_base = 1.5;
  nn::ProjectedAttention<Op> layer(nn::AttentionOptions::even(width, 2), op, causal<double>());
  int n = 0;
  layer.visit([&](const std::string& name, Param<double>& weight, Param<double>&) {
    for (Index i = 0; i < weight.size() && name != "log_base"; ++i)
      weight[i] = std::sin(double(++n));
  });
  nn::Context<double> c;
  nn::Matrix<double> x(len, width), whole(len, width), y(1, width);
  for (Index i = 0; i < len * width; ++i) x.view().row(0)[i] = std::cos(3.0 * double(i));
  layer.forward(c, 1, std::as_const(x).view(), whole.view());
  KvCache<double> cache = layer.new_cache(1);
  for (Index t = 0; t < len; ++t) {
    layer.step(c, 1, std::as_const(x).view().row_range(t, 1), y.view(), cache);
    CHECK(cache.key_features().len() == t + 1);
    for (Index k = 0; k < width; ++k)
      CHECK(std::abs(y.view().row(0)[k] - whole.view().row(t)[k]) < 1e-12);
  }
  // Whole sequences begin at position 0 again.
  nn::Matrix<double> again(len, width);
  layer.forward(c, 1, std::as_const(x).view(), again.view());
  for (Index k = 0; k < width; ++k)
    CHECK(again.view().row(len - 1)[k] == whole.view().row(len - 1)[k]);
}
