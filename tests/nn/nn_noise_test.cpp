// SPDX-License-Identifier: Apache-2.0

// Noise on queries and keys (nn/noise.hpp), alone and in a layer.

#include "catch.hpp"
#include "nn_case.hpp"

#include <heed/compiled.hpp>
#include <heed/nn/attention_layers.hpp>
#include <heed/nn/noise.hpp>

using namespace heed_test;

namespace {

constexpr Index kWidth = 64, kHeads = 2, kBatch = 3, kLen = 20;

using Layer = nn::ProjectedAttention<heed::IntentGated<double>>;

// A layer with positions and norms, so that attention reads rows of their own; with an extra input.
Layer turning_layer() {
  auto layer = nn::intent_attention<double>(kWidth, kHeads, nn::ExtraSource::projected,
                                            nn::RopePairs::halves);
  shake<double>(layer);
  return layer;
}

struct Read {
  std::vector<double> query, key, value, extra;
};

template <class AnyLayer>
Read read_by(AnyLayer& layer, nn::Context<double>& c, Index len = kLen) {
  const auto x = normals<double>(kBatch * len, kWidth, 1);
  nn::Matrix<double> y(x.rows(), kWidth);
  layer.forward(c, kBatch, x.view(), y.view());
  const auto in = layer.inputs(kBatch);
  Read read;
  for (const auto& [from, to] : {std::pair{&in.query, &read.query},
                                 {&in.key, &read.key},
                                 {&in.value, &read.value},
                                 {&in.extra, &read.extra}}) {
    const heed::Shape& s = from->shape();
    for (Index b = 0; from->given() && b < s.batch; ++b)
      for (Index h = 0; h < s.heads; ++h)
        for (Index t = 0; t < s.len; ++t)
          for (Index i = 0; i < s.dim; ++i) to->push_back((*from)(b, h, t, i));
  }
  return read;
}

double rms(const std::vector<double>& x) {
  double sum = 0;
  for (const double v : x) sum += v * v;
  return std::sqrt(sum / double(x.size()));
}
std::vector<double> less(const std::vector<double>& a, const std::vector<double>& b) {
  std::vector<double> d;
  for (std::size_t i = 0; i < a.size(); ++i) d.push_back(a[i] - b[i]);
  return d;
}

}  // namespace

TEST_CASE("Queries and keys get noise of sigma times their root mean square, nothing else does") {
  nn::Context<double> c;
  auto turning = turning_layer();
  auto plain = nn::differential_attention<double>(kWidth, kHeads, {}, true);
  shake<double>(plain);
  const auto check = [&](auto& layer) {
    const Read clean = read_by(layer, c);
    for (const double sigma : {0.1, 2.0}) {
      layer.set_noise(sigma, 5);
      const Read noisy = read_by(layer, c);
      const std::vector<double> of_query = less(noisy.query, clean.query),
                                of_key = less(noisy.key, clean.key);
      // 3,840 numbers: the deviation is known to 1.2 %, the mean to 0.016 of it.
      for (const auto& [noise, rows] :
           {std::pair{&of_query, &clean.query}, {&of_key, &clean.key}}) {
        CHECK(rms(*noise) == Approx(sigma * rms(*rows)).epsilon(0.05));
        double mean = 0;
        for (const double v : *noise) mean += v / double(noise->size());
        CHECK(std::abs(mean) < 0.06 * sigma * rms(*rows));
      }
      // Queries and keys get different noise.
      double product = 0;
      for (std::size_t i = 0; i < of_query.size(); ++i) product += of_query[i] * of_key[i];
      CHECK(std::abs(product) < 0.06 * double(of_query.size()) * rms(of_query) * rms(of_key));
      CHECK(same_bits(noisy.value, clean.value));
      CHECK(same_bits(noisy.extra, clean.extra));
    }
    layer.set_noise(0, 5);
    CHECK(same_bits(read_by(layer, c).query, clean.query));
  };
  check(turning);
  check(plain);
}

TEST_CASE("Noise is a function of seed, step, stream and place, for any number of threads") {
  auto layer = turning_layer();
  nn::Context<double> c;
  layer.set_noise(0.3, 1);
  const Read first = read_by(layer, c);
  for (const int threads : {1, 3}) {
    c.threads = threads;
    CHECK(same_bits(read_by(layer, c).query, first.query));
  }
  nn::Context<double> of_seed, of_step;
  of_seed.seed = 1;
  CHECK_FALSE(same_bits(read_by(layer, of_seed).query, first.query));
  of_step.step = 1;
  CHECK_FALSE(same_bits(read_by(layer, of_step).key, first.key));
  layer.set_noise(0.3, 2);
  CHECK_FALSE(same_bits(read_by(layer, c).query, first.query));
  // Training adds no noise.
  nn::Context<double> training;
  training.training = true;
  const Read trained = read_by(layer, training);
  layer.set_noise(0, 2);
  CHECK(same_bits(trained.query, read_by(layer, c).query));
}

TEST_CASE("The noise of a row is that of its position, however many rows come at once") {
  nn::Context<double> c;
  nn::Matrix<double> whole(4, 3), part(2, 3);
  for (nn::Matrix<double>* m : {&whole, &part})
    std::fill(m->view().data, m->view().data + m->rows() * 3, 1.0);
  nn::add_noise(c, 0.5, 7, whole.view(), 4);
  nn::add_noise(c, 0.5, 7, part.view(), 2, 2);
  for (Index i = 0; i < 6; ++i) CHECK(part.view().data[i] == whole.view().data[6 + i]);
}

TEST_CASE("A sigma that is no number of at least 0 is refused") {
  auto layer = turning_layer();
  CHECK_THROWS_WITH(layer.set_noise(-1, 0),
                    "ProjectedAttention::set_noise: sigma is -1, it must be finite and at least 0");
  CHECK_THROWS_AS(layer.set_noise(HUGE_VAL, 0), std::invalid_argument);
}
