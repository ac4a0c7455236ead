// SPDX-License-Identifier: Apache-2.0

// The reference against the oracle, against numbers by hand and against loops for one op only; the
// gradient check of whole ops; the causality audit.

#include <heed/check/causality.hpp>
#include <heed/check/op_gradcheck.hpp>
#include <heed/compiled.hpp>
#include <heed/reference/reference.hpp>

#include <algorithm>
#include <cmath>
#include <complex>
#include <cstdint>
#include <limits>
#include <string>
#include <vector>

#include "catch.hpp"
#include "golden_case.hpp"

namespace {

using namespace heed;
using heed_test::deviation;
using heed_test::GoldenCase;

constexpr double kInf = std::numeric_limits<double>::infinity();
constexpr double kNan = std::numeric_limits<double>::quiet_NaN();

template <class T>
using Sdpa = Attention<T, DotScore<T>, Softmax<T>, Identity<T>>;

// Fixed numbers in [-1, 1).
std::vector<double> numbers(Index count, std::uint64_t seed) {
  std::vector<double> result;
  std::uint64_t state = seed;
  for (Index n = 0; n < count; ++n) {
    state = state * 6364136223846793005ULL + 1442695040888963407ULL;
    result.push_back(double(state >> 11) * 0x1p-52 - 1.0);
  }
  return result;
}

bool contains(const std::string& text, const std::string& part) {
  return text.find(part) != std::string::npos;
}

reference::Problem<double> random_problem(const Geometry& g, Index extra_dim = 0) {
  reference::Problem<double> problem;
  problem.geometry = g;
  problem.query = numbers(g.batch * g.query_heads * g.len_q * g.dim_qk, 1);
  problem.key = numbers(g.batch * g.kv_heads * g.len_kv * g.dim_qk, 2);
  problem.value = numbers(g.batch * g.kv_heads * g.len_kv * g.dim_v, 3);
  problem.extra = numbers(g.query_rows() * extra_dim, 4);
  return problem;
}

// All parts of a mask except a boolean one: band, lengths, slopes, cap, bias with a hidden entry.
reference::Problem<double> busy_problem() {
  auto problem = random_problem({2, 4, 4, 2, 3, 5, 4, 3});
  problem.mask = causal<double>(Align::bottom_right) & key_lengths<double>({5, 4}) &
                 alibi<double>({0.5, 0.25, 0.125, 0.0625}, Align::bottom_right) &
                 soft_cap<double>(1.5);
  problem.bias_shape = {1, 4, 1, 5};
  problem.bias = numbers(20, 5);
  problem.bias[7] = -kInf;
  problem.scale = 0.8;
  return problem;
}

}  // namespace

TEST_CASE("the slow twin and its tape reproduce every golden sdpa case") {
  const auto files = heed_test::golden_files(HEED_GOLDEN_DIR, "sdpa_");
  REQUIRE(files.size() >= 30);
  for (const auto& file : files) {
    const GoldenCase golden(file);
    CAPTURE(golden.name());
    REQUIRE(golden.variant() == "sdpa");
    const auto problem = golden.problem();
    const auto result = reference::forward(Sdpa<double>{}, problem, {.weights = true});
    CHECK(deviation(result.out, golden.tensor("out")) <= 1e-12);
    CHECK(deviation(result.lse[0], golden.tensor("lse")) <= 1e-12);
    if (golden.has("attn")) CHECK(deviation(result.weights, golden.tensor("attn")) <= 1e-12);

    const double floor = golden.gradient_floor();
    const auto gradients = reference::gradients(Sdpa<double>{}, problem, golden.tensor("dout"));
    CHECK(deviation(gradients.dquery, golden.tensor("dq"), floor) <= 1e-12);
    CHECK(deviation(gradients.dkey, golden.tensor("dk"), floor) <= 1e-12);
    CHECK(deviation(gradients.dvalue, golden.tensor("dv")) <= 1e-12);
    CHECK(gradients.dbias.empty() != golden.flag("has_bias"));
    if (golden.flag("has_bias")) CHECK(deviation(gradients.dbias, golden.tensor("dbias")) <= 1e-12);
    const auto unseen = std::count(result.lse[0].begin(), result.lse[0].end(), -kInf);
    CHECK(unseen == golden.integer("fully_masked_rows"));
  }
}

TEST_CASE("a golden case says which file lacks what") {
  const auto file = heed_test::golden_files(HEED_GOLDEN_DIR, "sdpa_full").at(0);
  const GoldenCase golden(file);
  CHECK(golden.is_operator());
  const std::string name = file.string();
  CHECK_THROWS_WITH(golden.text("nonsense"), name + ": the metadata has no nonsense");
  CHECK_THROWS_WITH(golden.tensor("nonsense"), name + ": there is no tensor nonsense");
  CHECK_THROWS_WITH(golden.number("variant"),
                    name + ": metadata variant is \"sdpa\", it must be a number");
}

