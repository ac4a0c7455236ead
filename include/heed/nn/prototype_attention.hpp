// SPDX-License-Identifier: Apache-2.0
#pragma once

// Prototype attention (ops/prototype.hpp) that learns its prototypes online: each key head has an ART
// memory (ops/art_memory.hpp, cosine matching), which learns the keys that the op reads.
//
//   W = memory                                           prototypes of each head, zeros behind them
//   y = layer(x; W)                                      nn/projected_attention.hpp
//   memory <- keys, in (batch, token) order              training only
//
// No row sees what it teaches, and backward() has the W of its forward(). W is state, not a weight: it
// has no gradient step and no decay. Strength and pull are weights.
//
// Resonance correction: a loss of training beside the model's own, not part of what the model reports.
// c(k) is the prototype that k resonates with before anything is learned; W and c(k) are constants, and
// keys that resonate with none add 0.
//
//   loss += lambda / (2 tokens) sum over heads and their keys of |k - W_c(k)|^2
//   dk   += lambda / tokens (k - W_c(k))                 before rotation and norm are undone
//
// Symbols  correction (lambda).
// Shapes   memory.prototypes (kv_heads, capacity, dim_qk), memory.counts (kv_heads); query heads that
//          share keys share their prototypes.
// Bounds   min lets no value of a prototype rise: those of keys of either sign sink, the faster the larger
//          eta, until keys no longer resonate with them.
// Errors   a key to be learned that is not finite, a restored count that is none; nothing is learned.
// Source   GPT2-ART note, sections 2.1 to 2.3. Its dh = lambda (W_j* - h) is a step down the slope of
//          the loss above.
// Cost     capacity dim_qk multiply-adds per key and search: one to learn, one more to correct.

#include <heed/nn/projected_attention.hpp>
#include <heed/ops/prototype.hpp>

#include <span>

namespace heed::inline HEED_ABI::nn {

template <class T>
struct KeyMemoryOptions {
  Index capacity = 16;        // prototypes per head
  T vigilance = T(0.5);       // rho in [-1, 1]
  T learning_rate = T(0.01);  // eta in [0, 1]
  T correction = T(0);        // lambda >= 0
};

template <class T>
class PrototypeAttention final : public AttentionLayer<T> {
 public:
  ProjectedAttention<Prototype<T>> projected;

  PrototypeAttention(const AttentionOptions& options, Mask<T> mask, const KeyMemoryOptions<T>& memory = {})
      : projected(options, op_of(options.heads, memory), std::move(mask)),
        options_(memory),
        prototypes_(std::vector<Index>{options.heads.kv_heads, memory.capacity, options.heads.dim_qk}),
        counts_(std::vector<Index>{options.heads.kv_heads}) {
    require(memory.correction >= 0 && std::isfinite(memory.correction),
            "PrototypeAttention: correction is ", memory.correction,
            ", it must be finite and at least 0");
  }

  [[nodiscard]] const KeyMemoryOptions<T>& options() const { return options_; }
  // One per key head, with all that was learned.
  [[nodiscard]] std::vector<ArtMemory<T>> memories() const {
    std::vector<ArtMemory<T>> all;
    for (Index h = 0; h < kv_heads(); ++h)
      all.push_back(memory_of(prototypes_.data() + h * head_size(), count_of(h)));
    return all;
  }

  void forward(Context<T>& c, Index batch, const MatrixView<const T>& x,
               const MatrixView<T>& y) override {
    take_memories();
    projected.forward(c, batch, x, y);
    batch_ = batch;
    projected.key_gradient.resize(0, 0);
    if (c.training) learn(c);
  }
  void backward(Context<T>& c, Index batch, const MatrixView<const T>& x,
                const MatrixView<const T>& dy, const MatrixView<T>& dx) override {
    projected.backward(c, batch, x, dy, dx);
  }
  void visit(const Visitor<T>& f) override {
    projected.visit([&](const std::string& name, Param<T>& value, Param<T>& grad) {
      if (&value != &score().W) f(name, value, grad);
    });
  }
  void visit_state(const StateVisitor<T>& f) override {
    f("memory.prototypes", prototypes_);
    f("memory.counts", counts_);
  }

  [[nodiscard]] bool can_step() const override { return projected.can_step(); }
  [[nodiscard]] KvCache<T> new_cache(Index batch) const override { return projected.new_cache(batch); }
  // Learns nothing, in training neither.
  void step(Context<T>& c, Index batch, const MatrixView<const T>& x, const MatrixView<T>& y,
            KvCache<T>& cache) override {
    take_memories();
    projected.step(c, batch, x, y, cache);
    batch_ = batch;
  }

  void set_dropout(double rate, std::uint64_t stream) override { projected.set_dropout(rate, stream); }

  // Keys and memories of the last forward(), before it learned: prototypes per head, share of keys that
  // resonate, mean match with the best prototype, and the loss of the correction.
  [[nodiscard]] std::vector<std::pair<std::string, double>> diagnostics() const override {
    if (batch_ == 0) return {};
    const TensorView<const T> keys = projected.inputs(batch_).key;
    double prototypes = 0, resonating = 0, match = 0, squares = 0;
    for (Index h = 0; h < kv_heads(); ++h) {
      const ArtMemory<T> memory = memory_read(h);
      prototypes += double(memory.count());
      for_each_key(keys, [&](Index b, Index t) {
        const T* key = keys.row(b, h, t);
        if (!is_finite(key)) return;
        const ArtFound<T> found = memory.find({key, std::size_t(dim())});
        match += double(found.match);
        if (found.index < 0) return;
        ++resonating;
        const T* prototype = memory.prototypes().data() + found.index * dim();
        for (Index i = 0; i < dim(); ++i) {
          const double apart = double(key[i]) - double(prototype[i]);
          squares += apart * apart;
        }
      });
    }
    const double tokens = double(std::max<Index>(1, keys.shape().batch * keys.shape().len));
    const double heads = double(kv_heads());
    return {{"prototypes", prototypes / heads},
            {"resonating_keys", resonating / (tokens * heads)},
            {"key_match", match / (tokens * heads)},
            {"correction_loss", double(options_.correction) * squares / (2 * tokens)}};
  }

