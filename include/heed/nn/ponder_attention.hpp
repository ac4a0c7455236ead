// SPDX-License-Identifier: Apache-2.0
#pragma once

// PonderNet around the dialectical recursion: a token leaves its layer after a step that chance chooses, with learnt
// probabilities. The loss of a model is the mean of its losses over all choices, and its gradient is exact.
//
//   z_n = the rows of all heads behind step n of N, side by side     (ops/dialectical.hpp, Halting::outside)
//   (1) a_n = w . z_n + b,  lambda_n = sigmoid(a_n)                  n < N: halt behind this step?
//         dz_n += da_n w        dw += da_n z_n        db += da_n
//   (2) p_n = lambda_n prod_(m < n) (1 - lambda_m)  for n < N,  p_N = prod_(m < N) (1 - lambda_m)
//         D_n = dL/dp_n         da_n = (1 - lambda_n) p_n D_n - lambda_n sum_(m > n) p_m D_m
//   (3) y_n = z_n W^T + b_W                                          the output projection
//
//   Training: the model runs everything behind the layer on y_1 ... y_N, and gets l_n, the loss of the token with y_n.
//   (4) L = sum_n p_n l_n + beta KL(p || g)
//       g_n = prior (1 - prior)^(n - 1)  for n < N,  g_N = (1 - prior)^(N - 1)
//       KL(p || g) = sum_n p_n (log p_n - log g_n)
//         D_n = l_n + beta (log p_n - log g_n)         a summand of D_n that all n share has no effect on da
//   L, like the loss of a model, is the mean over the tokens that have a target.
//
//   Otherwise: step n halts a token that is still there with probability lambda_n, by a random number that is a function of
//   the context's seed and step, of the sequence, the position and n; step N halts the rest. y is y_n of the step that halted.
//
// Symbols   w and b: weights halt.weight (1, width), halt.bias (1). beta: set_ponder(). prior: set_ponder_prior().
//           token_diagnostics(): "steps" is sum_n n p_n of a token in training, else the step that
//           halted it; tension is the op's.
// Shapes    in training y and dy are (N tokens, width): y_1 of all tokens, then y_2 of all, and so on. Otherwise (tokens, width).
// Bounds    p sums to 1 up to rounding. Logarithms of p are computed from a: no NaN where a is finite.
// Source    Banino, Balaguer, Blundell 2021, "PonderNet: Learning to Ponder", arXiv 2107.05407: lambda_n, p_n, the loss,
//           and that evaluation samples the halting step. In p and in the prior step N has the remaining probability, so
//           that KL is 0 where every lambda_n is the prior. Differs in the recursion, which is the attention of a
//           transformer's last block, and in that each token halts by itself, with one lambda_n for all of its heads.
// Cost      training: the rest of the block and the head N times. Otherwise they run once; the recursion takes its N steps, since
//           a token's lambda needs the rows of all heads, which the engine computes apart.

#include <heed/nn/projected_attention.hpp>
#include <heed/ops/dialectical.hpp>

#include <cmath>

