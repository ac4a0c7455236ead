// SPDX-License-Identifier: Apache-2.0
#pragma once

// AttentionLayer, the interface that a model uses whatever the variant, and OpStage, the op inside of a layer.

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

  // True if step() can take tokens one after the other, with a cache of the keys and values of the earlier ones.
  [[nodiscard]] virtual bool can_step() const = 0;
  [[nodiscard]] virtual KvCache<Real> new_cache(Index batch) const = 0;
  // forward() for the tokens that follow those in the cache, which then holds them too.
  virtual void step(Context<Real>& c, Index batch, const MatrixView<const Real>& x,
                    const MatrixView<Real>& y, KvCache<Real>& cache) = 0;

  // From now on queries see only those keys that the layer's own mask and `also` show.
  virtual void restrict_to(const Mask<Real>& also) = 0;

  // In training, attention weights are dropped at `rate` in [0, 1). Each stream and each step drops others.
  virtual void set_dropout(double rate, std::uint64_t stream) = 0;

  // From now on, but not in training, the queries and keys that attention reads get noise of `sigma` >= 0 times their root
  // mean square (nn/noise.hpp), behind projection, norm and positions; 0 for none. Each stream and each step adds other
  // noise.
  virtual void set_noise(double sigma, std::uint64_t stream) = 0;

  // From now on a memory that training fills beside the weights learns, as it does at first, or stays as it is and pulls
  // no keys. Nothing happens to a layer without one.
  virtual void set_memory_learning(bool) {}

  // Names and means over tokens of the numbers that the last forward() reported.
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
  bool learns = true;  // true if the op's parameters are weights of the model

  OpStage(Op with, Mask<Real> under)
      : op(std::move(with)), mask(std::move(under)), grad_(zeros_like(op)) {}

  // Runs the op; the mask moves with the queries of a cache, which stand in.first_query tokens behind the first key.
  void forward(const Context<Real>& c, const Inputs<Real>& in, const TensorView<Real>& out) {
    heed::forward(op, in, in.first_query > 0 ? mask_from(in.first_query) : mask, out, &saved_,
                  options(c));
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
  // Brings learnt parameters back into their ranges. Constants belong to the caller: forward() refuses those that are
  // out of range.
  void keep_in_range() {
    if (learns) op.keep_in_range();
  }
  // True if no row depends on a later one.
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
    options.precision = c.precision;
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
    for (auto& rule : moved.rules) rule = rule->moved(position);
    moved.slope_align = Align::bottom_right;
    return moved;
  }
  // Calls f(name, parameter of a, same parameter of b) for each parameter that is in use.
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
