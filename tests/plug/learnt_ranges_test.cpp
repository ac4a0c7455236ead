// SPDX-License-Identifier: Apache-2.0

// Learnt parameters stay where their op accepts them (core/interval.hpp): the projection by itself,
// and every variant with a bound after training at rates that are far too large.

#include "catch.hpp"
#include "message_of.hpp"
#include "nn_model_case.hpp"

#include <heed/attention.hpp>
#include <heed/nn/attention_layers.hpp>
#include <heed/plug/own_score.hpp>

#include <limits>

using namespace heed_test;
using heed::FlowMode;
using heed::GateKind;
using heed::Interval;
using heed::Param;

namespace {

constexpr double kNan = std::numeric_limits<double>::quiet_NaN();
constexpr double kInf = std::numeric_limits<double>::infinity();
constexpr Index kWidth = 8, kHeads = 2, kBatch = 2, kLen = 6;

heed::Geometry sizes() { return nn::AttentionOptions::even(kWidth, kHeads).heads; }

template <class Op>
bool is_valid(const Op& op) {
  return message_of([&] { op.validate(sizes(), "test"); }) == "nothing was thrown";
}

// An own score with both ranges that have an end.
template <class T>
struct Bounded {
  Param<T> width = T(1), weight = T(0.1);
  static constexpr auto parameters =
      std::tuple{heed::named("width", &Bounded::width, heed::Range::positive),
                 heed::named("weight", &Bounded::weight, heed::Range::not_negative)};
  template <class S>
  S score(const auto& pair, const auto& p) const {
    return pair.logit - p[1] * heed::distance(pair) / p[0];
  }
};

bool all_finite(const std::vector<float>& numbers) {
  return std::all_of(numbers.begin(), numbers.end(), [](float x) { return std::isfinite(x); });
}

// Steps of AdamW down and up a loss that is linear in the layer's rows and knows no minimum: they carry every
// parameter as far as the rate allows.
template <class Make>
void train_far(const std::string& name, const Make& make) {
  for (const float sign : {1.0F, -1.0F})
    for (const double rate : {0.1, 1.0, 10.0}) {
      INFO(name << ", rate " << rate << ", sign " << sign);
      auto trained = make();
      shake<float>(trained);
      nn::Context<float> c;
      c.training = true;
      nn::AdamW<float> optimiser({.learning_rate = rate});
      const auto x = normals<float>(kBatch * kLen, kWidth, 1);
      auto dy = normals<float>(kBatch * kLen, kWidth, 2);
      for (Index i = 0; i < dy.rows() * kWidth; ++i) dy.view().data[i] *= sign;
      nn::Matrix<float> y(x.rows(), kWidth), dx(x.rows(), kWidth);
      for (int step = 0; step < 12; ++step) {
        INFO("step " << step);
        nn::clear_gradients<float>(trained);
        REQUIRE_NOTHROW(trained.forward(c, kBatch, x.view(), y.view()));
        REQUIRE(all_finite(numbers(y.view())));
        trained.backward(c, kBatch, x.view(), std::as_const(dy).view(), dx.view());
        REQUIRE(all_finite(all_gradients<float>(trained)));
        optimiser.step(c, trained);
        REQUIRE(all_finite(all_weights<float>(trained)));
        REQUIRE_NOTHROW(trained.stage.op.validate(trained.heads(), "test"));
      }
    }
}

}  // namespace