TEST_CASE("a deviation is infinite where one side alone is NaN or infinite") {
  const std::vector<double> want = {2, -kInf, kNan};
  CHECK(deviation(std::vector<double>{2, -kInf, kNan}, want) == 0);
  CHECK(deviation(std::vector<double>{3, -kInf, kNan}, want) == 0.5);
  CHECK(deviation(std::vector<double>{2, kInf, kNan}, want) == kInf);
  CHECK(deviation(std::vector<double>{2, -kInf, 0}, want) == kInf);
  CHECK(deviation(std::vector<double>{kNan, -kInf, kNan}, want) == kInf);
  CHECK(deviation(std::vector<double>{2, -kInf}, want) == kInf);
}

TEST_CASE("ALiBi subtracts slope times distance from the position on the key axis") {
  // Zero logits: scores are -slope |p - j|. Two queries against three keys, p = i or i + 1.
  reference::Problem<double> problem;
  problem.geometry = {1, 2, 2, 2, 2, 3, 1, 1};
  problem.query = {0, 0, 0, 0};
  problem.key = {1, 1, 1, 1, 1, 1};
  problem.value = {1, 0, 0, 0, 1, 0};
  problem.mask = alibi<double>({0.5, 0.25});
  const auto top_left = reference::forward(Sdpa<double>{}, problem, {.scores = true});
  // Head 0, query 0: scores 0, -1/2, -1; value picks key 0.
  CHECK(top_left.scores[0][1] == -0.5);
  CHECK(top_left.scores[0][2] == -1.0);
  CHECK(top_left.out[0] == Approx(0.506480391055654).epsilon(1e-14));
  CHECK(top_left.lse[0][0] == Approx(0.680269670641735).epsilon(1e-14));

  problem.mask = alibi<double>({0.5, 0.25}, Align::bottom_right);
  const auto bottom_right = reference::forward(Sdpa<double>{}, problem);
  // Head 1, query 0 at p = 1: scores -1/4, 0, -1/4; value picks key 1.
  CHECK(bottom_right.out[2] == Approx(0.390991315159432).epsilon(1e-14));
}

TEST_CASE("a soft cap bends the scaled logit, and the bias comes after it") {
  reference::Problem<double> problem;
  problem.geometry = {1, 1, 1, 1, 1, 2, 1, 1};
  problem.query = {6};
  problem.key = {1, 2};
  problem.value = {0, 1};
  problem.scale = 0.5;
  problem.mask = soft_cap<double>(2);
  // 2 tanh(3/2), 2 tanh(6/2)
  const auto capped = reference::forward(Sdpa<double>{}, problem, {.scores = true});
  CHECK(capped.scores[0][0] == Approx(1.81029650728973).epsilon(1e-14));
  CHECK(capped.scores[0][1] == Approx(1.99010950737346).epsilon(1e-14));
  CHECK(capped.out[0] == Approx(0.544832518644795).epsilon(1e-14));

  problem.bias = {10, 20};
  problem.bias_shape = {1, 1, 1, 2};
  const auto biased = reference::forward(Sdpa<double>{}, problem, {.scores = true});
  CHECK(biased.scores[0][0] == Approx(11.8102965072897).epsilon(1e-14));
  CHECK(biased.scores[0][1] == Approx(21.99010950737346).epsilon(1e-14));
}

TEST_CASE("a query sees the keys of its own document") {
  reference::Problem<double> problem;
  problem.geometry = {1, 1, 1, 1, 3, 3, 1, 1};
  problem.query = {0, 0, 0};
  problem.key = {1, 1, 1};
  problem.value = {1, 3, 7};
  problem.mask = documents<double>({4, 9, 5}, {4, 4, 9});
  const auto result = reference::forward(Sdpa<double>{}, problem);
  CHECK(result.out == std::vector<double>{2, 7, 0});  // (1 + 3) / 2; 7; nothing
  CHECK(result.lse[0][1] == 0.0);
  CHECK(result.lse[0][2] == -kInf);
}

TEST_CASE("the scale is the root of one map's width unless given") {
  const Geometry g{1, 1, 1, 1, 1, 1, 16, 1};
  CHECK(reference::default_scale(Sdpa<double>{}, g) == 0.25);
  CHECK(reference::default_scale(Sdpa<double>{}, Geometry{1, 0, 0, 0, 1, 1, 16, 1}) == 0.25);
}

