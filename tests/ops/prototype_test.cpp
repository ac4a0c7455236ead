// SPDX-License-Identifier: Apache-2.0

// Prototype attention in public calls, and its exchange with ART memories.

#include "catch.hpp"
#include "door_case.hpp"

#include <heed/check/op_gradcheck.hpp>
#include <heed/ops/dar.hpp>
#include <heed/ops/prototype.hpp>

namespace {

using namespace heed;
using namespace heed_test;

// Each part alone has a W of its own.
template <class T>
using ScoreOnly = Attention<T, PrototypeScore<T>, Softmax<T>, Identity<T>>;
template <class T>
using DarPulled = Attention<T, DarScore<T>, Softmax<T>, PrototypeReadout<T>>;

static_assert(AttentionOp<Prototype<float>> && AttentionOp<Prototype<double>>);
static_assert(AttentionOp<ScoreOnly<float>> && AttentionOp<DarPulled<double>>);

template <class T>
Param<T> random_rows(Index heads, Index rows, Index dim, unsigned seed) {
  std::mt19937 random(seed);
  std::normal_distribution<double> normal;
  Param<T> W(std::vector<Index>{heads, rows, dim});
  for (Index i = 0; i < W.size(); ++i) W[i] = T(normal(random));
  return W;
}

template <class T>
Prototype<T> random_prototype(const Geometry& g, Index rows, bool per_head = false) {
  auto op = make_prototype<T>(g, rows);
  op.score.W = random_rows<T>(g.heads, rows, g.dim_qk, 21);
  op.score.strength = T(0.8);
  op.readout.pull = T(-0.6);
  if (!per_head) return op;
  op.score.strength = op.readout.pull = Param<T>(std::vector<Index>{g.heads});
  for (Index h = 0; h < g.heads; ++h) {
    op.score.strength[h] = T(0.5 + 0.25 * double(h));
    op.readout.pull[h] = T(0.3 - 0.2 * double(h));
  }
  return op;
}

template <class T>
void compare_golden(const GoldenCase& c) {
  Prototype<T> op;
  op.score.W = c.param<T>("W");
  op.score.strength = c.param<T>("lam");
  op.readout.pull = c.param<T>("mu");
  op.score.eps = c.number("eps");
  const auto r = run_doors(op, c.problem<T>(), c.mask<T>(), c.rounded<T>("dout"));
  const auto compare = [&](const auto& got, const char* name) {
    const double d = deviation(got, c.tensor(name));
    INFO(c.name() << " " << name << " " << d);
    CHECK(d < (sizeof(T) == 8 ? 1e-12 : 2e-5));
  };
  compare(r.out, "out");
  compare(r.grad_query, "dq");
  compare(r.grad_key, "dk");
  compare(r.grad_value, "dv");
  compare(numbers(r.grad_op.score.W), "dW");
  compare(numbers(r.grad_op.score.strength), "dlam");
  compare(numbers(r.grad_op.readout.pull), "dmu");
  compare(r.saved.lse, "lse");
  CHECK(deviation(r.saved.diagnostic("winner"), c.tensor("query_winner")) == 0.0);
}

template <class T>
reference::Problem<T> one_row(std::vector<T> q, std::vector<T> k, std::vector<T> v) {
  const Index dim = Index(q.size()), keys = Index(k.size()) / dim;
  reference::Problem<T> p;
  p.geometry = {1, 1, 1, 1, 1, keys, dim, dim};
  p.query = std::move(q);
  p.key = std::move(k);
  p.value = std::move(v);
  return p;
}

}  // namespace

TEST_CASE("prototype attention reproduces the golden cases") {
  const auto files = golden_files(HEED_GOLDEN_DIR, "proto_");
  REQUIRE(files.size() == 10);
  for (const auto& file : files) {
    const GoldenCase c(file);
    compare_golden<double>(c);
    compare_golden<float>(c);
  }
}

