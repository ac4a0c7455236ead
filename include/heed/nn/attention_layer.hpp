// SPDX-License-Identifier: Apache-2.0
#pragma once

// What a model asks of an attention layer, whatever its variant, and the op inside of one.

#include <heed/engine/doors.hpp>
#include <heed/kv_cache.hpp>
#include <heed/nn/context.hpp>
#include <heed/nn/weight.hpp>

#include <algorithm>
#include <memory>
#include <string>
#include <utility>
#include <vector>

namespace heed {
inline namespace HEED_ABI {
namespace nn {

// Called with the dotted name of what a layer keeps beside its weights: "blocks.0.attn.memory.counts".
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

  // y (tokens, width_out) of x (tokens, width).
  virtual void forward(Context<Real>& c, Index batch, const MatrixView<const Real>& x,
                       const MatrixView<Real>& y) = 0;
  // Adds to the weights' gradients, overwrites dx. `x` is that of forward().
  virtual void backward(Context<Real>& c, Index batch, const MatrixView<const Real>& x,
                        const MatrixView<const Real>& dy, const MatrixView<Real>& dx) = 0;
  virtual void visit(const Visitor<Real>& f) = 0;
  // Brings weights that a step of an optimiser has carried out of their range back inside; AdamW calls it.
  virtual void keep_in_range() {}
  // What training changes beside the weights; a resumed run needs it as well.
  virtual void visit_state(const StateVisitor<Real>&) {}

  // May tokens be taken one after the other, with a cache of what the earlier ones left?
  [[nodiscard]] virtual bool can_step() const = 0;
  [[nodiscard]] virtual KvCache<Real> new_cache(Index batch) const = 0;
  // forward() for the tokens that follow those in the cache, which then holds them too.
  virtual void step(Context<Real>& c, Index batch, const MatrixView<const Real>& x,
                    const MatrixView<Real>& y, KvCache<Real>& cache) = 0;

  // In training, weights are dropped at `rate` in [0, 1), others for each stream and step.
  virtual void set_dropout(double rate, std::uint64_t stream) = 0;

  // Numbers that the last forward() reports, by name: means over its tokens.
  [[nodiscard]] virtual std::vector<std::pair<std::string, double>> diagnostics() const {
    return {};
  }
};

// An op with its mask, the gradient of its parameters, and what its forward pass leaves for backward.
template <class Op>
class OpStage {
 public:
  using Real = typename Op::Scalar;

  Op op;
  Mask<Real> mask;
  bool learns = true;  // are the op's parameters weights of the model?

  OpStage(Op with, Mask<Real> under)
      : op(std::move(with)), mask(std::move(under)), grad_(zeros_like(op)) {}

  // The first query stands `position` tokens behind the first key.
  void forward(const Context<Real>& c, const Inputs<Real>& in, const TensorView<Real>& out,
               Index position = 0) {
    heed::forward(op, in, position > 0 ? mask_from(position) : mask, out, &saved_, options(c));
  }
  // Adds to the gradients of the op's parameters.
  void backward(const Context<Real>& c, const Inputs<Real>& in, const TensorView<const Real>& out,
                const TensorView<const Real>& dout, const Gradients<Real>& grads) {
    Op own = op;
    heed::backward(op, in, mask, saved_, out, dout, grads, &own, options(c));
    for_pairs(grad_, own, [](const char*, Param<Real>& sum, Param<Real>& grad) {
      for (Index i = 0; i < sum.size(); ++i) sum[i] += grad[i];
    });
  }
  void visit(const Visitor<Real>& f) {
    if (learns)
      for_pairs(op, grad_, [&](const char* name, Param<Real>& value, Param<Real>& grad) {
        f(name, value, grad);
      });
  }
  // Learnt parameters only: those that are constants are the caller's, and forward() refuses them out of range.
  void keep_in_range() {
    if (learns) op.keep_in_range();
  }
  // Does no row depend on a later one?
  [[nodiscard]] bool is_causal() const {
    if (op.readout.needs_rehearsal()) return false;
    return std::any_of(mask.bands.begin(), mask.bands.end(), [](const Band& band) {
      return band.right >= 0 && band.right + band.offset <= 0;
    });
  }
  [[nodiscard]] const Saved<Real>& saved() const { return saved_; }
  [[nodiscard]] Options options(const Context<Real>& c) const {
    Options options;
    options.threads = c.threads;
    if (c.training)
      options.dropout = {dropout_rate_, CounterRandom(c.seed, dropout_stream_).bits(c.step)};
    return options;
  }
  void set_dropout(double rate, std::uint64_t stream) {
    require(rate >= 0 && rate < 1, "OpStage::set_dropout: rate is ", rate,
            ", it must be in [0, 1)");
    dropout_rate_ = rate;
    dropout_stream_ = stream;
  }

 private:
  [[nodiscard]] Mask<Real> mask_from(Index position) const {
    Mask<Real> moved = mask;
    for (Band& band : moved.bands)
      if (band.align == Align::top_left) band.offset += position;
    moved.slope_align = Align::bottom_right;
    return moved;
  }
  // f(name, parameter of a, the same of b) for parameters in use.
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
  Saved<Real> saved_;
  double dropout_rate_ = 0;
  std::uint64_t dropout_stream_ = 0;
};

}  // namespace nn
}  // namespace HEED_ABI
}  // namespace heed
