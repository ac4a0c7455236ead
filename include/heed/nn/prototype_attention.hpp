// SPDX-License-Identifier: Apache-2.0
#pragma once

// Prototype attention (ops/prototype.hpp) that learns its prototypes online: each key head has an ART
// memory (ops/prototype/art_memory.hpp, cosine matching), which learns the keys that the op reads.
//
//   W = memory                                           prototypes of each head, zeros behind them
//   y = layer(x; W)                                      nn/projected_attention.hpp
//   memory <- keys, in (batch, token) order              training only
//
// A forward pass reads the prototypes as they were before it; only the next pass sees what its keys taught. backward() uses
// the W of its forward(). W is state, not a weight: no gradient step and no decay change it. Strength and pull are weights.
//
// Resonance correction is a second loss in training, beside the model's own; the model reports only
// its own. c(k) is the prototype that k resonates with before anything is learned. W and c(k) count
// as constants. Keys that resonate with no prototype add 0.
//
//   loss += lambda / (2 tokens) sum over heads and their keys of |k - W_c(k)|^2
//   dk   += lambda / tokens (k - W_c(k))                 before rotation and norm are undone
//
// Symbols  correction (lambda).
// Shapes   memory.prototypes (kv_heads, capacity, dim_qk), memory.counts (kv_heads); query heads that
//          share keys share their prototypes.
// Bounds   learning takes the minimum of prototype and key, so that no value of a prototype ever rises. Where keys have
//          both signs, values sink, faster for larger eta, until keys no longer resonate with the prototype.
// Errors   NotFinite for a key to be learned that is not finite, std::invalid_argument for a restored count that is
//          not a count; nothing is learned then.
// Source   GPT2-ART note, sections 2.1 to 2.3. The note's dh = lambda (W_j* - h) is a step down the
//          slope of the loss above.
// Cost     capacity dim_qk multiply-adds per key and search: one to learn, one more to correct.

#include <heed/nn/not_finite.hpp>
#include <heed/nn/projected_attention.hpp>
#include <heed/ops/prototype.hpp>

#include <span>