// q = (3, 4), |q| = 5. Prototypes u = (1, 0) and (0, 1): cosines 0.6 and 0.8, so q is pulled
// towards W_1 = (0, 2). Keys (1, 0) and (0, 1) belong to categories 0 and 1; at scale 0 both logits
// are 0 and the scores are lambda 0.6 and lambda 0.8. At lambda = 5 ln 3 the weights are 1/4, 3/4.
// mixed = (8, 4)/4 + 3 (0, 4)/4 = (2, 4); out = mixed + 0.5 ((0, 2) - (3, 4)) = (0.5, 3).
TEST_CASE("a pull and a category term, by hand") {
  auto p = one_row<double>({3, 4}, {1, 0, 0, 1}, {8, 4, 0, 4});
  p.scale = 0.0;
  Prototype<double> op;
  op.score.eps = 1e-30;
  op.score.W = {{1, 2, 2}, {4, 0, 0, 2}};
  op.score.strength = 5 * std::log(3.0);
  op.readout.pull = 0.5;
  const auto r = run_doors(op, p, {}, {1.0, 0.0});
  CHECK(r.out[0] == Approx(0.5));
  CHECK(r.out[1] == Approx(3.0));
  // dmu = 1 (0 - 3). X = (8, 0), dscore = w (X - 2) = (1.5, -1.5), dlambda = 1.5 (0.6 - 0.8).
  CHECK(r.grad_op.readout.pull[0] == Approx(-3.0));
  CHECK(r.grad_op.score.strength[0] == Approx(-0.3));
  // du_0 = 1.5 lambda q/5, of which W_0 = (4, 0) keeps the part across, over |W_0|; u_1 likewise,
  // and W_1 is what q was pulled to: 0.5 dout.
  const double lambda = 5 * std::log(3.0);
  CHECK(r.grad_op.score.W[0] == Approx(0.0).margin(1e-12));
  CHECK(r.grad_op.score.W[1] == Approx(1.5 * lambda * 0.8 / 4));
  CHECK(r.grad_op.score.W[2] == Approx(-1.5 * lambda * 0.6 / 2 + 0.5));
  CHECK(r.grad_op.score.W[3] == Approx(0.0).margin(1e-12));
  // dq = 1.5 lambda d(cos_0 - cos_1)/dq - 0.5 dout; cos_0 = q_x/|q|: d = (1 - 0.36, -0.48)/5,
  // cos_1: d = (-0.48, 1 - 0.64)/5.
  CHECK(r.grad_query[0] == Approx(1.5 * lambda * (0.64 + 0.48) / 5 - 0.5));
  CHECK(r.grad_query[1] == Approx(1.5 * lambda * (-0.48 - 0.36) / 5));
  CHECK(r.grad_key == std::vector<double>(4, 0.0));
  CHECK(r.saved.diagnostic("winner")[0] == 1.0);
}

TEST_CASE("prototypes equal the slow twin, gradients included, across panels and tiles") {
  Options small;
  small.key_tile = 1;
  small.panel_vectors = 1;
  small.threads = 2;
  for (const Index len_q : {1, 7, 37})
    for (const Index len_kv : {1, 9, 40})
      for (const Index rows : {0, 1, 5, 23}) {
        const Geometry g{2, 4, 4, 2, len_q, len_kv, 6, 6};
        const auto mask = causal<double>() & key_lengths<double>({len_kv, len_kv / 2});
        const auto op = random_prototype<double>(g, rows, rows % 2 == 1);
        const auto problem = random_problem<double>(g, 0, 5);
        std::string where;
        const double whole = twin_deviation(op, problem, mask, where);
        const double tiled = twin_deviation(op, problem, mask, where, small);
        INFO(len_q << " " << len_kv << " " << rows << " " << where);
        CHECK(whole < 1e-12);
        CHECK(tiled < 1e-12);
      }
}

TEST_CASE("float prototypes stay within float rounding of the twin") {
  const Geometry g{1, 2, 2, 1, 41, 41, 24, 24};
  std::string where;
  const double d = twin_deviation(random_prototype<float>(g, 7, true),
                                  random_problem<float>(g, 0, 6), causal<float>(), where);
  INFO(where);
  CHECK(d < 2e-5);
}

TEST_CASE("score and readout alone keep prototypes of their own") {
  const Geometry g{1, 2, 2, 1, 9, 11, 5, 5};
  const auto problem = random_problem<double>(g, 0, 7);
  std::string where;
  ScoreOnly<double> score;
  score.score.W = random_rows<double>(2, 3, 5, 1);
  CHECK(twin_deviation(score, problem, {}, where) < 1e-12);
  DarPulled<double> dar;
  dar.readout.W = random_rows<double>(2, 4, 5, 2);
  dar.readout.pull = 0.4;
  CHECK(twin_deviation(dar, problem, {}, where) < 1e-12);
  CHECK(dar.readout.W.given());
}

