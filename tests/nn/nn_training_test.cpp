// SPDX-License-Identifier: Apache-2.0

// Embeddings, cross entropy, dropout, AdamW, schedules and clipping.

#include "catch.hpp"
#include "message_of.hpp"

#include <heed/check/gradcheck.hpp>
#include <heed/compiled.hpp>
#include <heed/nn/adamw.hpp>
#include <heed/nn/cross_entropy.hpp>
#include <heed/nn/dropout.hpp>
#include <heed/nn/embedding.hpp>
#include <heed/nn/linear.hpp>
#include <heed/nn/schedule.hpp>

#include <cmath>
#include <cstring>
#include <limits>
#include <string>
#include <vector>

namespace {

using namespace heed;
using heed_test::message_of;
using namespace heed::nn;

constexpr double kNan = std::numeric_limits<double>::quiet_NaN();
template <class T>
constexpr double kEps = double(std::numeric_limits<T>::epsilon());

// Normal numbers; the same ones for float and double up to rounding.
template <class T>
std::vector<T> normals(Index count, std::uint64_t stream, double deviation = 1.0) {
  const CounterRandom random(2024, stream);
  std::vector<T> values;
  for (Index i = 0; i < count; ++i)
    values.push_back(T(deviation * random.normal(std::uint64_t(i))));
  return values;
}
std::vector<Index> random_ids(Index tokens, Index count, std::uint64_t stream) {
  const CounterRandom random(7, stream);
  std::vector<Index> ids;
  for (Index t = 0; t < tokens; ++t)
    ids.push_back(Index(random.bits(std::uint64_t(t)) % std::uint64_t(count)));
  return ids;
}

// A matrix over the numbers of a vector.
template <class T>
MatrixView<T> matrix(std::vector<T>& values, Index rows, Index columns) {
  return {values.data(), rows, columns};
}
template <class T>
MatrixView<const T> matrix(const std::vector<T>& values, Index rows, Index columns) {
  return {values.data(), rows, columns};
}

template <class T>
bool same_bits(const std::vector<T>& a, const std::vector<T>& b) {
  return a.size() == b.size() && std::memcmp(a.data(), b.data(), a.size() * sizeof(T)) == 0;
}
template <class T, class U>
double largest_difference(const std::vector<T>& a, const std::vector<U>& b) {
  REQUIRE(a.size() == b.size());
  double largest = 0;
  for (std::size_t i = 0; i < a.size(); ++i)
    largest = std::max(largest, std::abs(double(a[i]) - double(b[i])));
  return largest;
}
template <class T>
std::vector<T> values_of(const Param<T>& p) {
  return {p.data(), p.data() + p.size()};
}
template <class T>
void assign(Param<T>& p, const std::vector<T>& values) {
  REQUIRE(p.size() == Index(values.size()));
  std::copy(values.begin(), values.end(), p.data());
}

template <class T>
Context<T> context(int threads, bool training = true) {
  Context<T> c;
  c.threads = threads;
  c.training = training;
  return c;
}

// Named weights of any shapes.
template <class T>
struct Weights {
  std::vector<std::pair<std::string, Weight<T>>> list;

