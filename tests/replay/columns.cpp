// SPDX-License-Identifier: Apache-2.0
// Scores that add up a formula of each column.

#include "../../examples/zoo/laplace.hpp"
#include "fading_columns.hpp"
#include "run.hpp"

#include <heed/plug/row_formula.hpp>

namespace heed_test {

namespace {

template <class T>
struct Power {
  heed::Param<T> rate = T(1);
  double power = 1;
  static constexpr auto parameters =
      std::tuple{heed::named("rate", &Power::rate), heed::option("power", &Power::power)};
  template <class S>
  S column(const auto& q, const auto& k, const auto&) const {
    return S(heed::math::pow(heed::math::absolute(S(q[0] - k[0])), power));
  }
  template <class S>
  S score(const auto& pair, const auto& p) const {
    return -p[0] * pair.dot;
  }
};

template <class T>
struct Scores : heed::PlainRows {
  auto forward(const auto& row) const { return row.score(); }
};
template <class T>
using Decay = heed::Attention<T, heed::OwnScore<Fading, T>, Scores<T>, heed::Identity<T>>;

// Rows of d numbers of `first`, then d of `second`.
template <class T>
std::vector<T> side_by_side(const GoldenCase& golden, const std::string& first,
                            const std::string& second) {
  const std::vector<double>&a = golden.tensor(first), &b = golden.tensor(second);
  const auto d = std::size_t(golden.shape(first).dim);
  std::vector<T> rows;
  for (std::size_t at = 0; at < a.size(); at += d)
    for (const auto* half : {&a, &b})
      for (std::size_t c = 0; c < d; ++c) rows.push_back(T((*half)[at + c]));
  return rows;
}

template <class T>
heed::OpCall<Decay<T>> run_decay(const GoldenCase& golden, heed::Options options) {
  heed::Geometry g = golden.geometry();
  g.dim_qk *= 2;
  options.scale = golden.number("scale");
  heed::OpCall<Decay<T>> call({}, g, golden.mask<T>(), options,
                              {side_by_side<T>(golden, "q", "aq"),
                               side_by_side<T>(golden, "k", "ak"),
                               golden.rounded<T>("v"),
                               {},
                               golden.rounded<T>("dout")});
  call.forward();
  call.backward();
  return call;
}

}  // namespace

void replay_columns_lp(const GoldenCase& golden, Report& report) {
  if (golden.number("p") == 1)
    return check_with_lse(golden, {{"rate", "dgamma"}}, report, [&]<class T>() {
      zoo::laplace::Op<T> op;
      op.score.rate = golden.param<T>("gamma");
      return op;
    });
  check_with_lse(golden, {{"rate", "dgamma"}}, report, [&]<class T>() {
    heed::OwnAttention<Power, T> op;
    op.score.rate = golden.param<T>("gamma");
    op.score.power = golden.number("p");
    return op;
  });
}

void replay_columns_decay(const GoldenCase& golden, Report& report) {
  const std::vector<double> dq = side_by_side<double>(golden, "dq", "daq"),
                            dk = side_by_side<double>(golden, "dk", "dak");
  const auto compare = [&](const auto& check, const auto& call, const std::string& tag) {
    check(tag + "out", call.out, golden.tensor("out"));
    check(tag + "dq, daq", call.grad_query, dq);
    check(tag + "dk, dak", call.grad_key, dk);
    check(tag + "dv", call.grad_value, golden.tensor("dv"));
  };
  const auto exact = [&](const std::string& name, const auto& got,
                         const std::vector<double>& want) { report.exact(name, got, want); };
  compare(exact, run_decay<double>(golden, {}), "");
  compare(exact, run_decay<double>(golden, small_tiles()), "small tiles: ");
  const auto rounded = [&](const std::string& name, const auto& got,
                           const std::vector<double>& want) {
    report.rounded(name, got, want, std::vector<double>(want.size(), 5e-6 * Report::largest(want)));
  };
  compare(rounded, run_decay<float>(golden, {}), "");
}

}  // namespace heed_test