TEST_CASE("prototype gradients agree with dual numbers") {
  const Geometry g{1, 2, 2, 1, 4, 5, 3, 3};
  const auto op = random_prototype<double>(g, 4, true);
  const auto problem = random_problem<double>(g, 0, 8);
  const auto r = run_doors(op, problem, {}, gradcheck_grad_out(g));
  const reference::Gradients<Prototype<double>> mine{r.grad_query, r.grad_key, r.grad_value,
                                                     {},           {},         r.grad_op};
  const auto report = check_op_gradient(op, problem, named_gradients(mine), Method::dual);
  INFO(report.text());
  CHECK(report.passed);
}

TEST_CASE("copies, casts and gradient objects of a prototype op have a W of their own") {
  const Geometry g{1, 1, 1, 1, 3, 3, 2, 2};
  auto original = std::make_unique<Prototype<double>>(random_prototype<double>(g, 2));
  Prototype<double> copy(*original), assigned;
  assigned = *original;
  const auto cast = cast_op<float>(*original);
  const auto zeros = zeros_like(*original);
  original->score.W.set_zero();
  original.reset();
  CHECK(copy.score.W[0] != 0.0);
  CHECK(assigned.score.W[0] == copy.score.W[0]);
  CHECK(cast.score.W[0] == float(copy.score.W[0]));
  // The readout of each pulls towards the W of its own score.
  const auto problem = random_problem<double>(g, 0, 3);
  const std::vector<double> grad_out(6, 1.0);
  Prototype<double> emptied = copy;
  emptied.score.W.set_zero();
  assigned.score.W.set_zero();
  const auto out = [&](const auto& op) { return run_doors(op, problem, {}, grad_out).out; };
  CHECK(out(assigned) == out(emptied));
  CHECK(out(copy) != out(emptied));
  CHECK(zeros.score.W[0] == 0.0);
  int seen = 0;
  copy.visit([&](const char* name, auto&) { seen += std::string(name) == "W"; });
  CHECK(seen == 1);
}

TEST_CASE("without prototypes score is the logit and out the mixed row") {
  const Geometry g{1, 2, 2, 1, 9, 7, 3, 4};  // dim_v need not be dim_qk then
  const auto problem = random_problem<double>(g, 0, 9);
  const std::vector<double> grad_out(72, 0.5);
  const auto plain = run_doors(ScoreOnly<double>{}, problem, {}, grad_out);
  Prototype<double> op;
  op.score.strength = 3.0;
  op.readout.pull = 2.0;
  const auto r = run_doors(op, problem, {}, grad_out);
  using Plain = Attention<double, DotScore<double>, Softmax<double>, Identity<double>>;
  const auto baseline = run_doors(Plain{}, problem, {}, grad_out);
  CHECK(r.out == baseline.out);
  CHECK(plain.out == baseline.out);
  CHECK(deviation(r.grad_query, baseline.grad_query) < 1e-14);
  CHECK(deviation(r.grad_key, baseline.grad_key) < 1e-14);
  CHECK(r.grad_op.score.strength[0] == 0.0);
  CHECK(r.grad_op.readout.pull[0] == 0.0);
  CHECK(r.saved.diagnostic("winner")[0] == -1.0);
}

TEST_CASE("lambda of 0 leaves the scores alone and still has a gradient") {
  const Geometry g{1, 2, 2, 2, 6, 6, 4, 4};
  const auto problem = random_problem<double>(g, 0, 10);
  const std::vector<double> grad_out(48, 0.5);
  auto op = random_prototype<double>(g, 3);
  op.score.strength = 0.0;
  op.readout.pull = 0.0;
  const auto r = run_doors(op, problem, {}, grad_out);
  CHECK(r.out == run_doors(Prototype<double>{}, problem, {}, grad_out).out);
  CHECK(r.grad_op.score.strength[0] != 0.0);
  CHECK(r.grad_op.readout.pull[0] != 0.0);
}