TEST_CASE("hidden keys and values are never read, in no gradient either") {
  auto clean = random_problem({1, 2, 2, 1, 3, 4, 2, 2});
  clean.mask = causal<double>();  // nobody sees key 3
  auto dirty = clean;
  for (const Index c : {6, 7}) dirty.key[std::size_t(c)] = dirty.value[std::size_t(c)] = kNan;
  dirty.value[6] = kInf;
  const auto grad_out = gradcheck_grad_out(clean.geometry);
  CHECK(reference::forward(Sdpa<double>{}, dirty).out ==
        reference::forward(Sdpa<double>{}, clean).out);
  const auto a = reference::gradients(Sdpa<double>{}, dirty, grad_out);
  const auto b = reference::gradients(Sdpa<double>{}, clean, grad_out);
  CHECK(a.dquery == b.dquery);
  CHECK(a.dkey == b.dkey);
  CHECK(a.dvalue == b.dvalue);
  CHECK(a.dkey[6] == 0.0);
  CHECK(a.dvalue[7] == 0.0);
}

TEST_CASE("NaN in a visible value reaches the rows that see it, and no other") {
  auto problem = random_problem({1, 1, 1, 1, 3, 3, 2, 1});
  problem.mask = causal<double>();
  problem.value[1] = kNan;
  const auto out = reference::forward(Sdpa<double>{}, problem).out;
  CHECK(std::isfinite(out[0]));
  CHECK(std::isnan(out[1]));
  CHECK(std::isnan(out[2]));
}

TEST_CASE("a row that sees no key is +0 with lse -infinity, and passes no gradient") {
  auto problem = random_problem({2, 1, 1, 1, 2, 3, 2, 2});
  problem.mask = key_lengths<double>({0, 3});
  const auto result = reference::forward(Sdpa<double>{}, problem);
  for (std::size_t n = 0; n < 4; ++n) {
    CHECK(result.out[n] == 0.0);
    CHECK(!std::signbit(result.out[n]));
  }
  CHECK(result.lse[0][1] == -kInf);
  CHECK(std::isfinite(result.lse[0][2]));
  const auto gradients =
      reference::gradients(Sdpa<double>{}, problem, gradcheck_grad_out(problem.geometry));
  for (std::size_t n = 0; n < 4; ++n) CHECK(gradients.dquery[n] == 0.0);
  for (std::size_t n = 0; n < 6; ++n) CHECK(gradients.dvalue[n] == 0.0);
  CHECK(gradients.dvalue[6] != 0.0);
}

TEST_CASE("an extent of 0 gives the right shape") {
  const auto size_of = [](const Geometry& g) {
    const auto problem = random_problem(g);
    const auto gradients = reference::gradients(Sdpa<double>{}, problem, gradcheck_grad_out(g));
    CHECK(gradients.dkey.size() == problem.key.size());
    return reference::forward(Sdpa<double>{}, problem).out.size();
  };
  CHECK(size_of({0, 1, 1, 1, 2, 3, 2, 2}) == 0);
  CHECK(size_of({1, 0, 0, 0, 2, 3, 2, 2}) == 0);
  CHECK(size_of({1, 1, 1, 1, 0, 3, 2, 2}) == 0);
  CHECK(size_of({1, 1, 1, 1, 2, 0, 2, 2}) == 4);
}

TEST_CASE("sizes that disagree are refused with both numbers") {
  const auto refusal = [](auto change) {
    auto problem = random_problem({1, 2, 2, 1, 2, 3, 4, 4});
    change(problem);
    try {
      (void)reference::forward(Sdpa<double>{}, problem);
    } catch (const std::invalid_argument& error) {
      return std::string(error.what());
    }
    return std::string();
  };
  using P = reference::Problem<double>;
  CHECK(refusal([](P&) {}).empty());
  CHECK(refusal([](P& p) { p.key.pop_back(); }) ==
        "reference::forward: key has 11 numbers, its shape is (1,1,3,4)");
  CHECK(refusal([](P& p) { p.geometry.kv_heads = 3; }) ==
        "reference::forward: kv_heads is 3, it must divide heads, 2");
  CHECK(refusal([](P& p) { p.geometry.query_heads = 4; }) ==
        "reference::forward: query_heads is 4, the op needs 2");
  CHECK(refusal([](P& p) { p.geometry.dim_v = 0; }) ==
        "reference::forward: dim_qk is 4 and dim_v is 0, both must be positive");
  CHECK(refusal([](P& p) { p.extra = {1}; }) ==
        "reference::forward: extra has 1 numbers, its shape is (1,2,2,0)");
  CHECK(refusal([](P& p) { p.bias = {1}; }) ==
        "reference::forward: bias has 1 numbers, its shape is (0,0,0,0)");
  CHECK(refusal([](P& p) {
          p.bias = {1, 2};
          p.bias_shape = {1, 1, 1, 2};
        }) ==
        "reference::forward: the bias has shape (1,1,1,2), its last extent must be len_kv, 3: it "
        "does not broadcast over keys");
  CHECK_THROWS_WITH(
      reference::gradients(Sdpa<double>{}, random_problem({1, 1, 1, 1, 1, 1, 1, 1}), {1, 2}),
      "reference::gradients: grad_out has 2 numbers, out has 1");
}