namespace heed {
inline namespace HEED_ABI {
namespace nn {

// The prior of PonderNet unless another is set: out of six steps a row takes 2.9 in the mean.
inline constexpr double kPonderPrior = 0.3;

template <class Real>
class PonderAttention final : public AttentionLayer<Real> {
 public:
  ProjectedAttention<Dialectical<Real>>
      projected;  // q, k, v and the recursion, without an output projection

  // `steps` >= 2 is N. `options` gives names and bias of the projections.
  PonderAttention(const AttentionOptions& options, int steps, Mask<Real> mask)
      : projected(without_out(options),
                  make_dialectical<Real>(options.heads,
                                         {.max_steps = steps, .halting = Halting::outside}),
                  std::move(mask)),
        out_name_(options.names.out),
        halt_(projected.width_out(), 1, true),
        out_(projected.width_out(), options.width, options.bias) {}

  void forward(Context<Real>& c, Index batch, const MatrixView<const Real>& x,
               const MatrixView<Real>& y) override {
    attend(x.rows, [&](const MatrixView<Real>& last) { projected.forward(c, batch, x, last); });
    take_trail(batch, x.rows);
    find_logits(c, x.rows);
    if (!c.training) return leave(c, batch, 0, y);
    share_out(x.rows);
    out_.forward(c, rows_.view(), y);
  }
  void backward(Context<Real>& c, Index batch, const MatrixView<const Real>& x,
                const MatrixView<const Real>& dy, const MatrixView<Real>& dx) override {
    require_extents(dy, rows_.rows(), out_.out(), "PonderAttention::backward", "dy");
    require(dlogits_.rows() == rows_.rows() - x.rows,
            "PonderAttention::backward: the losses of the steps are missing; take_step_losses() "
            "comes first");
    drows_.resize(rows_.rows(), rows_.columns());
    // (3), (1)
    out_.backward(c, rows_.view(), dy, drows_.view());
    const Index halting = dlogits_.rows();
    halt_.backward(c, rows_.view().row_range(0, halting), dlogits_.view(),
                   drows_.view().row_range(0, halting), Into::add);
    dlogits_.resize(0, 1);
    give_trail(batch, x.rows);
    projected.backward(c, batch, x, drows_.view().row_range(halting, x.rows), dx);
  }
  void visit(const Visitor<Real>& f) override {
    projected.visit(f);
    visit_part<Real>("halt", halt_, f);
    visit_part<Real>(out_name_, out_, f);
  }
  void keep_in_range() override { projected.keep_in_range(); }

  [[nodiscard]] Index spread_step(const Context<Real>& c, Index batch, Index len) const override {
    return projected.spread_step(c, batch, len);
  }
  [[nodiscard]] bool can_step() const override { return projected.can_step(); }
  [[nodiscard]] KvCache<Real> new_cache(Index batch) const override {
    return projected.new_cache(batch);
  }
  // A token leaves after one of its steps in training, too.
  void step(Context<Real>& c, Index batch, const MatrixView<const Real>& x,
            const MatrixView<Real>& y, KvCache<Real>& cache) override {
    const Index position = cache.len();
    attend(x.rows, [&](const MatrixView<Real>& last) { projected.step(c, batch, x, last, cache); });
    take_trail(batch, x.rows);
    find_logits(c, x.rows);
    leave(c, batch, position, y);
  }

  void restrict_to(const Mask<Real>& also) override { projected.restrict_to(also); }
  void set_dropout(double rate, std::uint64_t stream) override {
    projected.set_dropout(rate, stream);
  }
  void set_noise(double sigma, std::uint64_t stream) override {
    projected.set_noise(sigma, stream);
  }

  [[nodiscard]] bool counts_steps() const override { return true; }
  void set_ponder(double weight) override {
    require(std::isfinite(weight) && weight >= 0, "PonderAttention::set_ponder: the weight is ",
            weight, ", it must be finite and not negative");
    weight_ = weight;
  }
  void set_ponder_prior(double prior) override {
    require(prior > 0 && prior < 1, "PonderAttention::set_ponder_prior: the prior is ", prior,
            ", it must lie between 0 and 1, and be neither");
    prior_ = prior;
  }
  [[nodiscard]] double ponder_cost() const override { return cost_; }
  [[nodiscard]] Index scored_steps() const override { return steps(); }
  [[nodiscard]] std::span<const Real> step_shares() const override { return shares_; }

  void take_step_losses(std::span<const Real> losses, std::span<const Real> parts) override {
    const Index count = steps(), tokens = Index(parts.size());
    require(losses.size() == shares_.size() && Index(losses.size()) == count * tokens,
            "PonderAttention::take_step_losses: ", losses.size(), " losses were given for ", tokens,
            " tokens of ", count, " steps, the last forward() in training had ", shares_.size());
    dlogits_.resize((count - 1) * tokens, 1);
    cost_ = 0;
    for (Index t = 0; t < tokens; ++t) {
      double behind = 0;  // sum over the steps behind n of p D
      for (Index n = count; n-- > 0;) {
        const auto at = std::size_t(n * tokens + t);
        const double p = double(shares_[at]), part = double(parts[std::size_t(t)]);
        // (4)
        const double farther = log_shares_[at] - log_prior(n);
        cost_ += weight_ * part * p * farther;
        const double slope = part * (double(losses[at]) + weight_ * farther);
        // (2) da_n = (1 - lambda_n) p_n D_n - lambda_n sum_(m > n) p_m D_m
        if (n + 1 < count) {
          const double a = logit(n, t, tokens);
          dlogits_.view().row(Index(at))[0] = Real(sigmoid(-a) * p * slope - sigmoid(a) * behind);
        }
        behind += p * slope;
      }
    }
  }

  [[nodiscard]] std::vector<std::pair<std::string, double>> diagnostics() const override {
    std::vector<std::pair<std::string, double>> means;
    for (const TokenNumbers& numbers : token_diagnostics()) {
      double sum = 0;
      for (const double x : numbers.of) sum += x;
      means.emplace_back(numbers.name, sum / std::max<double>(1, double(numbers.of.size())));
    }
    return means;
  }
  [[nodiscard]] std::vector<TokenNumbers> token_diagnostics() const override {
    std::vector<TokenNumbers> all;
    for (TokenNumbers& numbers : projected.token_diagnostics())
      if (numbers.name == "tension") all.push_back(std::move(numbers));
    all.push_back({"steps", taken_});
    return all;
  }

 private:
  // Separates the random numbers of halting from those of dropout and noise.
  static constexpr std::uint64_t kHaltingStream = std::uint64_t(1) << 33;

  [[nodiscard]] static AttentionOptions without_out(AttentionOptions options) {
    require(!options.names.out.empty(),
            "PonderAttention: names.out is empty, the layer needs an output projection");
    options.names.out.clear();
    return options;
  }
  [[nodiscard]] Index steps() const { return projected.stage.op.readout.max_steps; }

  // Begins a pass, which makes the numbers of an earlier one invalid: runs the op, whose last step goes to the last rows.
  template <class Run>
  void attend(Index tokens, Run&& run) {
    rows_.resize(steps() * tokens, projected.width_out());
    dlogits_.resize(0, 1);
    shares_.clear();
    cost_ = 0;
    run(rows_.view().row_range((steps() - 1) * tokens, tokens));
  }

  // Calls f(row of rows, index in a tensor (batch, heads, len, (N - 1) dim)) for the rows of each
  // head behind each step but the last.
  template <class F>
  void for_trail(Index batch, Index tokens, F&& f) const {
    const Index heads = projected.heads().heads, dim = projected.heads().dim_v,
                len = batch > 0 ? tokens / batch : 0, earlier = steps() - 1;
    for_each_row({batch, heads, len}, [&](Index b, Index h, Index i) {
      for (Index n = 0; n < earlier; ++n)
        f(n * tokens + b * len + i, h * dim, ((b * heads + h) * len + i) * earlier * dim + n * dim);
    });
  }
  // Collects z_n of all heads side by side, from the op's steps.
  void take_trail(Index batch, Index tokens) {
    const Index dim = projected.heads().dim_v;
    const Real* from = projected.stage.steps().data();
    for_trail(batch, tokens, [&](Index row, Index column, Index at) {
      std::copy_n(from + at, dim, rows_.view().row(row) + column);
    });
  }
  // Returns the gradients of z_n to the op.
  void give_trail(Index batch, Index tokens) {
    const Index dim = projected.heads().dim_v;
    std::vector<Real>& to = projected.stage.step_gradient;
    to.resize(projected.stage.steps().size());
    for_trail(batch, tokens, [&](Index row, Index column, Index at) {
      std::copy_n(drows_.view().row(row) + column, dim, to.data() + at);
    });
  }

  // (1)
  void find_logits(Context<Real>& c, Index tokens) {
    const Index halting = (steps() - 1) * tokens;
    logits_.resize(halting, 1);
    halt_.forward(c, rows_.view().row_range(0, halting), logits_.view());
  }
  // a_n, n from 0.
  [[nodiscard]] double logit(Index n, Index token, Index tokens) const {
    return double(*logits_.view().row(n * tokens + token));
  }
  // log(1 + e^x)
  [[nodiscard]] static double softplus(double x) {
    return std::max(x, 0.0) + std::log1p(std::exp(-std::abs(x)));
  }
  [[nodiscard]] static double sigmoid(double x) { return std::exp(-softplus(-x)); }
  // log g_n, n from 0.
  [[nodiscard]] double log_prior(Index n) const {
    return double(n) * std::log1p(-prior_) + (n + 1 < steps() ? std::log(prior_) : 0.0);
  }

  // (2)
  void share_out(Index tokens) {
    const Index count = steps();
    shares_.resize(std::size_t(count * tokens));
    log_shares_.resize(shares_.size());
    taken_.assign(std::size_t(tokens), 0.0);
    for (Index t = 0; t < tokens; ++t) {
      double log_left = 0;  // log prod_(m < n) (1 - lambda_m)
      for (Index n = 0; n < count; ++n) {
        const auto at = std::size_t(n * tokens + t);
        const bool last = n + 1 == count;
        log_shares_[at] = log_left - (last ? 0.0 : softplus(-logit(n, t, tokens)));
        const double p = std::exp(log_shares_[at]);
        shares_[at] = Real(p);
        taken_[std::size_t(t)] += double(n + 1) * p;
        if (!last) log_left -= softplus(logit(n, t, tokens));
      }
    }
  }

  // Writes y of the step that halts each token; the first token has position `first` of its sequence.
  void leave(Context<Real>& c, Index batch, Index first, const MatrixView<Real>& y) {
    const Index tokens = y.rows, count = steps();
    const TokenPlaces places(c, tokens, batch > 0 ? tokens / batch : 0);
    const CounterRandom random(CounterRandom(c.seed, kHaltingStream).bits(c.step));
    left_.resize(tokens, rows_.columns());
    taken_.resize(std::size_t(tokens));
    for (Index t = 0; t < tokens; ++t) {
      // Sequences have 2^32 random numbers each.
      const std::uint64_t place =
          (std::uint64_t(places.sequence(t)) << 32) + std::uint64_t(first + places.position(t));
      Index n = 0;
      while (n + 1 < count && random.uniform(place * std::uint64_t(count) + std::uint64_t(n)) >=
                                  sigmoid(logit(n, t, tokens)))
        ++n;
      taken_[std::size_t(t)] = double(n + 1);
      std::copy_n(rows_.view().row(n * tokens + t), rows_.columns(), left_.view().row(t));
    }
    out_.forward(c, left_.view(), y);
  }

  std::string out_name_;
  Linear<Real> halt_, out_;
  double weight_ = 0, prior_ = kPonderPrior, cost_ = 0;
  Matrix<Real> rows_, drows_;       // z_n: (N tokens, heads dim_v)
  Matrix<Real> logits_, dlogits_;   // a_n: ((N - 1) tokens, 1)
  Matrix<Real> left_;               // z_n of the step that halted, (tokens, heads dim_v)
  std::vector<Real> shares_;        // p_n, in training
  std::vector<double> log_shares_;  // log p_n
  std::vector<double> taken_;       // see token_diagnostics()
};

}  // namespace nn
}  // namespace HEED_ABI
}  // namespace heed