TEST_CASE("a row that sees no key is pulled all the same") {
  const Geometry g{1, 1, 1, 1, 3, 4, 2, 2};
  const auto problem = random_problem<double>(g, 0, 11);
  const auto op = random_prototype<double>(g, 3);
  const auto r = run_doors(op, problem, key_lengths<double>({0}), std::vector<double>(6, 1.0));
  for (Index i = 0; i < 3; ++i) {
    const auto w = Index(r.saved.diagnostic("winner")[std::size_t(i)]);
    for (Index c = 0; c < 2; ++c) {
      const auto at = std::size_t(2 * i + c);
      CHECK(r.out[at] == Approx(-0.6 * (op.score.prototype(0, w)[c] - problem.query[at])));
      CHECK(r.grad_query[at] == 0.6);
    }
  }
  CHECK(r.grad_op.score.strength[0] == 0.0);
  CHECK(r.grad_op.readout.pull[0] != 0.0);
  CHECK(r.grad_key == std::vector<double>(8, 0.0));
  CHECK(r.grad_value == std::vector<double>(8, 0.0));
}

TEST_CASE("heads with fewer prototypes never match the padding of W") {
  const Geometry g{1, 2, 2, 1, 13, 17, 4, 4};
  const auto problem = random_problem<double>(g, 0, 12);
  const std::vector<double> grad_out(104, 0.25);
  auto full = random_prototype<double>(g, 5);
  auto op = full;
  op.score.counts = {2, 0};
  // Numbers in the padding make no difference; the padding would win if it could.
  auto other = op;
  for (Index m = 2; m < 5; ++m)
    for (Index c = 0; c < 4; ++c) {
      other.score.prototype(0, m)[c] = 100 * problem.query[std::size_t(c)];
      other.score.prototype(1, m)[c] = 100 * problem.query[std::size_t(c)];
    }
  const auto a = run_doors(op, problem, {}, grad_out), b = run_doors(other, problem, {}, grad_out);
  CHECK(a.out == b.out);
  CHECK(numbers(a.grad_op.score.W) == numbers(b.grad_op.score.W));
  CHECK(a.out != run_doors(full, problem, {}, grad_out).out);
  for (Index i = 2 * 4; i < a.grad_op.score.W.size(); ++i) CHECK(a.grad_op.score.W[i] == 0.0);
  CHECK(a.grad_op.score.W[0] != 0.0);
  for (std::size_t i = 0; i < 26; ++i)
    CHECK((i < 13 ? a.saved.diagnostic("winner")[i] >= 0 && a.saved.diagnostic("winner")[i] < 2
                  : a.saved.diagnostic("winner")[i] == -1.0));
  std::string where;
  CHECK(twin_deviation(op, problem, {}, where) < 1e-12);
  // Head 0 alone with two rows, head 1 without any: the same.
  auto narrow = op;
  narrow.score.W = Param<double>(std::vector<Index>{2, 2, 4});
  std::copy_n(op.score.prototype(0, 0), 8, narrow.score.W.data());
  CHECK(run_doors(narrow, problem, {}, grad_out).out == a.out);
}

TEST_CASE("ties and zero rows go to the lowest prototype") {
  auto p = one_row<double>({0, 0}, {0, 0, 1, 1}, {1, 2, 3, 4});
  Prototype<double> op;
  op.score.W = {{1, 3, 2}, {0, 1, 1, 1, 1, 1}};  // 1 and 2 are equal
  op.readout.pull = 1.0;
  const auto zero = run_doors(op, p, {}, {1.0, 1.0});
  CHECK(zero.saved.diagnostic("winner")[0] == 0.0);
  CHECK(zero.out[1] == Approx(3.0 + 1.0));
  p.query = {2, 2};
  const auto r = run_doors(op, p, {}, {1.0, 1.0});
  CHECK(r.saved.diagnostic("winner")[0] == 1.0);
  for (Index c = 4; c < 6; ++c) CHECK(r.grad_op.score.W[c] == 0.0);
  // A zero query has a finite, large gradient: u is x / eps there.
  for (const double x : zero.grad_query) CHECK(std::isfinite(x));
}

