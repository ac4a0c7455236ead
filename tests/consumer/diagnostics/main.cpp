// SPDX-License-Identifier: Apache-2.0
// Mistakes that authors of variants make, one for each value of MISTAKE, and a program without one for 0. With CHECK
// the author calls check_op() first.
#include <heed/attention.hpp>
#include <heed/explain.hpp>
#include <heed/mask/visible.hpp>
#include <heed/partial.hpp>
#include <heed/plug/own_score.hpp>

#include <algorithm>
#include <cmath>

#if defined(CHECK)
#include <heed/check/op_check.hpp>
#elif MISTAKE == 30
#include <heed/reference/reference.hpp>
#elif MISTAKE >= 44
#include <heed/engine/hvp.hpp>
#endif

template <class T>
struct Mine {
  heed::Param<T> slope = T(0.5);
  bool flag = true;
  static constexpr auto parameters =
      std::tuple{heed::named("slope", &Mine::slope), heed::option("flag", &Mine::flag)};

#if MISTAKE == 0
  // Code that looks like a mistake and is none: branches on options, `if constexpr`, numbers of any type.
  template <class S>
  S score(const auto& pair, const auto& p) const {
    S sum = flag ? pair.logit : 0.0;
    if (flag && p.size() > 0) sum += 2 * p[0] / 3.0F;
    const auto far = heed::math::tanh(pair.logit) > 0.5;
    const auto near = ~far & (heed::math::absolute(pair.dot) <= p[0]);
    if constexpr (std::is_same_v<S, double>) sum = std::max(sum, S(-1e30));
    if constexpr (heed::IsPack<S>::value) sum = S(heed::max(sum, S(-1e30F)));
    sum = heed::math::select(near, S(-sum), S(sum * heed::math::sigmoid(pair.dot)));
    return heed::math::maximum(sum, heed::math::constant<S>(-40)) -
           heed::math::pow(S(p[0] + 2), 2) + heed::math::softplus(pair.logit) -
           heed::distance(pair) + heed::math::minimum(sum, sum);
  }
#elif MISTAKE == 1
  template <class S>
  S score(const auto& pair, const auto& p) const {
    return p[0] * std::exp(pair.logit);
  }
#elif MISTAKE == 2
  auto score(const auto& pair, const auto& p) const { return std::exp(pair.logit) * p[0]; }
#elif MISTAKE == 3
  template <class S>
  S score(const auto& pair, const auto& p) const {
    if (pair.logit > 0) return p[0] * pair.logit;
    return pair.logit;
  }
#elif MISTAKE == 4
  template <class S>
  S score(const auto& pair, const auto& p) const {
    return pair.logit > 0 ? p[0] * pair.logit : pair.logit;
  }
#elif MISTAKE == 5
  template <class S>
  S score(const auto& pair, const auto& p) const {
    return std::max(S(p[0] * pair.logit), S(0));
  }
#elif MISTAKE == 6
  template <class S>
  S score(const auto& pair, const auto& p) const {
    return std::pow(heed::math::tanh(pair.logit), 2) * p[0] + std::abs(pair.dot);
  }
#elif MISTAKE == 7
  template <class S>
  S score(const auto& pair, const auto& p) const {
    const S gate = heed::math::sigmoid(pair.logit);
    while (gate < p[0] && pair.dot > 1) return p[0];
    return gate;
  }
#elif MISTAKE == 8
  template <class S>
  S scores(const auto& pair, const auto&) const {
    return pair.logit;
  }
#else
  template <class S>
  S score(const auto& pair, const auto& p) const {
    return p[0] * pair.logit;
  }
#endif
};

// Rows without forward() for 10, without vjp() for 11, without both and PlainRows for 12; formulas of rows that use
// functions without derivatives for 17 to 19, return no number per pair for 20, have too many maps for 21, and read numbers
// of tokens that they do not declare for 37 and 38. For 43 rows ask for an extra input, and so does the readout.
template <class T>
struct Rows
#if MISTAKE != 12
    : heed::PlainRows
#endif
{
#if MISTAKE == 11
  void forward(const heed::RowBlock<T>&) const {}
#elif MISTAKE == 10
  void vjp(const heed::RowBlock<T>&, Rows&) const {}
#elif MISTAKE == 17
  auto forward(const auto& row) const { return std::exp(row.score()); }
#elif MISTAKE == 18
  auto forward(const auto& row) const {
    const auto s = row.score();
    return s * std::tanh(s);
  }
#elif MISTAKE == 19
  auto forward(const auto& row) const {
    const auto s = row.score();
    if (s > 0) return row.keep(2 * s);
    return s;
  }
#elif MISTAKE == 20
  double forward(const auto&) const { return 1; }
#elif MISTAKE == 21
  static constexpr int maps = 9;
  auto forward(const auto& row) const { return row.softmax(row.score(8)); }
#elif MISTAKE == 37
  static constexpr int key_inputs = 1;
  auto forward(const auto& row) const { return row.softmax(row.score()) * row.query_input(0); }
#elif MISTAKE == 38
  static constexpr int query_inputs = 1;
  auto forward(const auto& row) const { return row.softmax(row.score() + row.key_input(0)); }
#elif MISTAKE == 43
  static constexpr bool uses_extra = true;
  auto forward(const auto& row) const { return row.softmax(row.score() * row.extra()); }
#endif
};