TEST_CASE("a mask of another type moves its bias into the problem") {
  const std::vector<float> values = {0.5F, -1.0F, -std::numeric_limits<float>::infinity(), 0.25F};
  const Mask<float> mask = causal<float>() & alibi<float>({0.25F}) & soft_cap<float>(3.0F) &
                           bias<float>({values.data(), {1, 1, 1, 4}});
  auto problem = random_problem({1, 1, 1, 1, 3, 4, 2, 2});
  reference::use_mask(problem, mask);
  CHECK(problem.bias == std::vector<double>{0.5, -1, -kInf, 0.25});

  auto other = random_problem({1, 1, 1, 1, 3, 4, 2, 2});
  other.mask = causal<double>() & alibi<double>({0.25}) & soft_cap<double>(3) &
               bias<double>({problem.bias.data(), {1, 1, 1, 4}});
  const auto a = reference::forward(Sdpa<double>{}, problem, {.weights = true});
  const auto b = reference::forward(Sdpa<double>{}, other, {.weights = true});
  CHECK(a.out == b.out);
  CHECK(a.lse == b.lse);        // shifts of a row, which the weights do not show
  CHECK(a.weights[2] == 0.0);   // causal
  CHECK(a.weights[10] == 0.0);  // bias -infinity
}

TEST_CASE("the problem's bias takes the place of the mask's") {
  const std::vector<double> of_mask = {-kInf, 7, 0};
  auto problem = random_problem({1, 1, 1, 1, 2, 3, 2, 2});
  problem.bias = {0.5, -kInf, -1};
  problem.bias_shape = {1, 1, 1, 3};
  const auto alone = reference::forward(Sdpa<double>{}, problem, {.weights = true});
  problem.mask = bias<double>({of_mask.data(), {1, 1, 1, 3}});
  const auto both = reference::forward(Sdpa<double>{}, problem, {.weights = true});
  CHECK(both.weights == alone.weights);
  CHECK(both.weights[0] > 0.0);
  CHECK(both.weights[1] == 0.0);
}

TEST_CASE("every scalar runs the same formula") {
  const auto problem = busy_problem();
  const auto exact = reference::forward(Sdpa<double>{}, problem).out;
  const auto values = [&]<class S>(S) {
    std::vector<double> plain;
    const auto result = reference::forward(Sdpa<S>{}, reference::cast_problem<S>(problem));
    for (const S& x : result.out) plain.push_back(double(math::value_of(x)));
    return plain;
  };
  CHECK(deviation(values(float()), exact) <= 1e-6);
  CHECK(deviation(values(std::complex<double>()), exact) <= 1e-15);
  CHECK(deviation(values(static_cast<long double>(0)), exact) <= 1e-15);
  CHECK(deviation(values(Dual<double, 1>()), exact) <= 1e-15);
  CHECK(deviation(values(Var<double>()), exact) <= 1e-15);
}

TEST_CASE("the tape in float is near the tape in double") {
  const auto problem = busy_problem();
  const auto grad_out = gradcheck_grad_out(problem.geometry);
  const auto exact = reference::gradients(Sdpa<double>{}, problem, grad_out);
  const auto rough = reference::gradients(Sdpa<float>{}, reference::cast_problem<float>(problem),
                                          std::vector<float>(grad_out.begin(), grad_out.end()));
  CHECK(deviation(rough.dquery, exact.dquery) <= 1e-5);
  CHECK(deviation(rough.dkey, exact.dkey) <= 1e-5);
  CHECK(deviation(rough.dvalue, exact.dvalue) <= 1e-5);
  CHECK(deviation(rough.dbias, exact.dbias) <= 1e-5);
}

TEST_CASE("the error scale counts magnitudes of visible pairs") {
  reference::Problem<double> problem;
  problem.geometry = {1, 1, 1, 1, 1, 3, 2, 1};
  problem.query = {1, -2};
  problem.key = {3, 3, 1, -1, 100, 100};  // dots -3, 3; |.| 9, 3
  problem.value = {-4, 2, 1000};
  problem.scale = 0.5;
  problem.mask = key_lengths<double>({2});
  const auto scale = reference::forward(Sdpa<double>{}, problem, {.error_scale = true}).error_scale;
  CHECK(scale.s_row == std::vector<double>{4.5});
  // p = sigmoid(-3), sigmoid(3): 4 p_0 + 2 p_1
  const double p = 1 / (1 + std::exp(3.0));
  CHECK(scale.weighted_abs_value[0] == Approx(4 * p + 2 * (1 - p)).epsilon(1e-14));
}

// An op that uses every hook, and the same in loops without hooks.
namespace {

template <class T>
struct BusyScore : PlainScore {
  static constexpr bool has_projection = true, has_table = true;
  static constexpr int query_features = 1, key_features = 2;