 private:
  [[nodiscard]] static Prototype<T> op_of(const Geometry& g, const KeyMemoryOptions<T>& memory) {
    (void)heed::detail::checked_art_options(art_options(g.dim_qk, memory));
    Prototype<T> op = make_prototype<T>(g, memory.capacity);
    op.score.counts.assign(std::size_t(g.heads), 0);
    return op;
  }
  [[nodiscard]] static ArtOptions<T> art_options(Index dim, const KeyMemoryOptions<T>& memory) {
    ArtOptions<T> options;
    options.capacity = memory.capacity;
    options.dim = dim;
    options.vigilance = memory.vigilance;
    options.learning_rate = memory.learning_rate;
    return options;
  }

  [[nodiscard]] Index kv_heads() const { return projected.heads().kv_heads; }
  [[nodiscard]] Index dim() const { return projected.heads().dim_qk; }
  [[nodiscard]] Index head_size() const { return options_.capacity * dim(); }
  [[nodiscard]] PrototypeScore<T>& score() { return projected.stage.op.score; }
  [[nodiscard]] const PrototypeScore<T>& score() const { return projected.stage.op.score; }

  [[nodiscard]] Index count_of(Index h) const {
    const T count = counts_[h];
    require(count >= 0 && count <= T(options_.capacity) && count == std::floor(count),
            "PrototypeAttention: memory.counts holds ", count, " for head ", h,
            ", it must be a whole number in [0, ", options_.capacity, "]");
    return Index(count);
  }
  [[nodiscard]] ArtMemory<T> memory_of(const T* rows, Index count) const {
    ArtMemory<T> memory(art_options(dim(), options_));
    memory.set_prototypes({rows, std::size_t(count * dim())}, count);
    return memory;
  }
  // What the op reads, or read last, of key head h.
  [[nodiscard]] ArtMemory<T> memory_read(Index h) const {
    const Index head = h * (projected.heads().heads / kv_heads());
    return memory_of(score().prototype(head, 0), score().count(head));
  }
  void take_memories() {
    const Geometry& g = projected.heads();
    for (Index h = 0; h < g.heads; ++h) {
      const T* from = prototypes_.data() + g.kv_head(h) * head_size();
      score().counts[std::size_t(h)] = count_of(g.kv_head(h));
      std::copy(from, from + head_size(), score().prototype(h, 0));
    }
  }

  // The memories learn the keys of the last forward pass; before that, what corrects these keys.
  void learn(Context<T>& c) {
    const TensorView<const T> keys = projected.inputs(batch_).key;
    require_finite(keys);
    const bool corrects = options_.correction > 0;
    if (corrects)
      projected.key_gradient.resize(keys.shape().batch * keys.shape().len, kv_heads() * dim());
    const TensorView<T> dkeys = heads_of(projected.key_gradient.view(), batch_, kv_heads());
    parallel_for(kv_heads(), resolve_threads(c.threads), [&](Index h) {
      ArtMemory<T> memory = memory_read(h);
      if (corrects) correct(memory, keys, h, dkeys);
      memory.learn(keys, h);
      std::copy(memory.prototypes().begin(), memory.prototypes().end(),
                prototypes_.data() + h * head_size());
      counts_[h] = T(memory.count());
    });
  }
  void correct(const ArtMemory<T>& memory, const TensorView<const T>& keys, Index h,
               const TensorView<T>& dkeys) const {
    const T factor = options_.correction / T(keys.shape().batch * keys.shape().len);
    for_each_key(keys, [&](Index b, Index t) {
      const T* key = keys.row(b, h, t);
      T* dkey = dkeys.row(b, h, t);
      const ArtFound<T> found = memory.find({key, std::size_t(dim())});
      if (found.index < 0) return std::fill(dkey, dkey + dim(), T(0));
      const T* prototype = memory.prototypes().data() + found.index * dim();
      for (Index i = 0; i < dim(); ++i) dkey[i] = factor * (key[i] - prototype[i]);
    });
  }

  void require_finite(const TensorView<const T>& keys) const {
    for (Index h = 0; h < kv_heads(); ++h)
      for_each_key(keys, [&](Index b, Index t) {
        require(is_finite(keys.row(b, h, t)), "PrototypeAttention::forward: the key of head ", h,
                ", sequence ", b, ", token ", t,
                " is not finite; a memory learns finite keys only, so that training cannot go on");
      });
  }
  [[nodiscard]] bool is_finite(const T* key) const {
    return std::all_of(key, key + dim(), [](T x) { return std::isfinite(x); });
  }
  // f(sequence, token)
  template <class F>
  static void for_each_key(const TensorView<const T>& keys, F&& f) {
    for (Index b = 0; b < keys.shape().batch; ++b)
      for (Index t = 0; t < keys.shape().len; ++t) f(b, t);
  }

  KeyMemoryOptions<T> options_;
  Param<T> prototypes_, counts_;  // what was learned so far; op.score.W is what the last forward() read
  Index batch_ = 0;               // of the last forward()
};

}  // namespace heed::inline HEED_ABI::nn