TEST_CASE("rows and prototypes of any size find their category") {
  for (const double size : {1e-15, 1e-3, 1.0, 1e15}) {
    auto p = one_row<float>({float(3 * size), float(4 * size)}, {1, 0, 0, 1}, {8, 4, 0, 4});
    Prototype<float> op;
    op.score.eps = 1e-30;
    op.score.W = {{1, 2, 2}, {float(4 * size), 0, 0, float(size)}};
    op.score.strength = float(5 * std::log(3.0));
    op.readout.pull = 0.0F;
    p.scale = 0.0;
    const auto r = run_doors(op, p, {}, {1.0F, 0.0F});
    CHECK(r.out[0] == Approx(2.0).epsilon(1e-5));
    CHECK(r.saved.diagnostic("winner")[0] == 1.0F);
    for (const float x : numbers(r.grad_op.score.W)) CHECK(std::isfinite(x));
  }
}

TEST_CASE("padding lanes leave no trace in the pull's results") {
  const Geometry g{1, 2, 2, 1, 4, 4, 5, 5};
  PrototypeReadout<double> readout;
  readout.W = random_rows<double>(2, 3, 5, 2);
  const auto run = [&](double padding) {
    return run_hooks<PrototypeReadout<double>, double>(readout, g, 0, kLanes<double> + 1, padding);
  };
  CHECK(run(0.0) == run(1e6));
}

TEST_CASE("a strong pull does not blur the gradient of the mix") {
  const Geometry g{1, 1, 1, 1, 5, 6, 4, 4};
  const auto problem = random_problem<double>(g, 0, 13);
  auto op = random_prototype<double>(g, 3);
  op.readout.pull = 0.0;
  const std::vector<double> grad_out(20, 0.5);
  const auto weak = run_doors(op, problem, {}, grad_out);
  op.readout.pull = 1e12;
  const auto strong = run_doors(op, problem, {}, grad_out);
  CHECK(deviation(strong.grad_key, weak.grad_key) < 1e-13);
}

TEST_CASE("W is taken from memories of different sizes, and given back") {
  const auto memory = [](Index count, double first) {
    ArtMemory<double> m({.capacity = 4, .dim = 2, .vigilance = 0.9, .learning_rate = 0.5});
    std::vector<double> rows;
    for (Index i = 0; i < 2 * count; ++i) rows.push_back(first + double(i));
    m.set_prototypes(rows, count);
    return m;
  };
  std::vector<ArtMemory<double>> memories{memory(1, 1), memory(3, 10), memory(0, 0)};
  Prototype<double> op;
  op.score.take(memories);
  CHECK(op.score.W.shape() == std::vector<Index>{3, 3, 2});
  CHECK(op.score.counts == std::vector<Index>{1, 3, 0});
  CHECK(numbers(op.score.W) ==
        std::vector<double>{1, 2, 0, 0, 0, 0, 10, 11, 12, 13, 14, 15, 0, 0, 0, 0, 0, 0});
  op.score.W[0] = 7;
  op.score.give(memories);
  CHECK(memories[0].count() == 1);
  CHECK(memories[0].prototypes()[0] == 7.0);
  CHECK(memories[1].prototypes()[5] == 15.0);
  CHECK(memories[2].count() == 0);

  const Geometry g{1, 3, 3, 1, 5, 6, 2, 2};
  std::string where;
  CHECK(twin_deviation(op, random_problem<double>(g, 0, 14), {}, where) < 1e-12);

  op.score.take({memory(0, 0), memory(0, 0)});
  CHECK_FALSE(op.score.W.given());
  validate(op.score, {1, 2, 2, 1, 5, 6, 2, 2}, "test");
}