  Param<T> gain = {T(0.75), T(1.25)}, tilt = T(0.5);
  Param<T> basis = Param<T>({2, 3}, {T(0.3), T(-0.4), T(0.9), T(0.7), T(0.2), T(-0.6)});
  Param<T> prototypes = Param<T>({3, 2}, {T(1), T(0.2), T(-0.8), T(0.5), T(0.1), T(-1)});

  std::vector<Index> basis_shape(const Geometry&) const { return {2, 3}; }
  std::vector<Index> prototype_shape(const Geometry&) const { return {3, 2}; }
  static constexpr auto parameters =
      std::tuple{named("gain", &BusyScore::gain), named("tilt", &BusyScore::tilt),
                 tensor("basis", &BusyScore::basis, &BusyScore::basis_shape),
                 tensor("prototypes", &BusyScore::prototypes, &BusyScore::prototype_shape)};
  const Param<T>& projection() const { return basis; }
  Index table_size() const { return 3; }
  template <class S>
  void prepare_table(Index h, Index dim, S* out) const {
    for (Index n = 0; n < 3 * dim; ++n) out[n] = math::constant<S>(h + 1) * prototypes[n];
  }
  template <class Row, class S>
  void query_features_of(const Row& row, S* f) const {
    f[0] = row.x(0) * row.x(1);
  }
  template <class Row, class S>
  void key_features_of(const Row& row, S* f) const {
    Index best = 0;
    for (Index m = 1; m < row.table_rows(); ++m)
      if (math::value_of(row.table(m)) > math::value_of(row.table(best))) best = m;
    f[0] = math::constant<S>(best);
    f[1] = row.projected(2);
  }
  template <class S>
  S score(const PairOf<BusyScore, S>& pair, const auto& p) const {
    return p[0] * pair.logit + p[1] * pair.projected + pair.table * pair.key[1] +
           pair.query[0] * pair.dot + math::constant<S>(0.1) * (pair.query_index - pair.key_index);
  }
};

template <class T>
struct BusyNormaliser : PlainRows {
  static constexpr bool uses_extra = true;
  static constexpr int maps = 2;

  Param<T> factor = T(1.5);

  static constexpr auto parameters = std::tuple{named("factor", &BusyNormaliser::factor)};
  Source source(const Geometry& g, Index h, int map) const {
    return {h, g.kv_head(h), 2 * map, 2 - 2 * map, 2};  // queries straight, keys crossed
  }
  template <class S>
  std::vector<S> reference(const LongHandRow<S>& row) const {
    std::vector<S> weights = long_hand_softmax(row.scores[0]);
    const std::vector<S> other = long_hand_softmax(row.scores[1]);
    for (std::size_t j = 0; j < weights.size(); ++j) weights[j] -= factor[0] * row.extra * other[j];
    return weights;
  }
};

template <class T>
struct BusyReadout : PlainReadout {
  static constexpr int diagnostics = 1;

  Param<T> lift = T(0.25);

  static constexpr auto parameters = std::tuple{named("lift", &BusyReadout::lift)};
  template <class S>
  void reference(ReadoutContext<S>& context) const {
    const Geometry& g = context.geometry;
    for (Index b = 0; b < g.batch; ++b)
      for (Index h = 0; h < g.heads; ++h)
        for (Index i = 0; i < g.len_q; ++i) {
          S* out = context.out_row(b, h, i);
          for (Index c = 0; c < g.dim_v; ++c)
            out[c] = out[c] * out[c] + lift[0] * context.query_row(b, h, i)[3] *
                                           context.value_row(b, g.kv_head(h), 0)[c];
          context.diagnostics[0][std::size_t(g.row_index(b, h, i))] = double(i);
        }
  }
};

template <class T>
using BusyOp = Attention<T, BusyScore<T>, BusyNormaliser<T>, BusyReadout<T>>;

const Geometry kBusyGeometry{2, 2, 2, 1, 3, 4, 4, 2};

// Score of map m for query i and key j of batch b, head h, in kBusyGeometry.
double busy_score(const reference::Problem<double>& p, Index b, Index h, int m, Index i, Index j) {
  const BusyScore<double> s;
  const double* q = p.query.data() + ((b * 2 + h) * 3 + i) * 4 + 2 * m;
  const double* k = p.key.data() + (b * 4 + j) * 4 + 2 - 2 * m;
  const double dot = q[0] * k[0] + q[1] * k[1];
  double projected = 0, key_projected = 0;
  for (Index r = 0; r < 3; ++r) {
    key_projected = k[0] * s.basis[r] + k[1] * s.basis[3 + r];
    projected += (q[0] * s.basis[r] + q[1] * s.basis[3 + r]) * key_projected;
  }
  Index best = 0;
  double top = -kInf;
  for (Index n = 0; n < 3; ++n) {
    const double match = k[0] * s.prototypes[2 * n] + k[1] * s.prototypes[2 * n + 1];
    if (match > top) best = n, top = match;
  }
  const double table =
      double(h + 1) * (q[0] * s.prototypes[2 * best] + q[1] * s.prototypes[2 * best + 1]);
  return s.gain[h] * dot / std::sqrt(2.0) + 0.5 * projected + table * key_projected +
         q[0] * q[1] * dot + 0.1 * double(i - j);
}

// Output element c of a row, under a causal mask.
double busy_out(const reference::Problem<double>& p, Index b, Index h, Index i, Index c) {
  double sum[2] = {0, 0}, mixed[2] = {0, 0};
  for (int m = 0; m < 2; ++m)
    for (Index j = 0; j <= i; ++j) {
      const double e = std::exp(busy_score(p, b, h, m, i, j));
      sum[m] += e;
      mixed[m] += e * p.value[std::size_t((b * 4 + j) * 2 + c)];
    }
  const Index row = (b * 2 + h) * 3 + i;
  const double mix = mixed[0] / sum[0] - 1.5 * p.extra[std::size_t(row)] * mixed[1] / sum[1];
  return mix * mix + 0.25 * p.query[std::size_t(row * 4 + 3)] * p.value[std::size_t(b * 8 + c)];
}

}  // namespace