TEST_CASE("An interval moves what is outside of it inside, next to the end that was passed") {
  const Interval rates{0, 3, "it must lie between 0 and 3"};
  for (const double inside : {1e-300, 1e-9, 0.5, 2.9999999}) {
    CHECK(rates.contains(inside));
    CHECK(rates.nearest(inside) == inside);
  }
  for (const double below : {0.0, -0.0, -0.037, -1e30}) {
    CHECK_FALSE(rates.contains(below));
    CHECK(rates.nearest(below) == 1.0 / 1024);
  }
  for (const double above : {3.0, 3.5, 1e30}) CHECK(rates.nearest(above) == 3 - 1.0 / 1024);
  for (const double unknown : {kNan, kInf, -kInf}) {
    CHECK_FALSE(rates.contains(unknown));
    CHECK_FALSE(std::isfinite(rates.nearest(unknown)));
  }
  const Interval narrow{1, 1.0001, ""};
  CHECK(narrow.contains(narrow.nearest(0)));
  CHECK(narrow.contains(narrow.nearest(2)));
  CHECK(Interval{}.nearest(-1e300) == -1e300);
  const Interval from_zero = heed::interval_of(heed::Range::not_negative);
  CHECK(from_zero.contains(0));
  CHECK(from_zero.nearest(-0.1) == 0);
  CHECK(heed::interval_of(heed::Range::positive).nearest(0) == 1.0 / 1024);
}

TEST_CASE("Parameters inside of their ranges are not moved, not by one bit") {
  heed::Dar<double> dar;
  dar.score.converged = true;
  dar.score.sharpness = {1e-9, 8};
  dar.score.feedback = {7, -0.4999};
  const heed::Dar<double> before = dar;
  dar.keep_in_range();
  CHECK(dar.score.sharpness[0] == before.score.sharpness[0]);
  CHECK(dar.score.feedback[0] == before.score.feedback[0]);
  CHECK(dar.score.feedback[1] == before.score.feedback[1]);

  heed::ResonantOde<double> steps;  // every finite rate, by any number of steps
  steps.normaliser.eta = {-0.037, 17};
  steps.keep_in_range();
  CHECK(steps.normaliser.eta[0] == -0.037);
  CHECK(steps.normaliser.eta[1] == 17);
}

TEST_CASE("Each part brings its parameters back to where validate() accepts them") {
  heed::Dar<float> dar;
  dar.score.sharpness = {-2.0F, 5.0F};
  CHECK_FALSE(is_valid(dar));
  dar.keep_in_range();
  CHECK(dar.score.sharpness[0] == 1.0F / 1024);
  CHECK(dar.score.sharpness[1] == 5.0F);
  CHECK(is_valid(dar));

  heed::ResonantOde<float> ode;
  for (const auto& [mode, end] :
       {std::pair{FlowMode::equilibrium, 3.0F}, std::pair{FlowMode::lagrange_equilibrium, 2.0F}}) {
    ode.normaliser.mode = mode;
    ode.normaliser.eta = {-0.037F, 3.2F};
    CHECK_FALSE(is_valid(ode));
    ode.keep_in_range();
    CHECK(ode.normaliser.eta[0] == 1.0F / 1024);
    CHECK(ode.normaliser.eta[1] == end - 1.0F / 1024);
    CHECK(is_valid(ode));
  }

  heed::OwnAttention<Bounded, float> own;
  own.score.width = {-3.0F, 0.5F};
  own.score.weight = -0.5F;
  CHECK_FALSE(is_valid(own));
  own.keep_in_range();
  CHECK(own.score.width[0] == 1.0F / 1024);
  CHECK(own.score.width[1] == 0.5F);
  CHECK(own.score.weight[0] == 0.0F);
  CHECK(is_valid(own));

  // A NaN is not moved: validate() names it.
  dar.score.sharpness = float(kNan);
  dar.keep_in_range();
  CHECK(message_of([&] { dar.validate(sizes(), "test"); }) ==
        "test: sharpness is nan, it must be finite");
}