TEST_CASE("memories learn the keys of a call afterwards, in batch and token order") {
  const ArtOptions<double> options{
      .capacity = 3, .dim = 2, .vigilance = 0.99, .learning_rate = 1.0};
  // Two batches, one key head, two tokens: directions x, y, x + y, -x.
  const std::vector<double> keys{1, 0, 0, 1, 1, 1, -1, 0};
  const TensorView<const double> view(keys.data(), {2, 1, 2, 2});
  std::vector<ArtMemory<double>> memories(2, ArtMemory<double>(options));
  const auto tallies = learn_after_forward(memories, view);
  REQUIRE(tallies.size() == 2);
  for (const auto& tally : tallies) CHECK(tally == ArtTally{0, 3, 1});
  for (const auto& m : memories)
    CHECK(std::vector<double>(m.prototypes().begin(), m.prototypes().end()) ==
          std::vector<double>{1, 0, 0, 1, 1, 1});

  // Two key heads: each memory has its own.
  std::vector<ArtMemory<double>> apart(2, ArtMemory<double>(options));
  CHECK(learn_after_forward(apart, TensorView<const double>(keys.data(), {1, 2, 2, 2})) ==
        std::vector<ArtTally>{{0, 2, 0}, {0, 2, 0}});
  CHECK(apart[0].prototypes()[0] == 1.0);
  CHECK(apart[1].prototypes()[2] == -1.0);

  // Four query heads on two key heads: neighbours learn the same keys.
  std::vector<ArtMemory<double>> grouped(4, ArtMemory<double>(options));
  learn_after_forward(grouped, TensorView<const double>(keys.data(), {1, 2, 2, 2}));
  for (std::size_t h = 0; h < 4; ++h)
    CHECK(grouped[h].prototypes()[2] == apart[h / 2].prototypes()[2]);
  CHECK(grouped[1].prototypes()[2] != grouped[2].prototypes()[2]);
}

TEST_CASE("a refused lesson leaves every memory as it was") {
  std::vector<ArtMemory<double>> memories(
      2, ArtMemory<double>({.capacity = 3, .dim = 2, .vigilance = 0.9, .learning_rate = 1.0}));
  const std::vector<double> keys{1, 0, double(NAN), 1};
  CHECK_THROWS_AS(
      learn_after_forward(memories, TensorView<const double>(keys.data(), {1, 2, 1, 2})),
      std::invalid_argument);
  CHECK(memories[0].count() == 0);
  CHECK_THROWS_AS(
      learn_after_forward(memories, TensorView<const double>(keys.data(), {1, 4, 1, 1})),
      std::invalid_argument);
}

TEST_CASE("prototype attention refuses what does not fit in one sentence") {
  const Geometry g{1, 2, 2, 1, 4, 4, 3, 3};
  const auto refused = [&](const auto& op, const std::string& text, Geometry at) {
    try {
      op.validate(at, "heed::forward");
      FAIL("was accepted: " << text);
    } catch (const std::invalid_argument& error) {
      INFO(error.what());
      CHECK(std::string(error.what()).find(text) != std::string::npos);
    }
  };
  const auto with = [&](auto&& change) {
    auto op = random_prototype<double>(g, 2);
    change(op);
    return op;
  };
  using Op = Prototype<double>;
  with([](Op&) {}).validate(g, "heed::forward");
  refused(with([](Op& op) { op.score.eps = 0; }), "eps is 0", g);
  refused(with([](Op& op) { op.score.eps = NAN; }), "eps is nan", g);
  refused(with([](Op& op) {
            op.score.W = {{2, 3}, {1, 2, 3, 4, 5, 6}};
          }),
          "W has shape (2,3), it must be (2,any,3)", g);
  refused(with([](Op& op) { op.score.W[3] = NAN; }), "W[0,1,0] is nan, it must be finite", g);
  refused(with([](Op& op) { op.score.counts = {1}; }), "counts has 1 values", g);
  refused(with([](Op& op) { op.score.counts = {1, 3}; }), "counts holds 3", g);
  refused(with([](Op& op) { op.score.counts = {1, -1}; }), "counts holds -1", g);
  refused(with([](Op& op) { op.score.strength = {1.0, 2.0, 3.0}; }), "strength has 3 values", g);
  refused(with([](Op& op) { op.score.strength = {1.0, NAN}; }), "strength is nan", g);
  refused(with([](Op& op) { op.readout.pull = Param<double>(); }), "pull has 0 values", g);
  refused(with([](Op& op) { op.readout.pull = double(INFINITY); }), "pull is inf", g);
  Geometry other = g;
  other.heads = other.query_heads = 1;
  refused(with([](Op&) {}), "it must be (1,any,3)", other);
  other = g;
  other.dim_v = 4;
  refused(with([](Op&) {}), "dim_v 4", other);
  // The compiler refuses a score without prototypes.
  static_assert(!std::is_convertible_v<const DotScore<double>&, const PrototypeMemory<double>&>);
}
