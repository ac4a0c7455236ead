// SPDX-License-Identifier: Apache-2.0
#pragma once

// An attention layer around any op.
//
//   [q | k | v | e | m | n] = x W_in^T + b        one projection, or one each; e feeds the op's extra input, m and n the
//                                                 numbers of its query and key tokens (plug/token_inputs.hpp)
//   q, k  <- rope(norm(q)), rope(norm(k))  if the options say so
//   y     = op(q, k, v, e) W_out^T + b     or the op's rows themselves, without an output projection
//
// Low-rank keys and values: l = x W_l^T of few columns, k = l W_k^T, v = l W_v^T.
//
// The extra input is projected from x, or calculated from the raw q, k and v of the token:
//   from_query   e = q W_g^T
//   calculated   e = q W_q^T + k W_k^T + v W_v^T
//
// Head h owns columns [h dim, (h + 1) dim) of each part.

#include <heed/nn/attention_frame.hpp>
#include <heed/nn/attention_layer.hpp>

namespace heed {
inline namespace HEED_ABI {
namespace nn {

template <class Op>
class ProjectedAttention final : public AttentionLayer<typename Op::Scalar> {
 public:
  using Real = typename Op::Scalar;

  OpStage<Op> stage;
  // Extra dL/dkeys, (tokens, kv_heads dim_qk), of a loss on the keys that the op reads: backward() adds them before
  // norm and rotation are undone. Empty for none.
  Matrix<Real> key_gradient;

  ProjectedAttention(const AttentionOptions& options, Op op, Mask<Real> mask)
      : stage(std::move(op), std::move(mask)),
        frame_(options, columns_beside(stage.op, options.heads)) {}

  [[nodiscard]] Index width_out() const { return frame_.width_out(); }
  [[nodiscard]] const Saved<Real>& saved() const { return stage.saved(); }
  // The geometry of the op's calls; only heads, query_heads, kv_heads, dim_qk and dim_v are set.
  [[nodiscard]] const Geometry& heads() const { return frame_.heads(); }
  [[nodiscard]] typename AttentionFrame<Real>::InputWeights input_weights() const {
    return frame_.input_weights();
  }
  // The inputs that the op read in the last forward().
  [[nodiscard]] PackedInputs<Real> inputs(Index batch) const { return frame_.inputs(batch); }

  void forward(Context<Real>& c, Index batch, const MatrixView<const Real>& x,
               const MatrixView<Real>& y) override {
    forward(c, batch, x, x, y);
  }
  // Cross attention: keys and values are projected from `memory`, (tokens, width), whose sequences may have another
  // length than those of x.
  void forward(Context<Real>& c, Index batch, const MatrixView<const Real>& x,
               const MatrixView<const Real>& memory, const MatrixView<Real>& y) {
    frame_.project(c, batch, x, memory, 0);
    mix(c, batch, frame_.inputs(batch), x.rows, y);
  }

  void backward(Context<Real>& c, Index batch, const MatrixView<const Real>& x,
                const MatrixView<const Real>& dy, const MatrixView<Real>& dx) override {
    backward(c, batch, x, x, dy, dx, {});
  }
  // The backward pass of cross attention writes the gradient of `memory` to dmemory. For self attention pass an empty
  // dmemory: dx then holds the whole gradient.
  void backward(Context<Real>& c, Index batch, const MatrixView<const Real>& x,
                const MatrixView<const Real>& memory, const MatrixView<const Real>& dy,
                const MatrixView<Real>& dx, const MatrixView<Real>& dmemory) {
    const auto grads = frame_.begin_backward(c, batch, x, memory, dy);
    stage.backward(c, frame_.inputs(batch), frame_.mixed(batch), grads.mixed, grads.inputs);
    frame_.end_backward(c, batch, x, memory, key_gradient, dx, dmemory);
  }

  void visit(const Visitor<Real>& f) override {
    frame_.visit_in(f);
    stage.visit(f);
    frame_.visit_out(f);
  }

  void keep_in_range() override { stage.keep_in_range(); }

  // False if a row's output depends on all rows of a batch, for packed sequences end each by itself; or if keys are
  // chosen, which is done for one sequence at a time.
  [[nodiscard]] bool takes_packed() const override {
    return !stage.op.readout.needs_rehearsal() && !stage.choose;
  }

  [[nodiscard]] Index spread_step(const Context<Real>& c, Index batch, Index len) const override {
    Geometry g = frame_.heads();
    g.batch = batch;
    g.len_q = g.len_kv = len;
    return stage.spread_step(c, g);
  }

  // False if a token sees later ones, or if the op reads numbers of key tokens, which a cache does not keep.
  [[nodiscard]] bool can_step() const override { return stage.is_causal() && kKeyInputs == 0; }
  [[nodiscard]] KvCache<Real> new_cache(Index batch) const override {
    return frame_.new_cache(batch);
  }
  void step(Context<Real>& c, Index batch, const MatrixView<const Real>& x,
            const MatrixView<Real>& y, KvCache<Real>& cache) override {
    frame_.require_step(c, can_step());
    const Index position = cache.len();
    frame_.project(c, batch, x, x, position);
    const Inputs<Real> in = frame_.append_to(cache, batch);
    // The op's parameters may have changed since the last step.
    if (!heed::detail::key_features_fit(cache.key_features(), stage.op, frame_.heads(), in.key))
      cache.forget_features();
    try {
      mix(c, batch, in, x.rows, y);
    } catch (...) {
      cache.truncate(position);
      throw;
    }
  }

  void restrict_to(const Mask<Real>& also) override { stage.mask = stage.mask & also; }
  void set_dropout(double rate, std::uint64_t stream) override { stage.set_dropout(rate, stream); }
  void set_noise(double sigma, std::uint64_t stream) override { frame_.set_noise(sigma, stream); }
  [[nodiscard]] bool counts_steps() const override { return stage.without_time() == nullptr; }
  void set_ponder(double weight) override { stage.set_ponder(weight); }
  [[nodiscard]] double ponder_cost() const override { return stage.ponder_cost(); }

  [[nodiscard]] std::vector<std::pair<std::string, double>> diagnostics() const override {
    return stage.diagnostics();
  }
  [[nodiscard]] std::vector<TokenNumbers> token_diagnostics() const override {
    return stage.token_diagnostics();
  }

 private:
  static constexpr Index kQueryInputs = InputColumns<Op>::query, kKeyInputs = InputColumns<Op>::key;

  [[nodiscard]] static ColumnsBeside columns_beside(const Op& op, const Geometry& g) {
    op.validate(g, "ProjectedAttention");
    return {op.extra_dim(g), kQueryInputs, kKeyInputs};
  }

  void mix(Context<Real>& c, Index batch, const PackedInputs<Real>& in, Index tokens,
           const MatrixView<Real>& y) {
    stage.forward(c, in, frame_.rows_to_mix(batch, tokens));
    frame_.finish(c, y);
  }

  AttentionFrame<Real> frame_;
};

}  // namespace nn
}  // namespace HEED_ABI
}  // namespace heed