  void add(const std::string& name, const std::vector<Index>& shape, std::uint64_t stream) {
    Weight<T> weight(shape);
    assign(weight.value, normals<T>(weight.value.size(), 2 * stream));
    assign(weight.grad, normals<T>(weight.grad.size(), 2 * stream + 1));
    list.emplace_back(name, std::move(weight));
  }
  Weight<T>& operator[](std::size_t i) { return list[i].second; }
  void visit(const Visitor<T>& f) {
    for (auto& [name, weight] : list) f(name, weight.value, weight.grad);
  }
};

TEMPLATE_TEST_CASE("An embedding copies, adds and collects the rows of its ids", "[nn]", float,
                   double) {
  using T = TestType;
  Embedding<T> layer(3, 2);
  assign(layer.weight.value, {1, 2, 3, 4, 5, 6});
  assign(layer.weight.grad, {100, 0, 0, 0, 0, 0});
  auto c = context<T>(1);
  const std::vector<Index> ids = {2, 0, 2, 1};
  std::vector<T> y(8, T(9));
  layer.forward(c, ids, matrix(y, 4, 2));
  CHECK(y == std::vector<T>{5, 6, 1, 2, 5, 6, 3, 4});
  layer.forward(c, ids, matrix(y, 4, 2), Into::add);
  CHECK(y == std::vector<T>{10, 12, 2, 4, 10, 12, 6, 8});
  const std::vector<T> dy = {1, 2, 3, 4, 5, 6, 7, 8};
  layer.backward(c, ids, matrix(dy, 4, 2));
  CHECK(values_of(layer.weight.grad) == std::vector<T>{103, 4, 7, 8, 6, 8});
}

TEST_CASE("The gradient of an embedding is that of its loss", "[nn]") {
  const Index count = 5, width = 7, tokens = 9;
  const auto ids = random_ids(tokens, count, 1);
  const auto g = normals<double>(tokens * width, 2);
  auto c = context<double>(1);
  Embedding<double> layer(count, width);
  const auto loss = [&](const std::vector<std::vector<double>>& at) {
    assign(layer.weight.value, at[0]);
    std::vector<double> y(g.size());
    layer.forward(c, ids, matrix(y, tokens, width));
    double sum = 0;
    for (std::size_t i = 0; i < g.size(); ++i) sum += g[i] * y[i];
    return sum;
  };
  layer.backward(c, ids, matrix(g, tokens, width));
  const std::vector<NamedTensor> at = {{"weight", normals<double>(count * width, 3)}};
  const std::vector<NamedTensor> analytic = {{"weight", values_of(layer.weight.grad)}};
  const auto report = check_gradient_on<double>(loss, at, analytic);
  INFO(report.text());
  CHECK(report.passed);
}

TEMPLATE_TEST_CASE("An embedding agrees with plain loops for any number of threads", "[nn]", float,
                   double) {
  using T = TestType;
  const Index count = 11, width = 333, tokens = 700, stride = width + 3;
  const auto ids = random_ids(tokens, count, 4);
  const auto dy = normals<T>(tokens * stride, 5);
  const auto weight = normals<T>(count * width, 6);
  // Other numbers lie behind the columns of a row of y, and must not change.
  std::vector<T> plain_y(dy.size(), T(4)), plain_grad(weight.size());
  for (Index t = 0; t < tokens; ++t)
    for (Index j = 0; j < width; ++j) {
      const auto at = std::size_t(ids[std::size_t(t)] * width + j);
      plain_y[std::size_t(t * stride + j)] = 2 * weight[at];
      plain_grad[at] += dy[std::size_t(t * stride + j)];
    }
  for (const int threads : {1, 3}) {
    auto c = context<T>(threads);
    Embedding<T> layer(count, width);
    assign(layer.weight.value, weight);
    std::vector<T> y(dy.size(), T(4));
    const MatrixView<T> out(y.data(), tokens, width, stride);
    layer.forward(c, ids, out);
    layer.forward(c, ids, out, Into::add);
    layer.backward(c, ids, {dy.data(), tokens, width, stride});
    CHECK(same_bits(y, plain_y));
    CHECK(same_bits(values_of(layer.weight.grad), plain_grad));
  }
}

TEST_CASE("An embedding names an id outside of its rows before it writes", "[nn]") {
  Embedding<float> layer(3, 2);
  auto c = context<float>(1);
  std::vector<float> y(4, 9.0F);
  const std::vector<Index> above = {1, 3}, below = {-1, 1};
  CHECK(message_of([&] { layer.forward(c, above, matrix(y, 2, 2)); }) ==
        "Embedding::forward: id 3 at position 1 is outside of the 3 rows of the weight");
  CHECK(message_of([&] { layer.backward(c, below, matrix(y, 2, 2)); }) ==
        "Embedding::backward: id -1 at position 0 is outside of the 3 rows of the weight");
  CHECK(message_of([&] { layer.forward(c, above, matrix(y, 1, 4)); }) ==
        "Embedding::forward: y is 1 x 4, it must be 2 x 2");
  CHECK(y == std::vector<float>(4, 9.0F));
  CHECK(values_of(layer.weight.grad) == std::vector<float>(6, 0.0F));
}

TEMPLATE_TEST_CASE("Cross entropy of two tokens, by hand", "[nn]", float, double) {
  using T = TestType;
  auto c = context<T>(1);
  // Probabilities 1/2, 1/4, 1/4 and 1/5, 4/5, and one that is not counted.
  const T l2 = T(std::log(2.0)), l4 = T(std::log(4.0)), hidden = -kInfinity<T>;
  const std::vector<T> logits = {l2, 0, 0, 0, l4, hidden, T(kNan), 1, 2};
  const std::vector<Index> targets = {1, 0, kIgnoreIndex};
  std::vector<T> gradient(9, T(9)), losses(3, T(9));
  const auto result =
      cross_entropy(c, matrix(logits, 3, 3), targets, matrix(gradient, 3, 3), losses);
  CHECK(result.counted == 2);
  const double margin = 4 * kEps<T>;
  CHECK(result.loss == Approx((std::log(4.0) + std::log(5.0)) / 2).margin(margin).epsilon(0));
  const std::vector<double> by_hand = {std::log(4.0), std::log(5.0), 0};
  CHECK(largest_difference(losses, by_hand) < margin);
  const std::vector<double> expected = {.25, -.375, .125, -.4, .4, 0, 0, 0, 0};
  CHECK(largest_difference(gradient, expected) < margin);
  CHECK(cross_entropy(c, matrix(logits, 3, 3), targets).loss == result.loss);
}

TEST_CASE("The gradient of cross entropy is that of its mean", "[nn]") {
  const Index rows = 6;
  for (const Index classes : {1, 5, 8, 19}) {
    auto targets = random_ids(rows, classes, 11);
    targets[2] = kIgnoreIndex;
    auto c = context<double>(1);
    const std::vector<NamedTensor> at = {{"logits", normals<double>(rows * classes, 12, 2.0)}};
    std::vector<double> gradient(at[0].values.size());
    const auto result = cross_entropy(c, matrix(at[0].values, rows, classes), targets,
                                      matrix(gradient, rows, classes));
    CHECK(result.counted == rows - 1);
    const auto loss = [&](const std::vector<std::vector<double>>& x) {
      return cross_entropy(c, matrix(x[0], rows, classes), targets).loss;
    };
    const auto report = check_gradient_on<double>(loss, at, {{"logits", gradient}});
    INFO(report.text());
    CHECK(report.passed);
  }
}

// The same by plain loops, in long double.
struct PlainCrossEntropy {
  long double loss = 0;
  std::vector<double> gradient;
};
template <class T>
PlainCrossEntropy plain_cross_entropy(const std::vector<T>& logits,
                                      const std::vector<Index>& targets, Index classes) {
  PlainCrossEntropy plain;
  Index counted = 0;
  for (const Index target : targets) counted += target != kIgnoreIndex;
  for (std::size_t t = 0; t < targets.size(); ++t) {
    const T* row = logits.data() + Index(t) * classes;
    long double sum = 0;
    for (Index j = 0; j < classes; ++j) sum += std::exp(static_cast<long double>(row[j]));
    const bool counts = targets[t] != kIgnoreIndex;
    for (Index j = 0; j < classes; ++j) {
      const long double p = std::exp(static_cast<long double>(row[j])) / sum;
      plain.gradient.push_back(counts ? double((p - (j == targets[t])) / counted) : 0.0);
    }
    if (counts) plain.loss += (std::log(sum) - row[targets[t]]) / counted;
  }
  return plain;
}

TEMPLATE_TEST_CASE("Cross entropy agrees with plain loops for any number of threads", "[nn]", float,
                   double) {
  using T = TestType;
  const Index rows = 260, classes = 1003;
  const auto logits = normals<T>(rows * classes, 13, 3.0);
  auto targets = random_ids(rows, classes, 14);
  for (std::size_t t = 0; t < targets.size(); t += 7) targets[t] = kIgnoreIndex;
  const PlainCrossEntropy plain = plain_cross_entropy(logits, targets, classes);
  std::vector<T> gradients[2], losses[2];
  CrossEntropy results[2];
  for (const std::size_t k : {std::size_t(0), std::size_t(1)}) {
    auto c = context<T>(k == 0 ? 1 : 3);
    gradients[k].resize(logits.size());
    losses[k].resize(targets.size());
    results[k] = cross_entropy(c, matrix(logits, rows, classes), targets,
                               matrix(gradients[k], rows, classes), losses[k]);
  }
  CHECK(results[0].loss == results[1].loss);
  CHECK(same_bits(gradients[0], gradients[1]));
  CHECK(same_bits(losses[0], losses[1]));
  CHECK(results[0].loss == Approx(double(plain.loss)).epsilon(16 * kEps<T>));
  // Gradients are at most 1 / counted.
  CHECK(largest_difference(gradients[0], plain.gradient) * double(results[0].counted) <
        32 * kEps<T>);
  auto c = context<T>(3);
  auto in_place = logits;
  const auto view = matrix(in_place, rows, classes);
  CHECK(cross_entropy(c, view, targets, view).loss == results[0].loss);
  CHECK(same_bits(in_place, gradients[0]));
}

TEMPLATE_TEST_CASE("Cross entropy keeps to its rows and takes logits of any size", "[nn]", float,
                   double) {
  using T = TestType;
  auto c = context<T>(1);
  const T huge = std::numeric_limits<T>::max() / 4;
  std::vector<T> logits = {huge, -huge, 0, 7, -huge, -huge, -huge, 7};
  const std::vector<Index> targets = {0, 1};
  const MatrixView<T> view(logits.data(), 2, 3, 4);
  CHECK(cross_entropy(c, view, targets, view).loss ==
        Approx(std::log(3.0) / 2).epsilon(4 * kEps<T>));
  const std::vector<double> expected = {0, 0, 0, 7, 1. / 6, -1. / 3, 1. / 6, 7};
  CHECK(largest_difference(logits, expected) < 4 * kEps<T>);
}

TEST_CASE("Cross entropy without a counted target is 0", "[nn]") {
  auto c = context<float>(1);
  std::vector<float> gradient(6, 9.0F);
  const std::vector<float> logits(6, float(kNan));
  const std::vector<Index> targets(2, kIgnoreIndex);
  const auto result = cross_entropy(c, matrix(logits, 2, 3), targets, matrix(gradient, 2, 3));
  CHECK(result.loss == 0);
  CHECK(result.counted == 0);
  CHECK(gradient == std::vector<float>(6, 0.0F));
  CHECK(cross_entropy(c, MatrixView<const float>(logits.data(), 0, 3), {}).counted == 0);
}

TEST_CASE("Cross entropy names what does not fit before it writes", "[nn]") {
  auto c = context<float>(1);
  std::vector<float> logits(6, 1.0F), losses(1);
  const auto view = matrix(logits, 2, 3);
  const std::vector<Index> one = {0}, two = {0, 1}, above = {0, 3}, below = {-1, 0};
  CHECK(message_of([&] { (void)cross_entropy(c, view, one, view); }) ==
        "cross_entropy: targets has 1 entries, logits has 2 rows");
  CHECK(message_of([&] { (void)cross_entropy(c, view, two, view, losses); }) ==
        "cross_entropy: row_losses has 1 entries, logits has 2 rows");
  CHECK(message_of([&] { (void)cross_entropy(c, view, two, matrix(logits, 3, 2)); }) ==
        "cross_entropy: dlogits is 3 x 2, it must be 2 x 3");
  CHECK(message_of([&] { (void)cross_entropy(c, view, above, view); }) ==
        "cross_entropy: target 3 at position 1 is neither one of the 3 classes nor kIgnoreIndex "
        "(-100)");
  CHECK(message_of([&] { (void)cross_entropy(c, view, below, view); }) ==
        "cross_entropy: target -1 at position 0 is neither one of the 3 classes nor kIgnoreIndex "
        "(-100)");
  CHECK(logits == std::vector<float>(6, 1.0F));
}

// 1 where dropout keeps, 0 where it drops.
template <class T>
std::vector<double> kept_places(Context<T>& c, double rate, std::uint64_t stream, Index rows,
                                Index columns) {
  std::vector<T> ones(std::size_t(rows * columns), T(1));
  apply_dropout(c, rate, stream, matrix(ones, rows, columns), matrix(ones, rows, columns));
  std::vector<double> kept;
  bool right = true;
  for (const T y : ones) {
    right &= y == 0 || y == T(1 / (1 - rate));
    kept.push_back(y != 0);
  }
  REQUIRE(right);
  return kept;
}
// The agreement of two patterns beyond chance, in standard deviations.
double correlation(const std::vector<double>& a, const std::vector<double>& b, std::size_t lag,
                   double rate) {
  double sum = 0;
  const std::size_t count = a.size() - lag;
  for (std::size_t i = 0; i < count; ++i) sum += (a[i] - (1 - rate)) * (b[i + lag] - (1 - rate));
  return sum / (rate * (1 - rate) * std::sqrt(double(count)));
}

TEST_CASE("Dropout keeps the wanted share and the mean", "[nn]") {
  const Index rows = 400, columns = 501;
  const double count = double(rows * columns);
  for (const double rate : {0.1, 0.5, 0.9}) {
    auto c = context<float>(1);
    double kept = 0;
    for (const double one : kept_places(c, rate, 3, rows, columns)) kept += one;
    // Four standard deviations of a sum of independent places. As every place kept holds
    // 1 / (1 - rate), the mean of y is as close to 1.
    CHECK(std::abs(kept - count * (1 - rate)) < 4 * std::sqrt(count * rate * (1 - rate)));
  }
}

TEST_CASE("Dropout treats neighbours, rows, steps, streams and seeds independently", "[nn]") {
  const Index rows = 256, columns = 512;
  const double rate = 0.3;
  auto c = context<float>(1);
  c.seed = 5;
  c.step = 9;
  const auto kept = kept_places(c, rate, 2, rows, columns);
  for (const Index lag : {1, 2, 3, 4, 7, 8, 9, 16, 32, 64, 128, 511, 512, 513, 1024, 4096}) {
    INFO("lag " << lag);
    CHECK(std::abs(correlation(kept, kept, std::size_t(lag), rate)) < 4);
  }
  const auto independent = [&](const std::vector<double>& other) {
    return std::abs(correlation(kept, other, 0, rate)) < 4;
  };
  CHECK_FALSE(independent(kept_places(c, rate, 2, rows, columns)));
  CHECK(independent(kept_places(c, rate, 3, rows, columns)));
  c.step = 10;
  CHECK(independent(kept_places(c, rate, 2, rows, columns)));
  c.step = 9;
  c.seed = 6;
  CHECK(independent(kept_places(c, rate, 2, rows, columns)));
}

TEST_CASE("Dropout keeps runs of places as often as chance does", "[nn]") {
  // Eight places side by side: 256 patterns, whose chi-square has mean 255 and deviation 22.6.
  const Index rows = 512, columns = 512;
  auto c = context<float>(1);
  const auto kept = kept_places(c, 0.5, 1, rows, columns);
  std::vector<double> seen(256, 0.0);
  for (std::size_t i = 0; i < kept.size(); i += 8) {
    std::size_t pattern = 0;
    for (std::size_t k = 0; k < 8; ++k) pattern = 2 * pattern + std::size_t(kept[i + k]);
    ++seen[pattern];
  }
  const double expected = double(kept.size()) / 8 / 256;
  double chi_square = 0;
  for (const double n : seen) chi_square += (n - expected) * (n - expected) / expected;
  CHECK(chi_square < 255 + 4 * 22.6);
  CHECK(chi_square > 255 - 4 * 22.6);
}

TEST_CASE("Dropout of the first places is fixed", "[nn]") {
  // Place by place, by the formula at the head of the file.
  const std::uint64_t seed = 11, step = 12, stream = 13, row = 1;
  const CounterRandom of_step(seed, stream);
  const std::uint64_t key = CounterRandom(of_step.bits(step)).bits(row);
  auto c = context<double>(1);
  c.seed = seed;
  c.step = step;
  const Index columns = 37;
  const auto kept = kept_places(c, 0.25, stream, 2, columns);
  for (Index j = 0; j < columns; ++j) {
    auto h = std::uint32_t(key) + std::uint32_t(j) * 0x9E3779B9U;
    h = ((h ^ (h >> 16)) * 0x85EBCA6BU) ^ std::uint32_t(key >> 32);
    h = (h ^ (h >> 13)) * 0xC2B2AE35U;
    CHECK((kept[std::size_t(columns + j)] == 1) == (double(h) < 0.75 * 0x1.0p32));
  }
}

TEST_CASE("Dropout draws the same for float and double, for its gradient and any threads", "[nn]") {
  const Index rows = 300, columns = 701;
  const double rate = 0.2;
  auto one = context<float>(1), three = context<float>(3);
  auto wide = context<double>(3);
  const auto kept = kept_places(one, rate, 4, rows, columns);
  CHECK(kept == kept_places(three, rate, 4, rows, columns));
  CHECK(kept == kept_places(wide, rate, 4, rows, columns));
  // dy of the same call meets the same places; the key of a row depends on its number, not on memory.
  const Index stride = columns + 5;
  const auto dy = normals<float>(rows * stride, 21);
  std::vector<float> dx(dy.size(), 7.0F);
  apply_dropout(three, rate, 4, {dy.data(), rows, columns, stride},
                {dx.data(), rows, columns, stride});
  bool right = true;
  for (Index r = 0; r < rows; ++r) {
    const float* from = dy.data() + r * stride;
    const float* to = dx.data() + r * stride;
    for (Index j = 0; j < columns; ++j)
      right &= to[j] == (kept[std::size_t(r * columns + j)] == 1 ? from[j] * 1.25F : 0.0F);
    right &= to[columns] == 7.0F;
  }
  CHECK(right);
}

TEST_CASE("The gradient of dropout is that of its loss", "[nn]") {
  const Index rows = 4, columns = 11;
  auto c = context<double>(1);
  const auto g = normals<double>(rows * columns, 22);
  const auto loss = [&](const std::vector<std::vector<double>>& x) {
    std::vector<double> y(g.size());
    apply_dropout(c, 0.4, 8, matrix(x[0], rows, columns), matrix(y, rows, columns));
    double sum = 0;
    for (std::size_t i = 0; i < g.size(); ++i) sum += g[i] * y[i];
    return sum;
  };
  auto dx = g;
  apply_dropout(c, 0.4, 8, matrix(dx, rows, columns), matrix(dx, rows, columns));
  const std::vector<NamedTensor> at = {{"x", normals<double>(rows * columns, 23)}};
  const auto report = check_gradient_on<double>(loss, at, {{"x", dx}});
  INFO(report.text());
  CHECK(report.passed);
}

TEMPLATE_TEST_CASE("Dropout is a copy outside of training and at rate 0", "[nn]", float, double) {
  using T = TestType;
  const auto x = normals<T>(35, 24);
  for (const bool training : {false, true}) {
    auto c = context<T>(1, training);
    std::vector<T> y(35), same = x;
    apply_dropout(c, training ? 0.0 : 0.5, 1, matrix(x, 5, 7), matrix(y, 5, 7));
    apply_dropout(c, training ? 0.0 : 0.5, 1, matrix(same, 5, 7), matrix(same, 5, 7));
    CHECK(same_bits(x, y));
    CHECK(same_bits(x, same));
  }
}

TEST_CASE("Dropout hides a NaN where it drops, and takes rates at either end", "[nn]") {
  auto c = context<float>(1);
  std::vector<float> x(64 * 64, float(kNan));
  apply_dropout(c, 0.5, 1, matrix(x, 64, 64), matrix(x, 64, 64));
  Index zeros = 0;
  for (const float y : x) zeros += y == 0;
  CHECK(zeros > 1800);
  CHECK(zeros < 2300);
  CHECK(kept_places(c, 1e-12, 1, 64, 64) == std::vector<double>(64 * 64, 1.0));
  CHECK(kept_places(c, 1 - 1e-12, 1, 64, 64) == std::vector<double>(64 * 64, 0.0));
}

TEST_CASE("Dropout names a rate or an extent that does not fit", "[nn]") {
  auto c = context<float>(1, false);
  std::vector<float> x(6, 1.0F);
  const auto view = matrix(x, 2, 3);
  CHECK(message_of([&] { apply_dropout(c, 1.0, 1, view, view); }) ==
        "apply_dropout: rate is 1, it must be in [0, 1)");
  CHECK(message_of([&] { apply_dropout(c, -0.5, 1, view, view); }) ==
        "apply_dropout: rate is -0.5, it must be in [0, 1)");
  CHECK(message_of([&] { apply_dropout(c, kNan, 1, view, view); }) ==
        "apply_dropout: rate is nan, it must be in [0, 1)");
  CHECK(message_of([&] { apply_dropout(c, 0.5, 1, view, matrix(x, 3, 2)); }) ==
        "apply_dropout: y is 3 x 2, it must be 2 x 3");
}

TEMPLATE_TEST_CASE("Two steps of AdamW, by hand", "[nn]", float, double) {
  using T = TestType;
  Weights<T> layer;
  layer.add("w", {2}, 1);
  assign(layer[0].value, {2, -3});
  assign(layer[0].grad, {4, -1});
  AdamW<T> optimizer(
      {.learning_rate = 0.5, .beta1 = 0.5, .beta2 = 0.75, .epsilon = 1e-30, .weight_decay = 0.25});
  auto c = context<T>(1);
  optimizer.step(c, layer);
  // Decayed by 1 - 1/8; the first step is lr sign(g).
  CHECK(double(layer[0].value[0]) == Approx(1.75 - 0.5).epsilon(4 * kEps<T>));
  CHECK(double(layer[0].value[1]) == Approx(-2.625 + 0.5).epsilon(4 * kEps<T>));
  assign(layer[0].grad, {-2, 0});
  optimizer.step(c, layer);
  // m = 0.5 * 2 + 0.5 * -2 = 0; v = 0.75 * 4 + 0.25 * 4 = 4.
  CHECK(double(layer[0].value[0]) == Approx(1.25 * 0.875).epsilon(4 * kEps<T>));
  // m = 0.5 * -0.5 = -0.25, over 1 - 0.25: -1/3; v = 0.75 * 0.25 over 1 - 0.5625: 3/7.
  const double second = -2.125 * 0.875 + 0.5 / 3 / std::sqrt(3.0 / 7);
  CHECK(double(layer[0].value[1]) == Approx(second).epsilon(4 * kEps<T>));
  CHECK(optimizer.steps() == 2);
}

// One weight under AdamW, by the formula at the head of the file.
template <class T>
struct PlainAdamW {
  AdamWOptions o;
  std::vector<double> p, m, v;