// Streaming weights: without reference() for 25, with operations that vectors lack for 26 to 29,
// reading numbers of keys for 39, and correct ones that are written for vectors of any kind.
template <class T>
struct Streamed : heed::StreamedRows<T, 1> {
#if MISTAKE == 39
  static constexpr int key_inputs = 1;
#endif
  template <class S>
#if MISTAKE == 26
  S weight(const auto&, S score) const {
    return std::exp(score);
  }
#elif MISTAKE == 27
  auto weight(const auto& state, S score) const {
    return std::exp(score - state.own[0]);
  }
#elif MISTAKE == 29
  S weight(const auto&, S score) const {
    return score > 0 ? score : S(0);
  }
#else
  S weight(const auto& state, S score) const {
    const S positive = heed::math::select(score > state.own[0], score, S(0));
    const auto near = (score < 1) & ~heed::is_hidden(score);
    const S shifted = heed::math::select(near, state.own[0], score) * state.own[0] / 2.0F;
    return heed::zero_where(score < 0, heed::select(near, positive, 2 * shifted)) +
           heed::math::exp(-heed::math::maximum(score, state.own[0])) * S(max(score, S(1)));
  }
#endif
  template <class S>
  S dscore(const auto&, S score, S weight, S pull, S) const {
#if MISTAKE == 28
    return weight * std::tanh(score) * pull;
#else
    return (1 - weight) * heed::math::tanh(score) * pull;
#endif
  }
#if MISTAKE != 25
  template <class S>
  std::vector<S> reference(const heed::LongHandRow<S>& row) const {
    return row.scores[0];
  }
#endif
};

// A normaliser of whole rows by hand, without reference().
template <class T>
struct RowsByHand : heed::PlainRows {
  void forward(const heed::RowBlock<T>&) const {}
  void vjp(const heed::RowBlock<T>&, RowsByHand&) const {}
};

// An own readout without forward() for 13 and 35, without vjp() for 36, without reference() for 31, that asks for numbers of
// keys for 40 and for sums over tokens for 41.
template <class T>
struct Readout : heed::PlainReadout {
#if MISTAKE == 40
  static constexpr int key_inputs = 1;
#elif MISTAKE == 41
  static constexpr int query_inputs = 1;
  static constexpr bool sums_inputs = true;
#elif MISTAKE == 43
  static constexpr bool uses_extra = true;
#endif
#if MISTAKE == 31 || MISTAKE == 36 || MISTAKE >= 40
  void forward(const heed::ReadoutPanel<T>&) const {}
#endif
#if MISTAKE != 36
  void vjp(const heed::ReadoutPanel<T>&, Readout&) const {}
#endif
};

// Scores for packs alone: score() for 32, its features for 33. A score() that is no template for 34.
template <class T>
struct PackScore : heed::PlainScore {
#if MISTAKE == 33
  static constexpr int key_features = 1;
  void key_features_of(const heed::LaneRow<T>& row, heed::Pack<T>* f) const { f[0] = row.x(0); }
  template <class S>
  S score(const heed::PairOf<PackScore, S>& pair, const auto&) const {
    return pair.logit + pair.key[0];
  }
#else
  heed::Pack<T> score(const heed::PairOf<PackScore, heed::Pack<T>>& pair, const auto&) const {
    return pair.logit;
  }
  void score_vjp(const heed::PairOf<PackScore, heed::Pack<T>>&, const auto&, heed::Pack<T> g,
                 heed::PairOf<PackScore, heed::Pack<T>>& d, auto&) const {
    d.logit = g;
  }
#endif
};
// A score that reads sums over tokens of both sides for 42.
template <class T>
struct BothSums : heed::ScoreWith<heed::TokenInputs<1, 1>> {
  static constexpr bool sums_inputs = true;
  template <class S>
  S score(const heed::PairOf<BothSums, S>& pair, const auto&) const {
    return pair.logit + pair.query[0] + pair.key[0];
  }
};
struct Floats : heed::PlainScore {
  template <class S>
  S score(const heed::PairOf<Floats, S>& pair, const auto&) const {
    return pair.logit;
  }
};

// A score without score() for 14, without PlainScore for 9.
template <class T>
struct Score
#if MISTAKE == 14
    : heed::PlainScore
#endif
{
#if MISTAKE == 9
  template <class S>
  S score(const auto& pair, const auto&) const {
    return pair.logit;
  }
#endif
};

// An op without readout for 15, without the names of its parts for 16.
struct Incomplete {
  using Scalar = float;
#if MISTAKE == 15
  using ScoreType = heed::DotScore<float>;
  using NormaliserType = heed::Softmax<float>;
  using ReadoutType = heed::Identity<float>;
  ScoreType score;
  NormaliserType normaliser;
#endif
  template <class F>
  void visit(F&&) {}
  void validate(const heed::Geometry&, const char*) const {}
};