namespace heed {
inline namespace HEED_ABI {
namespace nn {

template <class Real>
struct KeyMemoryOptions {
  Index capacity = 16;              // prototypes per head
  Real vigilance = Real(0.5);       // rho in [-1, 1]
  Real learning_rate = Real(0.01);  // eta in [0, 1]
  Real correction = Real(0);        // lambda >= 0
};

template <class Real>
class PrototypeAttention final : public AttentionLayer<Real> {
 public:
  ProjectedAttention<Prototype<Real>> projected;

  PrototypeAttention(const AttentionOptions& options, Mask<Real> mask,
                     const KeyMemoryOptions<Real>& memory = {})
      : projected(options, op_of(options.heads, memory), std::move(mask)),
        options_(memory),
        prototypes_(
            std::vector<Index>{options.heads.kv_heads, memory.capacity, options.heads.dim_qk}),
        counts_(std::vector<Index>{options.heads.kv_heads}) {
    require(memory.correction >= 0 && std::isfinite(memory.correction),
            "PrototypeAttention: correction is ", memory.correction,
            ", it must be finite and at least 0");
  }

  [[nodiscard]] const KeyMemoryOptions<Real>& options() const { return options_; }
  // The memory of each key head, with everything learned so far.
  [[nodiscard]] std::vector<ArtMemory<Real>> memories() const {
    std::vector<ArtMemory<Real>> all;
    for (Index h = 0; h < kv_heads(); ++h)
      all.push_back(memory_of(prototypes_.data() + h * head_size(), count_of(h)));
    return all;
  }

  void forward(Context<Real>& c, Index batch, const MatrixView<const Real>& x,
               const MatrixView<Real>& y) override {
    take_memories();
    projected.forward(c, batch, x, y);
    batch_ = batch;
    projected.key_gradient.resize(0, 0);
    if (c.training && learns_) learn(c);
  }
  void backward(Context<Real>& c, Index batch, const MatrixView<const Real>& x,
                const MatrixView<const Real>& dy, const MatrixView<Real>& dx) override {
    projected.backward(c, batch, x, dy, dx);
  }
  void visit(const Visitor<Real>& f) override {
    projected.visit([&](const std::string& name, Param<Real>& value, Param<Real>& grad) {
      if (&value != &score().W) f(name, value, grad);
    });
  }
  void keep_in_range() override { projected.keep_in_range(); }
  void visit_state(const StateVisitor<Real>& f) override {
    f("memory.prototypes", prototypes_);
    f("memory.counts", counts_);
  }

  [[nodiscard]] bool takes_packed() const override { return projected.takes_packed(); }
  [[nodiscard]] bool can_step() const override { return projected.can_step(); }
  [[nodiscard]] KvCache<Real> new_cache(Index batch) const override {
    return projected.new_cache(batch);
  }
  // Decodes without learning anything, not even in training.
  void step(Context<Real>& c, Index batch, const MatrixView<const Real>& x,
            const MatrixView<Real>& y, KvCache<Real>& cache) override {
    take_memories();
    projected.step(c, batch, x, y, cache);
    batch_ = batch;
  }

  void restrict_to(const Mask<Real>& also) override { projected.restrict_to(also); }
  void set_dropout(double rate, std::uint64_t stream) override {
    projected.set_dropout(rate, stream);
  }
  void set_memory_learning(bool learns) override { learns_ = learns; }
  void set_noise(double sigma, std::uint64_t stream) override {
    projected.set_noise(sigma, stream);
  }

  // Measures of the last forward()'s keys against the memories as they were before it learned: prototypes per head,
  // fraction of keys that resonate, mean match with the best prototype, and the loss of the correction.
  [[nodiscard]] std::vector<std::pair<std::string, double>> diagnostics() const override {
    return diagnostics_of([](Index, Index) { return true; });
  }
  // The same for the keys of tokens for which chosen(sequence, token) is true; empty if there are none.
  template <class Chosen>
  [[nodiscard]] std::vector<std::pair<std::string, double>> diagnostics_of(
      const Chosen& chosen) const {
    if (batch_ == 0) return {};
    const TensorView<const Real> keys = projected.inputs(batch_).key.plain();
    double prototypes = 0, resonating = 0, match = 0, squares = 0, tokens = 0;
    for_each_key(keys, [&](Index b, Index t) { tokens += chosen(b, t) ? 1 : 0; });
    if (tokens == 0 && keys.shape().batch * keys.shape().len > 0) return {};
    tokens = std::max(1.0, tokens);
    for (Index h = 0; h < kv_heads(); ++h) {
      const ArtMemory<Real> memory = memory_read(h);
      prototypes += double(memory.count());
      for_each_key(keys, [&](Index b, Index t) {
        const Real* key = keys.row(b, h, t);
        if (!chosen(b, t) || !is_finite(key)) return;
        const ArtFound<Real> found = memory.find({key, std::size_t(dim())});
        match += double(found.match);
        if (found.index < 0) return;
        ++resonating;
        const Real* prototype = memory.prototypes().data() + found.index * dim();
        for (Index i = 0; i < dim(); ++i) {
          const double apart = double(key[i]) - double(prototype[i]);
          squares += apart * apart;
        }
      });
    }
    const double heads = double(kv_heads());
    return {{"prototypes", prototypes / heads},
            {"resonating_keys", resonating / (tokens * heads)},
            {"key_match", match / (tokens * heads)},
            {"correction_loss", double(options_.correction) * squares / (2 * tokens)}};
  }

 private:
  [[nodiscard]] static Prototype<Real> op_of(const Geometry& g,
                                             const KeyMemoryOptions<Real>& memory) {
    (void)heed::detail::checked_art_options(art_options(g.dim_qk, memory));
    Prototype<Real> op = make_prototype<Real>(g, memory.capacity);
    op.score.counts.assign(std::size_t(g.heads), 0);
    return op;
  }
  [[nodiscard]] static ArtOptions<Real> art_options(Index dim,
                                                    const KeyMemoryOptions<Real>& memory) {
    ArtOptions<Real> options;
    options.capacity = memory.capacity;
    options.dim = dim;
    options.vigilance = memory.vigilance;
    options.learning_rate = memory.learning_rate;
    return options;
  }

  [[nodiscard]] Index kv_heads() const { return projected.heads().kv_heads; }
  [[nodiscard]] Index dim() const { return projected.heads().dim_qk; }
  [[nodiscard]] Index head_size() const { return options_.capacity * dim(); }
  [[nodiscard]] PrototypeScore<Real>& score() { return projected.stage.op.score; }
  [[nodiscard]] const PrototypeScore<Real>& score() const { return projected.stage.op.score; }

  [[nodiscard]] Index count_of(Index h) const {
    const Real count = counts_[h];
    require(count >= 0 && count <= Real(options_.capacity) && count == std::floor(count),
            "PrototypeAttention: memory.counts holds ", count, " for head ", h,
            ", it must be a whole number in [0, ", options_.capacity, "]");
    return Index(count);
  }
  [[nodiscard]] ArtMemory<Real> memory_of(const Real* rows, Index count) const {
    ArtMemory<Real> memory(art_options(dim(), options_));
    memory.set_prototypes({rows, std::size_t(count * dim())}, count);
    return memory;
  }
  // The memory of key head h that the op read in the last forward().
  [[nodiscard]] ArtMemory<Real> memory_read(Index h) const {
    const Index head = h * (projected.heads().heads / kv_heads());
    return memory_of(score().prototype(head, 0), score().count(head));
  }
  void take_memories() {
    const Geometry& g = projected.heads();
    for (Index h = 0; h < g.heads; ++h) {
      const Real* from = prototypes_.data() + g.kv_head(h) * head_size();
      score().counts[std::size_t(h)] = count_of(g.kv_head(h));
      std::copy(from, from + head_size(), score().prototype(h, 0));
    }
  }

  // Computes the gradient of the correction, then lets the memories learn the keys of the last
  // forward pass. If it throws, no head has learned.
  void learn(Context<Real>& c) {
    const TensorView<const Real> keys = projected.inputs(batch_).key.plain();
    require_finite(keys);
    const bool corrects = options_.correction > 0;
    if (corrects)
      projected.key_gradient.resize(keys.shape().batch * keys.shape().len, kv_heads() * dim());
    const TensorView<Real> dkeys = heads_of(projected.key_gradient.view(), batch_, kv_heads());
    std::vector<ArtMemory<Real>> taught;
    for (Index h = 0; h < kv_heads(); ++h) taught.push_back(memory_read(h));
    parallel_for(kv_heads(), resolve_threads(c.threads), [&](Index h) {
      ArtMemory<Real>& memory = taught[std::size_t(h)];
      if (corrects) correct(memory, keys, h, dkeys);
      memory.learn(keys, h);
    });
    for (Index h = 0; h < kv_heads(); ++h) {
      const ArtMemory<Real>& memory = taught[std::size_t(h)];
      std::copy(memory.prototypes().begin(), memory.prototypes().end(),
                prototypes_.data() + h * head_size());
      counts_[h] = Real(memory.count());
    }
  }
  void correct(const ArtMemory<Real>& memory, const TensorView<const Real>& keys, Index h,
               const TensorView<Real>& dkeys) const {
    const Real factor = options_.correction / Real(keys.shape().batch * keys.shape().len);
    for_each_key(keys, [&](Index b, Index t) {
      const Real* key = keys.row(b, h, t);
      Real* dkey = dkeys.row(b, h, t);
      const ArtFound<Real> found = memory.find({key, std::size_t(dim())});
      if (found.index < 0) return std::fill(dkey, dkey + dim(), Real(0));
      const Real* prototype = memory.prototypes().data() + found.index * dim();
      for (Index i = 0; i < dim(); ++i) dkey[i] = factor * (key[i] - prototype[i]);
    });
  }

  void require_finite(const TensorView<const Real>& keys) const {
    for (Index h = 0; h < kv_heads(); ++h)
      for_each_key(keys, [&](Index b, Index t) {
        if (!is_finite(keys.row(b, h, t)))
          throw NotFinite("PrototypeAttention::forward: the key of head " + std::to_string(h) +
                          ", sequence " + std::to_string(b) + ", token " + std::to_string(t) +
                          " is not finite, and a memory can learn finite keys only");
      });
  }
  [[nodiscard]] bool is_finite(const Real* key) const {
    return std::all_of(key, key + dim(), [](Real x) { return std::isfinite(x); });
  }
  // Calls f(sequence, token) for each key of a head.
  template <class F>
  static void for_each_key(const TensorView<const Real>& keys, F&& f) {
    for (Index b = 0; b < keys.shape().batch; ++b)
      for (Index t = 0; t < keys.shape().len; ++t) f(b, t);
  }

  KeyMemoryOptions<Real> options_;
  Param<Real> prototypes_,
      counts_;       // as learned so far; op.score.W is what the last forward() read
  Index batch_ = 0;  // batch of the last forward()
  bool learns_ = true;
};

}  // namespace nn
}  // namespace HEED_ABI
}  // namespace heed
