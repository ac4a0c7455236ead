// SPDX-License-Identifier: Apache-2.0
#pragma once

// What stands around the op of an attention layer (nn/projected_attention.hpp) and knows no op: its
// projections, norms, rotation and noise, compiled once for all ops.

#include <heed/core/geometry.hpp>
#include <heed/kv_cache.hpp>
#include <heed/nn/elementwise.hpp>
#include <heed/nn/linear.hpp>
#include <heed/nn/noise.hpp>
#include <heed/nn/norm.hpp>
#include <heed/nn/rope.hpp>

#include <optional>
#include <string>
#include <utility>
#include <vector>

namespace heed {
inline namespace HEED_ABI {
namespace nn {

// The source of the op's extra input: see the three formulas above.
enum class ExtraSource { projected, from_query, calculated };

// Names of the projections' weights. With a name for `packed`, one projection of that name gives q, k, v and the
// extra input; without one, each has its own. Without a name for `out` the layer has no output projection.
struct ProjectionNames {
  std::string packed, query, key, value, extra, out;
  std::string query_inputs = "query_inputs_proj", key_inputs = "key_inputs_proj";
};
[[nodiscard]] inline ProjectionNames packed_names() { return {"c_attn", "", "", "", "", "c_proj"}; }
[[nodiscard]] inline ProjectionNames split_names() {
  return {"", "q_proj", "k_proj", "v_proj", "extra_proj", "out_proj"};
}

struct AttentionOptions {
  Index width = 0;
  Geometry heads;  // only heads, query_heads, kv_heads, dim_qk and dim_v are read
  ProjectionNames names = packed_names();
  bool bias = true;
  bool query_key_norm = false;
  std::optional<Rope> rope = {};
  ExtraSource extra = ExtraSource::projected;
  Index latent = 0;  // columns of l; 0: keys and values are projected from x

  // Options for `count` heads that share the width evenly.
  [[nodiscard]] static AttentionOptions even(Index width, Index count) {
    require(count > 0 && width % count == 0, "AttentionOptions::even: width is ", width,
            ", it must be a multiple of the number of heads, ", count);
    AttentionOptions options;
    options.width = width;
    options.heads = {1, count, count, count, 1, 1, width / count, width / count};
    return options;
  }
};

// Columns of each head that the op reads beside its queries, keys and values.
struct ColumnsBeside {
  Index extra, query_inputs, key_inputs;
};

template <class Real>
class AttentionFrame {
 public:
  AttentionFrame(const AttentionOptions& options, const ColumnsBeside& beside) : options_(options) {
    const Geometry& g = options.heads;
    query_ = {0, g.query_heads * g.dim_qk};
    key_ = {query_.end(), g.kv_heads * g.dim_qk};
    value_ = {key_.end(), g.kv_heads * g.dim_v};
    extra_ = {value_.end(), g.heads * beside.extra};
    query_inputs_ = {extra_.end(), g.heads * beside.query_inputs};
    key_inputs_ = {query_inputs_.end(), g.heads * beside.key_inputs};
    add_projections();
    if (options.query_key_norm) {
      query_norm_ = RMSNorm<Real>(g.dim_qk);
      key_norm_ = RMSNorm<Real>(g.dim_qk);
    }
    if (!options.names.out.empty()) out_ = Linear<Real>(mixed_width(), options.width, options.bias);
  }

  [[nodiscard]] const Geometry& heads() const { return options_.heads; }
  [[nodiscard]] Index width_out() const {
    return options_.names.out.empty() ? mixed_width() : options_.width;
  }

  // The weights, (columns, width), of the parts that are projected from x itself; empty for the other parts.
  struct InputWeights {
    MatrixView<const Real> query, key, value, extra;
  };
  [[nodiscard]] InputWeights input_weights() const {
    const auto rows = [this](const Part& part) -> MatrixView<const Real> {
      for (const Projection& p : projections_)
        if (!p.of_latent && part.count > 0 && p.to.first <= part.first && part.end() <= p.to.end())
          return MatrixView<const Real>(p.linear.weight.value.data(), p.linear.out(), p.linear.in())
              .row_range(part.first - p.to.first, part.count);
      return {};
    };
    return {rows(query_), rows(key_), rows(value_), rows(extra_)};
  }
  // The inputs that the op read in the last forward().
  [[nodiscard]] PackedInputs<Real> inputs(Index batch) const {
    const Matrix<Real>& values = crosses_ ? memory_rows_ : rows_;
    const Matrix<Real>& keys = crosses_ ? (turns() ? memory_turned_ : memory_rows_) : read_from();
    const Geometry& g = options_.heads;
    const Inputs<Real> in{part(read_from().view(), query_, batch, g.query_heads),
                          part(keys.view(), key_, batch, g.kv_heads),
                          part(values.view(), value_, batch, g.kv_heads),
                          of_heads(rows_.view(), extra_, batch),
                          nullptr,
                          of_heads(rows_.view(), query_inputs_, batch),
                          of_heads(values.view(), key_inputs_, batch)};
    return {in, packed_.queries.empty() ? nullptr : &packed_};
  }

  // Computes the rows of q, k, v, the extra input and the inputs per token. The first token of each
  // sequence has position `position`.
  void project(Context<Real>& c, Index batch, const MatrixView<const Real>& x,
               const MatrixView<const Real>& memory, Index position) {
    require(batch > 0 && x.rows % batch == 0 && memory.rows % batch == 0,
            "ProjectedAttention: ", x.rows, " and ", memory.rows, " tokens in ", batch,
            " sequences; they must divide evenly");
    crosses_ = memory.data != x.data || memory.rows != x.rows;
    require(!crosses_ || options_.names.packed.empty(),
            "ProjectedAttention: cross attention needs a projection each for q, k and v");
    require(c.packed == nullptr || (batch == 1 && !crosses_),
            "ProjectedAttention: packed sequences were given for ",
            crosses_ ? "cross attention" : "several batches", ", they take self attention in one");
    require(c.spread == nullptr || (c.packed == nullptr && !crosses_),
            "ProjectedAttention: tokens of ", crosses_ ? "cross attention" : "packed sequences",
            " are spread over ranks, it must be self attention of sequences of equal length");
    require(c.spread == nullptr || c.training || noise_ == 0,
            "ProjectedAttention: the tokens are spread over ranks, noise of ", noise_,
            " times their root mean square needs all of them");
    packed_.queries = c.packed ? *c.packed : std::vector<Index>{};
    rows_.resize(x.rows, total());
    if (crosses_) memory_rows_.resize(memory.rows, total());
    if (latent_) {
      latent_rows_.resize(memory.rows, options_.latent);
      latent_->forward(c, memory, latent_rows_.view());
    }
    for (const Projection& p : projections_)
      p.linear.forward(c, source_of(p, x, memory), range(rows_of(p, rows_, memory_rows_), p.to));
    Into into = Into::overwrite;
    for (const Gate& gate : gates_) {
      require(!crosses_ || gate.from.first == 0,
              "ProjectedAttention: a calculated gate reads q, k and v of one token");
      gate.linear.forward(c, range(rows_, gate.from), range(rows_, extra_), into);
      into = Into::add;
    }
    if (turns()) {
      turned_.resize(x.rows, key_.end());
      if (crosses_) memory_turned_.resize(memory.rows, key_.end());
      turn(c, rows_, turned_, query_, query_norm_, x.rows / batch, position);
      turn(c, crosses_ ? memory_rows_ : rows_, crosses_ ? memory_turned_ : turned_, key_, key_norm_,
           memory.rows / batch, position);
    }
    if (noise_ > 0 && !c.training) {
      Matrix<Real>& queries = turns() ? turned_ : rows_;
      Matrix<Real>& keys = !crosses_ ? queries : turns() ? memory_turned_ : memory_rows_;
      add_noise(c, noise_, 2 * noise_stream_, range(queries, query_), x.rows / batch, position);
      add_noise(c, noise_, 2 * noise_stream_ + 1, range(keys, key_), memory.rows / batch, position);
    }
  }

  // The rows that the op writes; finish() makes the layer's of them.
  [[nodiscard]] TensorView<Real> rows_to_mix(Index batch, Index tokens) {
    mixed_.resize(tokens, mixed_width());
    return heads_of(mixed_.view(), batch, options_.heads.heads);
  }
  void finish(Context<Real>& c, const MatrixView<Real>& y) {
    if (out_) return out_->forward(c, mixed_.view(), y);
    require_extents(y, mixed_.rows(), mixed_width(), "ProjectedAttention::forward", "y");
    copy<Real>(c, mixed_.view(), y);
  }
  [[nodiscard]] TensorView<const Real> mixed(Index batch) const {
    return heads_of(mixed_.view(), batch, options_.heads.heads);
  }

  // What the op's backward pass reads and writes.
  struct OpGradients {
    TensorView<const Real> mixed;
    Gradients<Real> inputs;
  };
  [[nodiscard]] OpGradients begin_backward(Context<Real>& c, Index batch,
                                           const MatrixView<const Real>& x,
                                           const MatrixView<const Real>& memory,
                                           const MatrixView<const Real>& dy) {
    dmixed_.resize(x.rows, mixed_width());
    MatrixView<const Real> dmixed = dy;
    if (out_) {
      out_->backward(c, mixed_.view(), dy, dmixed_.view());
      dmixed = dmixed_.view();
    }
    drows_.resize(x.rows, total());
    if (crosses_) dmemory_rows_.resize(memory.rows, total());
    if (turns()) {
      dturned_.resize(x.rows, key_.end());
      if (crosses_) dmemory_turned_.resize(memory.rows, key_.end());
    }
    Matrix<Real>& of_query = turns() ? dturned_ : drows_;
    Matrix<Real>& of_key = crosses_ ? (turns() ? dmemory_turned_ : dmemory_rows_) : of_query;
    Matrix<Real>& of_value = crosses_ ? dmemory_rows_ : drows_;
    const Geometry& g = options_.heads;
    return {heads_of(dmixed, batch, g.heads),
            {part(of_query.view(), query_, batch, g.query_heads),
             part(of_key.view(), key_, batch, g.kv_heads),
             part(of_value.view(), value_, batch, g.kv_heads),
             of_heads(drows_.view(), extra_, batch),
             {},
             of_heads(drows_.view(), query_inputs_, batch),
             of_heads(of_value.view(), key_inputs_, batch)}};
  }
  // `key_gradient` may be empty.
  void end_backward(Context<Real>& c, Index batch, const MatrixView<const Real>& x,
                    const MatrixView<const Real>& memory, const Matrix<Real>& key_gradient,
                    const MatrixView<Real>& dx, const MatrixView<Real>& dmemory) {
    Matrix<Real>& of_query = turns() ? dturned_ : drows_;
    Matrix<Real>& of_key = crosses_ ? (turns() ? dmemory_turned_ : dmemory_rows_) : of_query;
    if (key_gradient.rows() > 0) add<Real>(c, key_gradient.view(), range(of_key, key_));
    turn_back(c, batch);
    gate_backward(c);
    project_backward(c, x, memory, dx, dmemory);
  }

  // Visits the weights in front of the op. Below: those behind it.
  void visit_in(const Visitor<Real>& f) {
    if (latent_) visit_part<Real>("kv_down", *latent_, f);
    for (Projection& p : projections_) visit_part<Real>(p.name, p.linear, f);
    for (Gate& gate : gates_) visit_part<Real>(gate.name, gate.linear, f);
    if (query_norm_) visit_part<Real>("q_norm", *query_norm_, f);
    if (key_norm_) visit_part<Real>("k_norm", *key_norm_, f);
  }
  void visit_out(const Visitor<Real>& f) {
    if (out_) visit_part<Real>(options_.names.out, *out_, f);
  }

  [[nodiscard]] KvCache<Real> new_cache(Index batch) const {
    const Geometry& g = options_.heads;
    return KvCache<Real>(batch, g.kv_heads, g.dim_qk, g.dim_v);
  }
  // Appends the keys and values of the rows that project() computed. Returns the inputs of the op's step.
  [[nodiscard]] Inputs<Real> append_to(KvCache<Real>& cache, Index batch) const {
    Inputs<Real> in = inputs(batch);
    cache.append(in.key, in.value);
    const auto query_inputs = in.query_inputs;
    in = cache.inputs(in.query, in.extra);
    in.query_inputs = query_inputs;
    return in;
  }
  static void require_step(const Context<Real>& c, bool can_step) {
    require(can_step,
            "ProjectedAttention::step: the layer is not causal, or its op needs all rows at once");
    require(c.packed == nullptr,
            "ProjectedAttention::step: packed sequences were given, a cache has equal ones");
    require(c.spread == nullptr,
            "ProjectedAttention::step: the tokens are spread over ranks, a cache has all of them");
  }
  void set_noise(double sigma, std::uint64_t stream) {
    require(sigma >= 0 && std::isfinite(sigma), "ProjectedAttention::set_noise: sigma is ", sigma,
            ", it must be finite and at least 0");
    noise_ = sigma;
    noise_stream_ = stream;
  }

 private:
  // Columns of the projected rows.
  struct Part {
    Index first = 0, count = 0;
    [[nodiscard]] Index end() const { return first + count; }
  };
  struct Projection {
    std::string name;
    Linear<Real> linear;
    Part to;
    bool of_memory;
    bool of_latent = false;
  };
  // A linear layer from a part of the projected rows to the extra input.
  struct Gate {
    std::string name;
    Linear<Real> linear;
    Part from;
  };

  [[nodiscard]] Index total() const { return key_inputs_.end(); }
  [[nodiscard]] Index mixed_width() const { return options_.heads.heads * options_.heads.dim_v; }
  [[nodiscard]] bool turns() const { return query_norm_.has_value() || options_.rope.has_value(); }

  void add_projections() {
    const ProjectionNames& names = options_.names;
    const bool from_x = options_.extra == ExtraSource::projected;
    const bool projects_extra = extra_.count > 0 && from_x;
    require(from_x || extra_.end() == total(),
            "ProjectedAttention: a gate was asked for, the op reads numbers of tokens, too");
    const auto add = [&](const std::string& name, const Part& to, bool of_memory) {
      projections_.push_back(
          {name, Linear<Real>(options_.width, to.count, options_.bias), to, of_memory});
    };
    const auto add_inputs = [&] {
      if (query_inputs_.count > 0) add(names.query_inputs, query_inputs_, false);
      if (key_inputs_.count > 0) add(names.key_inputs, key_inputs_, true);
    };
    require(options_.latent == 0 || names.packed.empty(),
            "ProjectedAttention: a latent needs a projection each for q, k and v");
    if (options_.latent > 0) {
      latent_ = Linear<Real>(options_.width, options_.latent, false);
      add(names.query, query_, false);
      for (const auto& [name, to] : {std::pair{"k_up", key_}, {"v_up", value_}})
        projections_.push_back(
            {name, Linear<Real>(options_.latent, to.count, false), to, true, true});
      if (projects_extra) add(names.extra, extra_, false);
      add_inputs();
    } else if (!names.packed.empty()) {
      add(names.packed, {0, from_x ? total() : extra_.first}, false);
    } else {
      add(names.query, query_, false);
      add(names.key, key_, true);
      add(names.value, value_, true);
      if (projects_extra) add(names.extra, extra_, false);
      add_inputs();
    }
    const auto gate = [&](const char* name, const Part& from) {
      gates_.push_back({name, Linear<Real>(from.count, extra_.count, false), from});
    };
    if (options_.extra == ExtraSource::from_query) {
      gate("w_g", query_);
    } else if (options_.extra == ExtraSource::calculated) {
      gate("w_q", query_);
      gate("w_k", key_);
      gate("w_v", value_);
    }
    require(gates_.empty() || extra_.count > 0,
            "ProjectedAttention: a gate was asked for, the op reads no extra input");
  }

  template <class U>
  [[nodiscard]] static TensorView<U> part(const MatrixView<U>& rows, const Part& columns,
                                          Index batch, Index heads) {
    return heads_of(rows.column_range(columns.first, columns.count), batch, heads);
  }
  // The columns of a part that each output head has; empty if the op reads none.
  template <class U>
  [[nodiscard]] TensorView<U> of_heads(const MatrixView<U>& rows, const Part& columns,
                                       Index batch) const {
    if (columns.count == 0) return {};
    return part(rows, columns, batch, options_.heads.heads);
  }

  // The rows from which the op reads its queries, and its keys unless attention crosses.
  [[nodiscard]] const Matrix<Real>& read_from() const { return turns() ? turned_ : rows_; }

  // The rows that a projection reads. Below: which of two matrices it writes to.
  [[nodiscard]] MatrixView<const Real> source_of(const Projection& p,
                                                 const MatrixView<const Real>& x,
                                                 const MatrixView<const Real>& memory) const {
    if (p.of_latent) return latent_rows_.view();
    return crosses_ && p.of_memory ? memory : x;
  }
  [[nodiscard]] Matrix<Real>& rows_of(const Projection& p, Matrix<Real>& of_x,
                                      Matrix<Real>& of_memory) const {
    return crosses_ && p.of_memory ? of_memory : of_x;
  }

  [[nodiscard]] static MatrixView<Real> range(Matrix<Real>& rows, const Part& columns) {
    return rows.view().column_range(columns.first, columns.count);
  }

  // Writes the columns of one part to `to`, after norm and rotation; turn_back() undoes both for gradients.
  void turn(Context<Real>& c, Matrix<Real>& from, Matrix<Real>& to, const Part& columns,
            const std::optional<RMSNorm<Real>>& norm, Index len, Index position) const {
    const MatrixView<Real> source = range(from, columns), target = range(to, columns);
    if (norm)
      norm->forward(c, source, target);
    else
      copy<Real>(c, source, target);
    if (options_.rope) options_.rope->rotate(c, target, len, position, RopeDirection::forward);
  }
  void turn_back(Context<Real>& c, Index batch) {
    if (!turns()) return;
    turn_back(c, batch, rows_, dturned_, drows_, query_, query_norm_);
    turn_back(c, batch, crosses_ ? memory_rows_ : rows_, crosses_ ? dmemory_turned_ : dturned_,
              crosses_ ? dmemory_rows_ : drows_, key_, key_norm_);
  }
  void turn_back(Context<Real>& c, Index batch, Matrix<Real>& x, Matrix<Real>& dy, Matrix<Real>& dx,
                 const Part& columns, std::optional<RMSNorm<Real>>& norm) {
    const MatrixView<Real> source = range(dy, columns), target = range(dx, columns);
    if (options_.rope)
      options_.rope->rotate(c, source, source.rows / batch, 0, RopeDirection::backward);
    if (norm)
      norm->backward(c, range(x, columns), source, target, Into::overwrite);
    else
      copy<Real>(c, source, target);
  }

  void gate_backward(Context<Real>& c) {
    for (Gate& gate : gates_)
      gate.linear.backward(c, range(rows_, gate.from), range(drows_, extra_),
                           range(drows_, gate.from), Into::add);
  }

  void project_backward(Context<Real>& c, const MatrixView<const Real>& x,
                        const MatrixView<const Real>& memory, const MatrixView<Real>& dx,
                        const MatrixView<Real>& dmemory) {
    Into into_x = Into::overwrite, into_memory = Into::overwrite, into_latent = Into::overwrite;
    if (latent_) dlatent_.resize(memory.rows, options_.latent);
    for (Projection& p : projections_) {
      const bool other = crosses_ && p.of_memory;
      Into& into = p.of_latent ? into_latent : other ? into_memory : into_x;
      p.linear.backward(c, source_of(p, x, memory), range(rows_of(p, drows_, dmemory_rows_), p.to),
                        p.of_latent ? dlatent_.view()
                        : other     ? dmemory
                                    : dx,
                        into);
      into = Into::add;
    }
    if (latent_)
      latent_->backward(c, memory, dlatent_.view(), crosses_ ? dmemory : dx,
                        crosses_ ? into_memory : into_x);
  }

  AttentionOptions options_;
  Part query_, key_, value_, extra_, query_inputs_, key_inputs_;
  std::vector<Projection> projections_;
  std::vector<Gate> gates_;
  std::optional<RMSNorm<Real>> query_norm_, key_norm_;
  std::optional<Linear<Real>> out_, latent_;
  bool crosses_ = false;
  Packed<Real> packed_;  // from the last forward()
  double noise_ = 0;
  std::uint64_t noise_stream_ = 0;
  Matrix<Real> rows_, memory_rows_;      // [q | k | v | extra | inputs] of x, of the memory
  Matrix<Real> turned_, memory_turned_;  // [q | k] after norm and rotation
  Matrix<Real> latent_rows_, dlatent_;
  Matrix<Real> mixed_;
  Matrix<Real> drows_, dmemory_rows_, dturned_, dmemory_turned_, dmixed_;
};

}  // namespace nn
}  // namespace HEED_ABI
}  // namespace heed