TEST_CASE("The feedback of a converged gate shrinks, head by head, until the fixed point is one") {
  for (const GateKind gate :
       {GateKind::logistic, GateKind::centred, GateKind::tanh, GateKind::piecewise_linear}) {
    INFO("gate " << int(gate));
    heed::Dar<float> op;
    op.score.gate = gate;
    op.score.converged = true;
    op.score.sharpness = {8.0F, 0.5F};
    op.score.feedback = {-30.0F, 0.25F};
    CHECK_FALSE(is_valid(op));
    op.keep_in_range();
    CHECK(is_valid(op));
    CHECK(op.score.contraction() == Approx(63.0 / 64).epsilon(1e-6));
    CHECK(op.score.feedback[0] < 0);
    CHECK(op.score.feedback[1] == 0.25F);
    const float once = op.score.feedback[0];
    op.keep_in_range();
    CHECK(op.score.feedback[0] == once);

    // One feedback for heads of different sharpness: the steepest head decides.
    op.score.sharpness = {-1.0F, 12.0F};
    op.score.feedback = 40.0F;
    op.keep_in_range();
    CHECK(is_valid(op));
    CHECK(op.score.contraction() == Approx(63.0 / 64).epsilon(1e-6));
    // The same numbers are valid if the gate does not converge.
    op.score.converged = false;
    op.score.feedback = 40.0F;
    op.keep_in_range();
    CHECK(op.score.feedback[0] == 40.0F);
  }
}

TEMPLATE_TEST_CASE("The four vectors of lambda shrink until lambda is finite with room to spare",
                   "", float, double) {
  using T = TestType;
  auto op = heed::make_differential_v1<T>(2, 1);
  const double third = std::log(double(std::numeric_limits<T>::max())) / 3;
  op.normaliser.lambda_q1 = {T(300), T(-40)};
  op.normaliser.lambda_k1 = {T(20), T(10)};
  op.normaliser.lambda_q2 = {T(0.5), T(0.25)};
  op.normaliser.lambda_k2 = {T(-900), T(8)};
  const T kept = op.normaliser.lambda_q2[0];
  CHECK_FALSE(std::isfinite(op.normaliser.lambda_of(0, T(0))));
  op.keep_in_range();
  const double lambda = double(op.normaliser.lambda_of(0, T(0)));
  CHECK(std::log(lambda) == Approx(third).epsilon(1e-5));
  CHECK(std::log(lambda) < third);
  CHECK(double(op.normaliser.lambda_q1[0] / op.normaliser.lambda_q1[1]) == Approx(-7.5));
  CHECK(op.normaliser.lambda_q2[0] == kept);
  const T once = op.normaliser.lambda_q1[0];
  op.keep_in_range();
  CHECK(op.normaliser.lambda_q1[0] == once);
}

TEST_CASE("A constant of a layer is not moved: forward() refuses it") {
  heed::ResonantOde<float> op;
  op.normaliser.mode = FlowMode::equilibrium;
  op.normaliser.eta = 1.0F;
  for (const bool learns : {false, true}) {
    auto layer = nn::resonant_attention<float>(kWidth, kHeads, op, true, learns);
    layer.stage.op.normaliser.eta = -1.0F;
    nn::Context<float> c;
    const auto x = normals<float>(kBatch * kLen, kWidth, 1);
    nn::Matrix<float> y(x.rows(), kWidth);
    const auto forward = [&] { layer.forward(c, kBatch, x.view(), y.view()); };
    // A parameter that starts outside its range is not moved: this is a mistake of the caller.
    CHECK(message_of(forward).find("eta is -1, it must lie between 0 and 3") != std::string::npos);
    nn::AdamW<float>({.learning_rate = 1e-3}).step(c, layer);
    CHECK((message_of(forward) == "nothing was thrown") == learns);
    CHECK((layer.stage.op.normaliser.eta[0] > 0) == learns);
  }
}

TEST_CASE("DAR in all its forms trains at any rate and stays in its range") {
  for (const GateKind gate :
       {GateKind::logistic, GateKind::centred, GateKind::tanh, GateKind::piecewise_linear})
    for (const int iterations : {1, 3, -1}) {
      heed::Dar<float> op;
      op.score.gate = gate;
      op.score.converged = iterations < 0;
      op.score.iterations = std::max(iterations, 0);
      op.score.sharpness = {2.0F, 1.0F};
      op.score.feedback = {0.3F, -0.3F};
      train_far("gate " + std::to_string(int(gate)) + ", iterations " + std::to_string(iterations),
                [&] { return nn::dar_attention<float>(kWidth, kHeads, op, true, true); });
    }
}