// A table that `parameters` does not name for 23, bucket() without `positions` for 24.
template <class T>
struct Table {
  heed::Param<T> table = heed::Param<T>(std::vector<heed::Index>{1, 8});
  std::vector<heed::Index> shape(const heed::Geometry&) const { return {-1, 8}; }
#if MISTAKE == 23
  static constexpr auto positions = &Table::table;
#else
  static constexpr auto parameters =
      std::tuple{heed::tensor("table", &Table::table, &Table::shape)};
#endif
  heed::Index bucket(heed::Index) const { return 0; }
  template <class S>
  S score(const auto& pair, const auto&) const {
    return pair.logit + pair.position;
  }
};

// A row transform whose derivative is written for rows of floats alone, for 46.
template <class T>
struct Flipped : heed::PlainTransform {
  template <class Row>
  void transform(heed::RowSide, heed::Index, const Row& x) const {
    for (heed::Index c = 0; c < x.dim(); ++c) x.set(c, -x(c));
  }
  void transform_vjp(heed::RowSide, heed::Index, const heed::LaneRowInPlace<float>&,
                     const heed::LaneRowInPlace<float>& d, const auto&, Flipped&) const {
    transform(heed::RowSide::key, 0, d);
  }
};
template <class T>
struct OfFlipped {
  using Transform = Flipped<T>;
  template <class S>
  S score(const auto& pair, const auto&) const {
    return pair.logit;
  }
};

using heed::Attention, heed::DotScore, heed::Softmax, heed::Identity;
#if MISTAKE < 9
using Op = heed::OwnAttention<Mine, float>;
#elif (MISTAKE >= 25 && MISTAKE <= 29) || MISTAKE == 39
using Op = Attention<float, DotScore<float>, Streamed<float>, Identity<float>>;
#elif MISTAKE == 30
using Op = Attention<float, DotScore<float>, RowsByHand<float>, Identity<float>>;
#elif MISTAKE == 32 || MISTAKE == 33
using Op = Attention<float, PackScore<float>, Softmax<float>, Identity<float>>;
#elif MISTAKE == 34
using Op = Attention<float, Floats, Softmax<float>, Identity<float>>;
#elif MISTAKE == 42
using Op = Attention<float, BothSums<float>, Softmax<float>, Identity<float>>;
#elif MISTAKE == 43
using Op = Attention<float, DotScore<float>, Rows<float>, Readout<float>>;
#elif MISTAKE == 44
using Op = heed::ResonantOde<float>;
#elif MISTAKE == 45
using Op = Attention<float, heed::PrototypeScore<float>, Softmax<float>, Identity<float>>;
#elif MISTAKE == 46
using Op = heed::OwnAttention<OfFlipped, float>;
#elif (MISTAKE >= 17 && MISTAKE <= 21) || (MISTAKE >= 10 && MISTAKE < 13) || MISTAKE == 37 || \
    MISTAKE == 38
using Op = Attention<float, DotScore<float>, Rows<float>, Identity<float>>;
#elif MISTAKE == 13 || MISTAKE == 31 || MISTAKE > 34
using Op = Attention<float, DotScore<float>, Softmax<float>, Readout<float>>;
#elif MISTAKE == 9 || MISTAKE == 14
using Op = Attention<float, Score<float>, Softmax<float>, Identity<float>>;
#elif MISTAKE == 22
using Op = heed::ScaledDot<float>;
#elif MISTAKE == 23 || MISTAKE == 24
using Op = heed::OwnAttention<Table, float>;
#else
using Op = Incomplete;
#endif

int main() {
  const heed::Shape shape{1, 1, 2, 2};
  float x[] = {1, 0, 0, 1}, out[4], grad[4];
  const heed::Inputs<float> in{{x, shape}, {x, shape}, {x, shape}};
  heed::Saved<float> saved;
#if MISTAKE == 22
  const auto mask =
      heed::visible<float>([](auto, auto, auto i, auto j) { return j <= i && i - j < 8; });
  heed::forward(Op{}, in, mask, {out, shape}, &saved);
#elif defined(CHECK)
  bool passed = heed::check_op(Op{}).passed();
#if MISTAKE == 0
  passed &= heed::check_op(Attention<float, DotScore<float>, Streamed<float>, Identity<float>>{})
                .passed();
#endif
  return passed ? 0 : 1;
#elif MISTAKE == 30
  (void)heed::reference::forward(Op{}, heed::reference::Problem<float>{});
#elif MISTAKE == 35
  return int(heed::explain(Op{}, {1, 1, 1, 1, 2, 2, 2, 2}).units);
#elif MISTAKE == 36
  (void)heed::forward_partial(Op{}, in);
#elif MISTAKE >= 44
  heed::hvp(Op{}, in, {}, saved, {out, shape}, {x, shape}, {}, {}, {{grad, shape}});
#else
  heed::forward(Op{}, in, heed::causal<float>(), {out, shape}, &saved);
  heed::backward(Op{}, in, heed::causal<float>(), saved, {out, shape}, {x, shape}, {{grad, shape}});
#endif
}
