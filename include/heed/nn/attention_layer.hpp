// SPDX-License-Identifier: Apache-2.0
#pragma once

// AttentionLayer, the interface that a model uses whatever the variant, and OpStage, the op inside a layer.

#include <heed/engine/key_choice.hpp>
#include <heed/engine/packed_doors.hpp>
#include <heed/kv_cache.hpp>
#include <heed/nn/context.hpp>
#include <heed/nn/weight.hpp>

#include <algorithm>
#include <cmath>
#include <memory>
#include <span>
#include <string>
#include <utility>
#include <vector>

namespace heed {
inline namespace HEED_ABI {
namespace nn {

// A number that an op reports, one per token, [token]: the mean over heads.
struct TokenNumbers {
  std::string name;
  std::vector<double> of;
};

// Called for each tensor that a layer keeps beside its weights, with its dotted name: "blocks.0.attn.memory.counts".
template <class Real>
using StateVisitor = std::function<void(const std::string&, Param<Real>&)>;

// Visits the state of a part, with `prefix` and a dot before its names.
template <class Real, class Part>
void visit_state_of(const std::string& prefix, Part& part, const StateVisitor<Real>& f) {
  part.visit_state(
      [&](const std::string& name, Param<Real>& state) { f(prefix + "." + name, state); });
}

// Rows are tokens, `batch` sequences of equal length one below the other. A layer holds the activations of
// its last forward(), which backward() reads.
template <class Real>
class AttentionLayer {
 public:
  virtual ~AttentionLayer() = default;

  // Computes y (tokens, width_out) from x (tokens, width).
  virtual void forward(Context<Real>& c, Index batch, const MatrixView<const Real>& x,
                       const MatrixView<Real>& y) = 0;
  // Adds to the weights' gradients, overwrites dx. `x` is that of forward().
  virtual void backward(Context<Real>& c, Index batch, const MatrixView<const Real>& x,
                        const MatrixView<const Real>& dy, const MatrixView<Real>& dx) = 0;
  virtual void visit(const Visitor<Real>& f) = 0;
  // Brings weights that a step of an optimiser has carried out of their range back inside; AdamW calls it.
  virtual void keep_in_range() {}
  // Visits the tensors that training changes beside the weights. A resumed run needs them as well.
  virtual void visit_state(const StateVisitor<Real>&) {}

  // True if forward() and backward() take packed sequences (Context::packed), which see nothing of each other.
  [[nodiscard]] virtual bool takes_packed() const { return false; }

  // `batch` sequences of `len` tokens may be spread over ranks (Context::spread) in shards that are cut at multiples of this
  // number; 0 where forward() and backward() take none.
  [[nodiscard]] virtual Index spread_step(const Context<Real>&, Index /*batch*/,
                                          Index /*len*/) const {
    return 0;
  }

  // True if step() can take tokens one after the other, with a cache of the keys and values of the earlier ones.
  [[nodiscard]] virtual bool can_step() const = 0;
  [[nodiscard]] virtual KvCache<Real> new_cache(Index batch) const = 0;
  // forward() for the tokens that follow those in the cache; the cache then holds them too.
  virtual void step(Context<Real>& c, Index batch, const MatrixView<const Real>& x,
                    const MatrixView<Real>& y, KvCache<Real>& cache) = 0;

  // Restricts queries to keys that both the layer's own mask and `also` show.
  virtual void restrict_to(const Mask<Real>& also) = 0;

  // In training, attention weights are dropped at `rate` in [0, 1). The dropped weights differ by stream and by step.
  virtual void set_dropout(double rate, std::uint64_t stream) = 0;

  // Outside of training, the queries and keys that attention reads get noise of `sigma` >= 0 times their root mean square
  // (nn/noise.hpp), behind projection, norm and positions; 0 for none. The noise differs by stream and by step.
  virtual void set_noise(double sigma, std::uint64_t stream) = 0;

  // Switches the learning of a memory that training fills beside the weights; it is on at first. A memory that does not
  // learn does not change, and pulls no keys. A layer without a memory ignores the call.
  virtual void set_memory_learning(bool) {}

  // True if the op counts the steps that each token takes, so that they can have a cost.
  [[nodiscard]] virtual bool counts_steps() const { return false; }
  // Adds `weight` times the mean, over heads and tokens, of the steps that the op counts to the loss whose gradient
  // backward() computes. A layer whose op gives no steps throws for a weight other than 0.
  virtual void set_ponder(double weight) {
    require(weight == 0, "AttentionLayer::set_ponder: the weight is ", weight,
            ", the layer counts no steps; it must be 0");
  }
  // The term that the last forward() adds to the loss for its steps.
  [[nodiscard]] virtual double ponder_cost() const { return 0; }

  // The number of steps after which the layer may leave a token, by chance; 1 for most layers. A layer with more learns the
  // probabilities p_n from the loss l_n of each step (nn/ponder_attention.hpp). In training y of forward() and dy of
  // backward() then have (steps, tokens) rows, one step below the other, and so have all rows from there to the loss.
  [[nodiscard]] virtual Index scored_steps() const { return 1; }
  // p_n of each of these rows, from the last forward() in training.
  [[nodiscard]] virtual std::span<const Real> step_shares() const { return {}; }
  // Takes the loss l_n of each row, and as the second list the share of each token in the loss. It
  // must be called between forward() and backward(), whose dy holds no gradient through p_n.
  virtual void take_step_losses(std::span<const Real>, std::span<const Real>) {}
  // Sets the prior of p, a number in (0, 1): see nn/ponder_attention.hpp. Layers without a prior throw.
  virtual void set_ponder_prior(double prior) {
    fail("AttentionLayer::set_ponder_prior: the prior is ", prior,
         ", the layer has none; its steps have no probabilities that a prior could draw near");
  }

  // Names and means over tokens of the numbers that the last forward() reported, except indices, which have no mean.
  [[nodiscard]] virtual std::vector<std::pair<std::string, double>> diagnostics() const {
    return {};
  }
  // The same per token, in the order of the rows of x; with "steps", the time that a token takes,
  // if the layer has it. An op gives no reports of tokens that are spread over ranks.
  [[nodiscard]] virtual std::vector<TokenNumbers> token_diagnostics() const { return {}; }
};

// What an op's stage in a layer keeps and does that knows no op; compiled once for all ops.
template <class Real>
class StageOfAnyOp {
 public:
  Mask<Real> mask;
  KeyChoice<Real> choose;  // of keys that the mask shows; none for most layers
  bool learns = true;      // true if the op's parameters are weights of the model
  // dL/dsteps of a loss on what the op's steps come to, of the shape of steps(): backward() reads it, in place of that of
  // set_ponder(). Empty for none.
  std::vector<Real> step_gradient;

  // The saved numbers of the last forward(); empty if its tokens were spread.
  [[nodiscard]] const Saved<Real>& saved() const { return saved_; }
  // The mask of the last forward(), with the keys that were chosen.
  [[nodiscard]] const Mask<Real>& mask_read() const { return mask_read_; }
  // The steps of the last forward(), (batch, heads, len, step_columns of the readout); empty if the op gives none.
  [[nodiscard]] const std::vector<Real>& steps() const { return steps_; }

  [[nodiscard]] double ponder_cost() const {
    double sum = 0;
    for (const Real steps : steps_) sum += double(steps);
    return ponder_ > 0 ? ponder_ * sum / std::max<double>(1, double(steps_.size())) : 0;
  }
  // The options of a call on sequences of `len` tokens.
  [[nodiscard]] Options options(const Context<Real>& c, Index len) const {
    if (c.spread != nullptr) len = c.spread->len();
    Options options;
    options.threads = c.threads;
    options.precision = c.precision;
    if (c.training)
      options.dropout = {dropout_rate_, CounterRandom(c.seed, dropout_stream_).bits(c.step),
                         c.part.first / std::max<Index>(1, len)};
    return options;
  }
  void set_dropout(double rate, std::uint64_t stream) {
    require(rate >= 0 && rate < 1, "OpStage::set_dropout: rate is ", rate,
            ", it must be in [0, 1)");
    dropout_rate_ = rate;
    dropout_stream_ = stream;
  }

 protected:
  explicit StageOfAnyOp(Mask<Real> under) : mask(std::move(under)) {}

  // True if the mask shows no query a later key.
  [[nodiscard]] bool mask_is_causal() const {
    return std::any_of(mask.bands.begin(), mask.bands.end(), [](const Band& band) {
      return band.right >= 0 && band.right + band.offset <= 0;
    });
  }
  // Where the op's steps go that a forward pass counts, in rows of `columns`.
  [[nodiscard]] TensorView<Real> steps_to_count(const Shape& out, Index columns) {
    const Shape shape = steps_shape(out, columns);
    steps_.resize(std::size_t(rows_of(out) * shape.dim));
    return {steps_.data(), shape};
  }
  // The gradients that backward() of the op starts from.
  [[nodiscard]] OutputGradients<Real> output_gradients(const Context<Real>& c, const Shape& out,
                                                       const TensorView<const Real>& dout,
                                                       Index columns) {
    OutputGradients<Real> output(dout);
    if (!step_gradient.empty()) {
      output.steps = {step_gradient.data(), steps_shape(out, columns)};
    } else if (ponder_ > 0) {
      // dL/dsteps of L = ponder mean(steps)
      const Index rows = rows_of(out);
      dsteps_.assign(std::size_t(rows), Real(ponder_ / double(c.rows_of_batch(rows))));
      output.steps = {dsteps_.data(), steps_shape(out, columns)};
    }
    return output;
  }
  // See AttentionLayer::diagnostics() and token_diagnostics(). has_mean(report) is false for an index.
  using HasMean = bool (*)(std::size_t);
  [[nodiscard]] std::vector<std::pair<std::string, double>> means(HasMean has_mean) const {
    std::vector<std::pair<std::string, double>> means;
    for (std::size_t d = 0; d < saved_.diagnostic_names.size(); ++d) {
      if (!has_mean(d)) continue;
      double sum = 0;
      for (const Real x : saved_.diagnostics[d]) sum += double(x);
      means.emplace_back(saved_.diagnostic_names[d],
                         sum / std::max<double>(1, double(saved_.diagnostics[d].size())));
    }
    return means;
  }
  [[nodiscard]] std::vector<TokenNumbers> numbers_of_tokens(HasMean has_mean,
                                                            bool steps_are_time) const {
    std::vector<TokenNumbers> all;
    if (!saved_of_rank_.pieces.empty()) return all;
    const Geometry& g = saved_.stamp.geometry;
    const auto add = [&](const std::string& name, const std::vector<Real>& rows) {
      TokenNumbers numbers{name, std::vector<double>(std::size_t(g.batch * g.len_q))};
      for_each_row(g.out_shape(), [&](Index b, Index h, Index t) {
        numbers.of[std::size_t(b * g.len_q + t)] +=
            double(rows[std::size_t(g.row_index(b, h, t))]) / double(g.heads);
      });
      all.push_back(std::move(numbers));
    };
    for (std::size_t d = 0; d < saved_.diagnostics.size(); ++d)
      if (has_mean(d)) add(saved_.diagnostic_names[d], saved_.diagnostics[d]);
    if (!steps_.empty() && steps_are_time) add("steps", steps_);
    return all;
  }
  void set_ponder(double weight, const char* why) {
    require(std::isfinite(weight) && weight >= 0, "OpStage::set_ponder: the weight is ", weight,
            ", it must be finite and not negative");
    require(weight == 0 || why == nullptr, "OpStage::set_ponder: the weight is ", weight, ", ",
            why ? why : "");
    ponder_ = weight;
  }
  // The mask of queries that stand `position` tokens behind the first key.
  [[nodiscard]] Mask<Real> mask_from(Index position) const {
    Mask<Real> moved = mask;
    if (position == 0) return moved;
    for (Band& band : moved.bands)
      if (band.align == Align::top_left) band.offset += position;
    for (auto& rule : moved.rules) rule = rule->moved(position);
    if (moved.slope_align == Align::top_left) moved.slope_offset += position;
    return moved;
  }

  Saved<Real> saved_;
  Mask<Real> mask_read_;
  SavedPieces<Real> saved_of_rank_;  // where tokens are spread
  std::vector<Real> steps_;

 private:
  [[nodiscard]] static Index rows_of(const Shape& out) { return out.batch * out.heads * out.len; }
  [[nodiscard]] static Shape steps_shape(const Shape& out, Index columns) {
    return {out.batch, out.heads, out.len, columns};
  }

  std::vector<Real> dsteps_;
  double ponder_ = 0;
  double dropout_rate_ = 0;
  std::uint64_t dropout_stream_ = 0;
};

// An op with its mask, the gradient of its parameters, and the numbers that its forward pass keeps for backward.
template <class Op>
class OpStage : public StageOfAnyOp<typename Op::Scalar> {
  using Base = StageOfAnyOp<typename Op::Scalar>;
  using Base::mask_read_, Base::saved_, Base::saved_of_rank_, Base::steps_;

 public:
  using Real = typename Op::Scalar;

  Op op;

  OpStage(Op with, Mask<Real> under)
      : Base(std::move(under)), op(std::move(with)), grad_(zeros_like(op)) {}

  // Runs the op; the mask moves with the queries of a cache, which stand in.first_query tokens behind the first key.
  void forward(const Context<Real>& c, const PackedInputs<Real>& in, const TensorView<Real>& out) {
    Outputs<Real> to(out);
    steps_.clear();
    if constexpr (Op::ReadoutType::counts_steps)
      if (op.readout.without_steps() == nullptr)
        to.steps = this->steps_to_count(out.shape(), step_columns(in, out.shape()));
    const Options of_call = this->options(c, in.query.shape().len);
    PackedInputs<Real> moved = in;
    // The moved mask has queries behind the first key where they are, also where its offset becomes 0.
    if (in.first_query != 0) moved.queries_at_end = false;
    mask_read_ = with_chosen(this->choose, moved, this->mask_from(in.first_query), of_call);
    saved_of_rank_.pieces.clear();
    if (c.spread != nullptr) {
      saved_ = {};
      return heed::detail::share_op(op, nullptr, [&](const SharedOp<Real>& shared, auto*) {
        c.spread->forward({shared, in, mask_read_, of_call}, to, saved_of_rank_);
      });
    }
    heed::forward(op, moved, mask_read_, to, &saved_, of_call);
  }
  // Adds to the gradients of the op's parameters. Where tokens are spread, the first rank adds the gradients of all ranks.
  void backward(const Context<Real>& c, const PackedInputs<Real>& in,
                const TensorView<const Real>& out, const TensorView<const Real>& dout,
                const Gradients<Real>& grads) {
    Op own = op;
    const OutputGradients<Real> output =
        this->output_gradients(c, out.shape(), dout, step_columns(in, out.shape()));
    const Options of_call = this->options(c, in.query.shape().len);
    if (c.spread != nullptr) {
      heed::detail::share_op(op, &own,
                             [&](const SharedOp<Real>& shared, OpGradient<Real>* gradient) {
                               c.spread->backward({shared, in, mask_read_, of_call}, saved_of_rank_,
                                                  out, output, grads, gradient);
                             });
      // Each rank has the gradient of all ranks; only one of them adds it.
      if (c.spread->rank() != 0) return;
    } else {
      heed::backward(op, in, mask_read_, saved_, out, output, grads, &own, of_call);
    }
    for_pairs(grad_, own, [](const char*, Param<Real>& sum, Param<Real>& grad) {
      for (Index i = 0; i < sum.size(); ++i) sum[i] += grad[i];
    });
  }
  void visit(const Visitor<Real>& f) {
    if (this->learns)
      for_pairs(op, grad_, [&](const char* name, Param<Real>& value, Param<Real>& grad) {
        f(name, value, grad);
      });
  }
  // Brings learnt parameters back into their ranges. Constants belong to the caller: forward() refuses those that are
  // out of range.
  void keep_in_range() {
    if (this->learns) op.keep_in_range();
  }
  // True if no row depends on a later one.
  [[nodiscard]] bool is_causal() const {
    return !op.readout.needs_rehearsal() && this->mask_is_causal();
  }
  // False for a report that is an index.
  [[nodiscard]] static bool has_mean(std::size_t report) {
    using Normaliser = typename Op::NormaliserType;
    using Readout = typename Op::ReadoutType;
    const int own = int(report) - Normaliser::diagnostics;
    return own < 0 ? !Normaliser::diagnostic_is_index(int(report))
                   : !Readout::diagnostic_is_index(own);
  }

  [[nodiscard]] std::vector<std::pair<std::string, double>> diagnostics() const {
    return this->means(&has_mean);
  }
  // See AttentionLayer::token_diagnostics().
  [[nodiscard]] std::vector<TokenNumbers> token_diagnostics() const {
    return this->numbers_of_tokens(&has_mean, op.readout.steps_are_time());
  }

  // See AttentionLayer::set_ponder().
  void set_ponder(double weight) { Base::set_ponder(weight, without_time()); }
  // The reason why the op does not give the time that rows take, as the end of a sentence; null if it does.
  [[nodiscard]] const char* without_time() const {
    const char* why = op.readout.without_steps();
    return why != nullptr || op.readout.steps_are_time()
               ? why
               : "the op's steps are what each of them leaves, not the time that they take";
  }
  // See AttentionLayer::spread_step(); the geometry is that of the op's call on whole sequences.
  [[nodiscard]] Index spread_step(const Context<Real>& c, const Geometry& g) const {
    return this->choose ? 0 : share_step(op, g, this->options(c, g.len_q));
  }

 private:
  [[nodiscard]] Index step_columns(const Inputs<Real>& in, const Shape& out) const {
    Geometry g;
    g.dim_qk = in.query.shape().dim;
    g.dim_v = out.dim;
    return op.readout.step_columns(g);
  }
  // Calls f(name, parameter of a, same parameter of b) for each parameter in use.
  template <class F>
  static void for_pairs(Op& a, Op& b, F&& f) {
    std::vector<Param<Real>*> others;
    b.visit([&](const char*, Param<Real>& param) { others.push_back(&param); });
    std::size_t next = 0;
    a.visit([&](const char* name, Param<Real>& param) {
      Param<Real>& other = *others[next++];
      if (param.given()) f(name, param, other);
    });
  }

  Op grad_;
};

}  // namespace nn
}  // namespace HEED_ABI
}  // namespace heed