  PlainAdamW(const AdamWOptions& options, const Param<T>& start)
      : o(options), p(start.data(), start.data() + start.size()), m(p.size()), v(p.size()) {}
  void step(const Param<T>& grad, int t, bool decays) {
    for (std::size_t i = 0; i < p.size(); ++i) {
      const double g = double(grad[Index(i)]);
      if (decays) p[i] *= 1 - o.learning_rate * o.weight_decay;
      m[i] = o.beta1 * m[i] + (1 - o.beta1) * g;
      v[i] = o.beta2 * v[i] + (1 - o.beta2) * g * g;
      const double first = m[i] / (1 - std::pow(o.beta1, t));
      const double second = v[i] / (1 - std::pow(o.beta2, t));
      p[i] -= o.learning_rate * first / (std::sqrt(second) + o.epsilon);
    }
  }
};

TEMPLATE_TEST_CASE("AdamW agrees with plain loops over many steps", "[nn]", float, double) {
  using T = TestType;
  const AdamWOptions options{.learning_rate = 2e-3, .epsilon = 1e-3, .weight_decay = 0.3};
  Weights<T> layer;
  layer.add("matrix", {5, 7}, 1);
  layer.add("bias", {7}, 2);
  const auto is_matrix = [](const std::string&, const Param<T>& p) { return p.shape().size() > 1; };
  AdamW<T> optimizer(options, is_matrix);
  PlainAdamW<T> matrix_twin(options, layer[0].value), bias_twin(options, layer[1].value);
  auto c = context<T>(1);
  for (int t = 1; t <= 50; ++t) {
    assign(layer[0].grad, normals<T>(35, 100 + std::uint64_t(t), 0.01));
    assign(layer[1].grad, normals<T>(7, 200 + std::uint64_t(t), 0.01));
    optimizer.step(c, layer);
    matrix_twin.step(layer[0].grad, t, true);
    bias_twin.step(layer[1].grad, t, false);
    if (t > 1 && t < 50) continue;
    // A rounding of each step, of numbers up to 3, and of the bias correction of m and v.
    const double margin = (sizeof(T) == 8 ? 1e-15 : 2e-7) * (t > 1 ? 8 : 1);
    CHECK(largest_difference(values_of(layer[0].value), matrix_twin.p) < margin);
    CHECK(largest_difference(values_of(layer[1].value), bias_twin.p) < margin);
  }
  std::vector<std::string> names;
  optimizer.visit_state([&](const std::string& name, auto& first, auto& second) {
    names.push_back(name);
    const PlainAdamW<T>& twin = name == "bias" ? bias_twin : matrix_twin;
    CHECK(largest_difference(first, twin.m) < 0.1 * kEps<T>);
    CHECK(largest_difference(second, twin.v) < 1e-3 * kEps<T>);
  });
  CHECK(names == std::vector<std::string>{"bias", "matrix"});
}

TEMPLATE_TEST_CASE("AdamW does not depend on the number of threads", "[nn]", float, double) {
  using T = TestType;
  std::vector<T> after[2];
  for (const std::size_t k : {std::size_t(0), std::size_t(1)}) {
    Weights<T> layer;
    layer.add("large", {397, 503}, 1);
    layer.add("small", {3}, 2);
    AdamW<T> optimizer;
    auto c = context<T>(k == 0 ? 1 : 3);
    PlainAdamW<T> twin(optimizer.options, layer[0].value);
    for (int t = 1; t <= 3; ++t) {
      optimizer.step(c, layer);
      twin.step(layer[0].grad, t, true);
    }
    after[k] = values_of(layer[0].value);
    // Three roundings of numbers up to 5.
    CHECK(largest_difference(after[k], twin.p) < 16 * kEps<T>);
  }
  CHECK(same_bits(after[0], after[1]));
}

TEST_CASE("AdamW goes on from a checkpoint of its state as if it had never stopped", "[nn]") {
  Weights<float> layer;
  layer.add("a", {3, 5}, 1);
  layer.add("b", {4}, 2);
  auto c = context<float>(1);
  AdamW<float> optimizer;
  optimizer.step(c, layer);
  optimizer.step(c, layer);
  std::vector<std::vector<float>> saved;
  optimizer.visit_state([&](const std::string&, auto& first, auto& second) {
    saved.push_back(first);
    saved.push_back(second);
  });
  Weights<float> other = layer;
  AdamW<float> resumed;
  resumed.prepare(other);
  std::size_t next = 0;
  resumed.visit_state([&](const std::string&, auto& first, auto& second) {
    CHECK(first == std::vector<float>(first.size(), 0.0F));
    first = saved[next++];
    second = saved[next++];
  });
  resumed.set_steps(optimizer.steps());
  optimizer.step(c, layer);
  resumed.step(c, other);
  CHECK(resumed.steps() == 3);
  CHECK(same_bits(values_of(layer[0].value), values_of(other[0].value)));
  CHECK(same_bits(values_of(layer[1].value), values_of(other[1].value)));
}

TEST_CASE("AdamW steps a layer or whatever a function shows, at the rate of the moment", "[nn]") {
  Linear<double> layer(2, 2, true);
  auto c = context<double>(1);
  layer.bias.grad[0] = 1;
  AdamW<double> optimizer;
  optimizer.options.learning_rate = 0.25;
  optimizer.step(c, layer);
  CHECK(layer.bias.value[0] == Approx(-0.25));
  CHECK(layer.bias.value[1] == 0);
  optimizer.options.learning_rate = 0.5;
  const auto show = [&](const Visitor<double>& f) { visit_weight("bias", layer.bias, f); };
  optimizer.step(c, show);
  CHECK(layer.bias.value[0] == Approx(-0.25 * (1 - 0.005) - 0.5));
}

TEST_CASE("A step of AdamW that would leave the finite numbers is not taken at all", "[nn]") {
  constexpr float huge = std::numeric_limits<float>::max();
  // More than two pieces of 65,536 numbers, and a rest that fills no pack.
  const Index count = 2 * 65536 + 3;
  const auto c_of = [](int threads) { return context<float>(threads); };
  for (const Index at : {Index(0), Index(65536), count - 1}) {
    const std::vector<std::function<void(Weights<float>&, AdamW<float>&)>> faults = {
        [&](auto& layer, auto&) { layer[1].grad[at] = float(kNan); },
        [&](auto& layer, auto&) { layer[1].grad[at] = kInfinity<float>; },
        [&](auto& layer, auto&) { layer[1].grad[at] = 1e25F; },  // its square overflows
        [&](auto& layer, auto&) { layer[1].value[at] = -kInfinity<float>; },
        [&](auto& layer, auto& adamw) {
          layer[1].value[at] = huge, adamw.options.learning_rate = 1e38;
          layer[1].grad[at] = -1;
        },
        [&](auto& layer, auto& adamw) {  // decay alone
          layer[1].value[at] = -huge / 8, adamw.options.weight_decay = 1e5;
        }};
    for (std::size_t fault = 0; fault < faults.size(); ++fault)
      for (const int threads : {1, 3}) {
        INFO("fault " << fault << " at " << at << " with " << threads << " threads");
        Weights<float> layer;
        layer.add("small", {3}, 1);
        layer.add("large", {count}, 2);
        AdamW<float> adamw({.weight_decay = 0});
        auto c = c_of(threads);
        CHECK(adamw.step_if_finite(c, layer));
        faults[fault](layer, adamw);
        std::vector<float> before[6], after[6];
        const auto note = [&](std::vector<float>* to) {
          to[0] = values_of(layer[0].value), to[1] = values_of(layer[1].value);
          adamw.visit_state([&, n = 2](const std::string&, auto& first, auto& second) mutable {
            to[n++] = first, to[n++] = second;
          });
        };
        note(before);
        CHECK_FALSE(adamw.step_if_finite(c, layer));
        note(after);
        for (int i = 0; i < 6; ++i) CHECK(same_bits(before[i], after[i]));
        CHECK(adamw.steps() == 1);
      }
  }
}

TEST_CASE("A step of AdamW that stays finite is the plain step, bit for bit", "[nn]") {
  Weights<float> layer;
  layer.add("a", {397, 503}, 1);
  layer.add("b", {3}, 2);
  Weights<float> other = layer;
  AdamW<float> plain, careful;
  auto c = context<float>(2);
  for (int t = 0; t < 3; ++t) {
    plain.step(c, layer);
    CHECK(careful.step_if_finite(c, other));
  }
  CHECK(careful.steps() == 3);
  CHECK(same_bits(values_of(layer[0].value), values_of(other[0].value)));
  CHECK(same_bits(values_of(layer[1].value), values_of(other[1].value)));
}

TEST_CASE(
    "A logit that is not finite makes the loss of its row NaN or infinite, wherever it stands",
    "[nn]") {
  auto c = context<float>(1);
  for (const Index classes : {1, 3, 8, 21})
    for (Index at = 0; at < classes; ++at)
      for (const float wrong : {float(kNan), kInfinity<float>}) {
        std::vector<float> logits = normals<float>(classes, 3);
        logits[std::size_t(at)] = wrong;
        const std::vector<Index> target = {classes / 2};
        CHECK_FALSE(std::isfinite(
            cross_entropy<float>(c, matrix(std::as_const(logits), 1, classes), target).loss));
      }
}

TEST_CASE("AdamW names what does not fit and changes nothing", "[nn]") {
  Weights<float> layer;
  layer.add("first", {4}, 1);
  layer.add("w", {6}, 2);
  auto c = context<float>(1);
  AdamW<float> optimizer;
  optimizer.step(c, layer);
  const auto before = values_of(layer[0].value);
  const auto step = [&] { return message_of([&] { optimizer.step(c, layer); }); };
  layer[1] = Weight<float>({5});
  CHECK(step() == "AdamW::step: w has 5 values, its state has 6");
  layer[1] = Weight<float>({6});
  layer[1].grad = Param<float>(std::vector<Index>{2});
  CHECK(step() == "AdamW::step: w has 6 values, its gradient has 2");
  layer.list[1].first = "first";
  CHECK(step() == "AdamW::step: first is visited twice");
  layer.list.pop_back();
  optimizer.options.beta2 = 1;
  CHECK(step() == "AdamW::step: beta2 is 1, it must be in [0, 1)");
  CHECK(same_bits(before, values_of(layer[0].value)));
  CHECK(optimizer.steps() == 1);
  CHECK(message_of([&] { optimizer.set_steps(-1); }) ==
        "AdamW::set_steps: steps is -1, it must be at least 0");
}

TEST_CASE("AdamW refuses options out of range", "[nn]") {
  const auto message = [](const AdamWOptions& options) {
    return message_of([&] { AdamW<float> optimizer(options); });
  };
  CHECK(message({.learning_rate = -1}) ==
        "AdamW: learning_rate is -1, it must be at least 0 and finite");
  CHECK(message({.learning_rate = kInfinity<double>}) ==
        "AdamW: learning_rate is inf, it must be at least 0 and finite");
  CHECK(message({.beta1 = 1}) == "AdamW: beta1 is 1, it must be in [0, 1)");
  CHECK(message({.beta2 = -0.5}) == "AdamW: beta2 is -0.5, it must be in [0, 1)");
  CHECK(message({.epsilon = 0}) == "AdamW: epsilon is 0, it must be positive and finite");
  CHECK(message({.weight_decay = kNan}) ==
        "AdamW: weight_decay is nan, it must be at least 0 and finite");
}

TEST_CASE("A schedule warms up in a line and falls along a cosine", "[nn]") {
  const WarmupCosine rate{.warmup = 4, .total = 10, .peak = 0.8, .floor = 0.2};
  CHECK(rate.at(0) == Approx(0.2));
  CHECK(rate.at(2) == Approx(0.6));
  CHECK(rate.at(3) == Approx(0.8));
  CHECK(rate.at(4) == Approx(0.8));
  CHECK(rate.at(6) == Approx(0.65));  // cos(pi / 3) = 1/2
  CHECK(rate.at(7) == Approx(0.5));
  CHECK(rate.at(8) == Approx(0.35));
  CHECK(rate.at(10) == 0.2);
  CHECK(rate.at(1000) == 0.2);
  const WarmupCosine cold{.warmup = 0, .total = 2, .peak = 1, .floor = 0};
  CHECK(cold.at(0) == 1.0);
  CHECK(cold.at(1) == Approx(0.5));
  CHECK(cold.at(2) == 0.0);
  const WarmupCosine steep{.warmup = 2, .total = 2, .peak = 1, .floor = 0};
  CHECK(steep.at(1) == 1.0);
  CHECK(steep.at(2) == 0.0);
}

TEST_CASE("A schedule refuses numbers out of range", "[nn]") {
  const auto message = [](const WarmupCosine& rate, Index step = 0) {
    return message_of([&] { (void)rate.at(step); });
  };
  CHECK(message({1, 2, 1, 0}, -1) == "WarmupCosine::at: step is -1, it must be at least 0");
  CHECK(message({-1, 2, 1, 0}) == "WarmupCosine::at: warmup is -1, it must be at least 0");
  CHECK(message({3, 2, 1, 0}) == "WarmupCosine::at: total is 2, it must be at least warmup, 3");
  CHECK(message({1, 2, 1, -1}) == "WarmupCosine::at: floor is -1, it must be at least 0");
  CHECK(message({1, 2, 1, kNan}) == "WarmupCosine::at: floor is nan, it must be at least 0");
  CHECK(message({1, 2, 1, 3}) ==
        "WarmupCosine::at: peak is 1, it must be finite and at least floor, 3");
  CHECK(message({1, 2, kInfinity<double>, 3}) ==
        "WarmupCosine::at: peak is inf, it must be finite and at least floor, 3");
}

TEMPLATE_TEST_CASE("Clipping scales all gradients to the norm, or none", "[nn]", float, double) {
  using T = TestType;
  Weights<T> layer;
  layer.add("a", {9}, 1);
  layer.add("b", {2}, 2);
  assign(layer[0].grad, {0, 0, 3, 0, 0, 0, 0, 0, -4});
  assign(layer[1].grad, {0, 12});
  CHECK(clip_gradients<T>(layer, 13.0) == 13.0);
  CHECK(clip_gradients<T>(layer, kInfinity<double>) == 13.0);
  CHECK(layer[1].grad[1] == 12);
  CHECK(clip_gradients<T>(layer, 6.5) == 13.0);
  CHECK(values_of(layer[0].grad) == std::vector<T>{0, 0, T(1.5), 0, 0, 0, 0, 0, -2});
  CHECK(values_of(layer[1].grad) == std::vector<T>{0, 6});
}

TEST_CASE("Clipping leaves gradients whose norm is not finite, and sums floats in double", "[nn]") {
  Weights<float> layer;
  layer.add("a", {2}, 1);
  assign(layer[0].grad, {3e30F, 4e30F});
  CHECK(clip_gradients<float>(layer, kInfinity<double>) == Approx(5e30));
  layer[0].grad[1] = kInfinity<float>;
  CHECK(clip_gradients<float>(layer, 1.0) == kInfinity<double>);
  CHECK(layer[0].grad[0] == 3e30F);
  layer[0].grad[1] = float(kNan);
  CHECK(std::isnan(clip_gradients<float>(layer, 1.0)));
  CHECK(layer[0].grad[0] == 3e30F);
  CHECK(message_of([&] { clip_gradients<float>(layer, 0.0); }) ==
        "clip_gradients: max_norm is 0, it must be positive");
  CHECK(message_of([&] { clip_gradients<float>(layer, kNan); }) ==
        "clip_gradients: max_norm is nan, it must be positive");
}

}  // namespace