TEST_CASE("features, projection, table, maps, extra and readout reach an op as its hooks say") {
  auto problem = random_problem(kBusyGeometry, 1);
  problem.mask = causal<double>();
  const auto result = reference::forward(BusyOp<double>{}, problem, {.scores = true});
  const Geometry& g = problem.geometry;
  for (Index b = 0; b < g.batch; ++b)
    for (Index h = 0; h < g.heads; ++h)
      for (Index i = 0; i < g.len_q; ++i) {
        const Index row = g.row_index(b, h, i);
        CAPTURE(b, h, i);
        for (Index c = 0; c < 2; ++c)
          CHECK(result.out[std::size_t(row * 2 + c)] ==
                Approx(busy_out(problem, b, h, i, c)).epsilon(1e-13).margin(1e-14));
        for (int m = 0; m < 2; ++m)
          for (Index j = 0; j < 4; ++j) {
            const double score = result.scores[std::size_t(m)][std::size_t(row * 4 + j)];
            if (j > i)
              CHECK(score == -kInf);
            else
              CHECK(score ==
                    Approx(busy_score(problem, b, h, m, i, j)).epsilon(1e-13).margin(1e-14));
          }
        CHECK(result.diagnostics[0][std::size_t(row)] == double(i));
      }
}

TEST_CASE("with two maps the error scale adds what is subtracted") {
  auto problem = random_problem(kBusyGeometry, 1);
  problem.mask = causal<double>();
  for (double& x : problem.extra) x = 2.0 / 3.0;  // factor 1.5: weights p1 - p2
  const auto result =
      reference::forward(BusyOp<double>{}, problem, {.weights = true, .error_scale = true});
  // Query 0 sees one key: p1 = p2 = 1, weight 0, and the scale is 2 |v|.
  CHECK(result.weights[0] == Approx(0).margin(1e-15));
  CHECK(result.error_scale.weighted_abs_value[1] ==
        Approx(2 * std::abs(problem.value[1])).epsilon(1e-14));
}

TEST_CASE("three methods confirm the tape's gradient of sdpa") {
  const auto problem = busy_problem();
  const auto gradients =
      reference::gradients(Sdpa<double>{}, problem, gradcheck_grad_out(problem.geometry));
  for (const Method method : {Method::central_difference, Method::complex_step, Method::dual}) {
    const auto report =
        check_op_gradient(Sdpa<double>{}, problem, named_gradients(gradients), method);
    INFO(report.text());
    CHECK(report.passed);
    CHECK(report.checked == 2 * 4 * 3 * 4 + 2 * 2 * 5 * (4 + 3) + 20);
  }
}

TEST_CASE("three methods confirm the tape's gradient of an op that uses every hook") {
  auto problem = random_problem(kBusyGeometry, 1);
  problem.mask = causal<double>();
  const auto gradients =
      reference::gradients(BusyOp<double>{}, problem, gradcheck_grad_out(problem.geometry));
  CHECK(gradients.op.score.gain[0] != gradients.op.score.gain[1]);
  for (const Method method : {Method::central_difference, Method::complex_step, Method::dual}) {
    const auto report =
        check_op_gradient(BusyOp<double>{}, problem, named_gradients(gradients), method);
    INFO(report.text());
    CHECK(report.passed);
    CHECK(report.checked == 2 * 2 * 3 * 4 + 2 * 4 * (4 + 2) + 12 + (2 + 1 + 6 + 6) + 1 + 1);
  }
}