TEST_CASE("Every flow of the resonant ODE trains at any rate and stays in its range") {
  for (const FlowMode mode :
       {FlowMode::steps, FlowMode::equilibrium, FlowMode::lagrange_equilibrium}) {
    heed::ResonantOde<float> op;
    op.normaliser.mode = mode;
    op.normaliser.eta = {0.5F, 0.02F};
    train_far("mode " + std::to_string(int(mode)),
              [&] { return nn::resonant_attention<float>(kWidth, kHeads, op, true, true); });
  }
}

TEST_CASE("Differences train at any rate and keep a finite lambda") {
  train_far("differential", [] { return nn::differential_attention<float>(kWidth, kHeads); });
  train_far("differential-v1",
            [] { return nn::differential_v1_attention<float>(kWidth, kHeads, 1); });
}

TEST_CASE("An own score trains at any rate and stays in the ranges that it names") {
  using Op = heed::OwnAttention<Bounded, float>;
  train_far("own", [] {
    return nn::ProjectedAttention<Op>(nn::AttentionOptions::even(kWidth, kHeads), Op{},
                                      heed::causal<float>());
  });
}

TEST_CASE("A model of every variant goes on training at rates that are far too large") {
  for (const std::string& name : nn::attention_names())
    for (const double rate : {0.1, 1.0}) {
      INFO(name << ", rate " << rate);
      nn::GptOptions o;
      o.vocabulary = 17;
      o.width = 16;
      o.heads = 2;
      o.depth = 2;
      o.max_len = 8;
      o.hidden = 16;
      auto model = gpt_around<float>(name, o);
      shake<float>(model);
      nn::Context<float> c;
      c.training = true;
      nn::AdamW<float> optimiser({.learning_rate = rate});
      const auto ids = random_ids(3 * 8, o.vocabulary, 1),
                 targets = random_ids(3 * 8, o.vocabulary, 2);
      for (int step = 0; step < 15; ++step) {
        nn::clear_gradients<float>(model);
        double loss = kNan;
        REQUIRE_NOTHROW(loss = model.gradient(c, 3, ids, targets));
        REQUIRE(std::isfinite(loss));
        optimiser.step(c, model);
      }
    }
}

TEST_CASE("A model learns the parameters of a converged gate and keeps its fixed point one") {
  nn::GptOptions o;
  o.vocabulary = 17;
  o.width = 16;
  o.heads = 2;
  o.depth = 1;
  o.max_len = 8;
  o.hidden = 16;
  auto model = gpt_around<float>("dar-converged", o);
  const auto* feedback = find_weight<float>(model, "blocks.0.attn.feedback");
  const auto* sharpness = find_weight<float>(model, "blocks.0.attn.sharpness");
  REQUIRE(feedback != nullptr);
  REQUIRE(sharpness != nullptr);
  shake<float>(model);
  nn::Context<float> c;
  c.training = true;
  nn::AdamW<float> optimiser({.learning_rate = 0.3});
  const auto ids = random_ids(3 * 8, o.vocabulary, 1), targets = random_ids(3 * 8, o.vocabulary, 2);
  const float first = (*feedback)[0];
  bool reached = false;
  for (int step = 0; step < 30; ++step) {
    nn::clear_gradients<float>(model);
    REQUIRE(std::isfinite(model.gradient(c, 3, ids, targets)));
    optimiser.step(c, model);
    const double slope = std::abs(double((*feedback)[0]) * double((*sharpness)[0])) / 4;
    REQUIRE(slope < 1);
    reached = reached || slope > 0.98;
  }
  CHECK((*feedback)[0] != first);
  CHECK(reached);
}