TEST_CASE("one flipped sign in any tensor is found and named") {
  auto problem = random_problem(kBusyGeometry, 1);
  problem.bias = numbers(4, 9);
  problem.bias_shape = {1, 1, 1, 4};
  const auto right = named_gradients(
      reference::gradients(BusyOp<double>{}, problem, gradcheck_grad_out(problem.geometry)));
  REQUIRE(right.size() == 11);
  for (std::size_t t = 0; t < right.size(); ++t) {
    auto wrong = right;
    auto& values = wrong[t].values;
    const auto largest = std::max_element(
        values.begin(), values.end(), [](double a, double b) { return std::abs(a) < std::abs(b); });
    REQUIRE(std::abs(*largest) > 1e-4);
    *largest = -*largest;
    const auto report = check_op_gradient(BusyOp<double>{}, problem, wrong);
    CHECK(!report.passed);
    CHECK(report.failed == 1);
    CHECK(report.worst.tensor == right[t].name);
    CHECK(report.worst.index == largest - values.begin());
  }
}

TEST_CASE("a tensor is left out of the check by name only") {
  auto problem = random_problem(kBusyGeometry, 1);
  auto gradients = named_gradients(
      reference::gradients(BusyOp<double>{}, problem, gradcheck_grad_out(problem.geometry)));
  const auto basis = std::find_if(gradients.begin(), gradients.end(),
                                  [](const NamedTensor& t) { return t.name == "score.basis"; });
  REQUIRE(basis != gradients.end());
  basis->values.assign(6, 99.0);
  const BusyOp<double> op;
  CHECK(check_op_gradient(op, problem, gradients).failed == 6);
  OpGradcheckOptions options;
  options.fixed = {"score.basis"};
  CHECK(check_op_gradient(op, problem, gradients, Method::dual, options).passed);
  gradients.erase(basis);
  CHECK(check_op_gradient(op, problem, gradients, Method::dual, options).passed);
  CHECK_THROWS_WITH(check_op_gradient(op, problem, gradients),
                    "check_gradient: analytic has no entry \"score.basis\"");
  options.fixed = {"score.bassi"};
  CHECK_THROWS_WITH(
      check_op_gradient(op, problem, gradients, Method::dual, options),
      "check_op_gradient: options.fixed names \"score.bassi\", which the op does not have");
}

TEST_CASE("a gradient at a bias of -infinity must be 0") {
  const auto problem = busy_problem();
  auto gradients = named_gradients(
      reference::gradients(Sdpa<double>{}, problem, gradcheck_grad_out(problem.geometry)));
  REQUIRE(gradients.back().name == "bias");
  REQUIRE(gradients.back().values[7] == 0.0);
  gradients.back().values[7] = 1e-6;
  const auto report =
      check_op_gradient(Sdpa<double>{}, problem, gradients, Method::central_difference);
  CHECK(report.failed == 1);
  CHECK(report.worst.index == 7);
}

namespace {

// Self-attention over token-major rows (batch, len, width): query = key = value = input.
template <class T>
auto self_attention(Index batch, Index len, const Mask<double>& mask) {
  return [=](const std::vector<T>& x) {
    const Index width = Index(x.size()) / (batch * len);
    reference::Problem<T> problem;
    problem.geometry = {batch, 1, 1, 1, len, len, width, width};
    problem.query = problem.key = problem.value = x;
    problem.mask = mask;
    return reference::forward(Sdpa<T>{}, problem).out;
  };
}

}  // namespace

TEST_CASE("the audit passes causal attention and hears every change") {
  const auto x = numbers(2 * 5 * 3, 6);
  const auto report =
      audit_causality(self_attention<double>(2, 5, causal<double>()), x, 5, {.batch = 2});
  INFO(report.text());
  CHECK(report.causal);
  CHECK(report.runs == 2 * 5 * 5);
  CHECK(report.effective == report.runs);
  CHECK(report.leaks == 0);
  CHECK(report.text() == "causal: 50 changes, 50 with an effect, no leak");

  const std::vector<float> narrow(x.begin(), x.end());
  CHECK(audit_causality(self_attention<float>(2, 5, causal<double>()), narrow, 5, {.batch = 2})
            .causal);
}

TEST_CASE("the audit finds attention that looks one token ahead") {
  const auto x = numbers(5 * 2, 6);
  const auto report = audit_causality(self_attention<double>(1, 5, window<double>(-1, 1)), x, 5);
  CHECK(!report.causal);
  CHECK(report.change == "1e30");
  CHECK(report.token == 4);
  CHECK(report.position == 3);
  CHECK(report.column == 0);
  CHECK(report.before != report.after);
  CHECK(contains(report.text(), "token 4 of sequence 0 set to 1e30; output (0, 3, 0) was "));
}

TEST_CASE("the audit finds leaks of every kind") {
  const std::vector<double> x = numbers(6, 7);
  const auto audit = [&](auto leak) {
    return audit_causality(
        [leak](const std::vector<double>& in) {
          auto out = in;
          leak(in, out);
          return out;
        },
        x, 6);
  };
  using V = std::vector<double>;
  SECTION("none") {
    CHECK(audit([](const V&, V&) {}).causal);
  }
  SECTION("in one place only") {
    const auto report = audit([](const V& in, V& out) { out[2] += 1e-9 * in[5]; });
    CHECK(!report.causal);
    CHECK(report.token == 5);
    CHECK(report.position == 2);
  }
  SECTION("multiplied by 0: NaN and infinity only") {
    const auto report = audit([](const V& in, V& out) { out[0] += 0 * in[1]; });
    CHECK(report.change == "NaN");
    CHECK(report.leaks == 2);
    CHECK(std::isnan(report.after));
  }
  SECTION("behind a gate that huge numbers close: random numbers only") {
    const auto report =
        audit([](const V& in, V& out) { out[3] += std::abs(in[4]) < 10 ? in[4] - 5 : 0; });
    CHECK(!report.causal);
    CHECK(report.position == 3);
  }
  SECTION("the sign of a zero") {
    const auto report = audit([](const V& in, V& out) { out[0] = in[5] < -1e20 ? -0.0 : 0.0; });
    CHECK(report.change == "-1e30");
    CHECK(report.leaks == 1);
  }
}

TEST_CASE("the audit finds sequences that notice each other") {
  const auto x = numbers(2 * 3, 8);
  const auto coupled = [](const std::vector<double>& in) {
    auto out = in;
    out[5] += in[0];  // the last token of sequence 1 reads the first of sequence 0
    return out;
  };
  const auto report = audit_causality(coupled, x, 3, {.batch = 2});
  CHECK(!report.causal);
  CHECK(report.batch == 0);
  CHECK(report.out_batch == 1);
  CHECK(report.position == 2);
  CHECK(audit_causality(coupled, x, 3, {.batch = 2, .check_other_sequences = false}).causal);
}

TEST_CASE("the audit changes ids within the vocabulary") {
  const std::vector<int> ids = {3, 0, 4, 4, 1};
  bool in_range = true;
  const auto run = [&](Index ahead) {
    return [&in_range, ahead](const std::vector<int>& in) {
      std::vector<float> out;
      for (Index t = 0; t < 5; ++t) {
        in_range = in_range && in[std::size_t(t)] >= 0 && in[std::size_t(t)] < 5;
        out.push_back(float(in[std::size_t(std::min<Index>(4, t + ahead))]));
      }
      return out;
    };
  };
  const auto report = audit_causality(run(0), ids, 5, {.vocabulary = 5});
  CHECK(report.causal);
  CHECK(report.runs == 10);
  CHECK(report.effective == 10);
  CHECK(!audit_causality(run(1), ids, 5, {.vocabulary = 5}).causal);
  CHECK(in_range);
  CHECK_THROWS_WITH(audit_causality(run(0), ids, 5),
                    "audit_causality: vocabulary is 0, ids need at least 2");
  CHECK_THROWS_WITH(audit_causality(run(0), ids, 5, {.vocabulary = 4}),
                    "audit_causality: an id is 4, it must lie in [0, 4)");
}

TEST_CASE("the audit tells a deaf run and one that is not the same twice") {
  const auto x = numbers(4, 9);
  const auto deaf =
      audit_causality([](const std::vector<double>&) { return std::vector<double>(4); }, x, 4);
  CHECK(deaf.causal);
  CHECK(deaf.runs == 20);
  CHECK(deaf.effective == 0);

  double calls = 0;
  const auto moody = audit_causality(
      [&](const std::vector<double>& in) {
        auto out = in;
        out[2] = ++calls;
        return out;
      },
      x, 4);
  CHECK(!moody.causal);
  CHECK(moody.change == "nothing");
  CHECK(moody.position == 2);
  CHECK(contains(moody.text(), "not reproducible"));
}

TEST_CASE("the audit can look at some tokens only, and refuses sizes that do not divide") {
  const auto same = [](const std::vector<double>& in) { return in; };
  const auto x = numbers(12, 9);
  CHECK(audit_causality(same, x, 12, {.max_tokens = 3}).runs == 15);
  CHECK(audit_causality(same, std::vector<double>{}, 0).runs == 0);
  CHECK_THROWS_WITH(audit_causality(same, x, 5),
                    "audit_causality: inputs has 12 numbers, they do not divide into 1 x 5 tokens");
  CHECK_THROWS_WITH(
      audit_causality([](const std::vector<double>&) { return std::vector<double>(5); }, x, 12),
      "audit_causality: run returned 5 numbers, they do not divide into 1 x 12 rows");
}
