// SPDX-License-Identifier: Apache-2.0
#pragma once

// Native sparse attention: three softmaxes over keys of their own, added by gates that each token gives to each head.
//
//   out_i = sum_c sigmoid(g_ic) attention_c(q_i; k_c, v_c)
//
//   c = 0   windows of 32 keys, one every 16, as the means of their keys and values, whose last key is at or before i
//   c = 1   16 blocks of 64 keys: the first, the query's own, and those that matter most
//   c = 2   the last 512 keys
//
// A block matters by the weights that branch 0 gives to the windows in it, summed over the heads that share keys
// (select_weighed() in heed/measure/select.hpp). The choice is a constant for the gradients.
//
// Source  J. Yuan et al., Native Sparse Attention (2025), equations 5 to 12. Windows are compressed there by a small network.

#include "plain.hpp"

#include <heed/check/op_call.hpp>
#include <heed/mask/block_lists.hpp>
#include <heed/measure/select.hpp>
#include <heed/nn/attention_frame.hpp>
#include <heed/nn/attention_layer.hpp>
#include <heed/ops/scaled_dot.hpp>

#include <array>
#include <cmath>
#include <limits>
#include <utility>
#include <vector>

namespace zoo::nsa {

namespace nn = heed::nn;
using heed::Index;

struct Sizes {
  heed::Windows windows;  // no longer than a block
  Index block = 64, blocks = 16, window = 512;
};

// The branches, as calls of plain attention.
template <class T>
class Branches : public nn::StageOfAnyOp<T> {
 public:
  explicit Branches(const Sizes& sizes) : nn::StageOfAnyOp<T>({}), sizes_(sizes) {
    heed::require(sizes.windows.size <= sizes.block, "zoo:nsa: windows have ", sizes.windows.size,
                  " keys, blocks ", sizes.block, "; windows may have no more");
  }

  // in.key and in.value (batch, 3 kv_heads, len, dim): those of branch c are heads [c kv_heads, (c + 1) kv_heads). in.extra
  // (batch, heads, len_q, 3): g. The queries are the last of the keys' tokens.
  void forward(const heed::Inputs<T>& in, const heed::Options& options,
               const heed::TensorView<T>& out) {
    const heed::Shape q = in.query.shape(), k = in.key.shape();
    const Index kv_heads = k.heads / 3, first = k.len - q.len;
    const heed::Geometry g{q.batch, q.heads, q.heads, kv_heads,
                           q.len,   k.len,   q.dim,   in.value.shape().dim};
    const Index windows = sizes_.windows.count(g.len_kv);
    std::array keys = parts_of(in.key), values = parts_of(in.value);
    keys[0] = means_of(keys[0], g.len_kv, g.dim_qk);
    values[0] = means_of(values[0], g.len_kv, g.dim_v);

    std::array masks = {sizes_.windows.template seen_by<T>(first),
                        heed::causal<T>(heed::Align::bottom_right),
                        heed::window<T>(sizes_.window - 1, 0, heed::Align::bottom_right)};
    if (windows > 0) {
      heed::Inputs<T> means{in.query, {keys[0].data(), {g.batch, kv_heads, windows, g.dim_qk}}, {}};
      means.first_query = first;
      masks[1] =
          masks[1] & heed::block_lists<T>(heed::select_weighed(
                         means, sizes_.windows, g.len_kv, sizes_.block, sizes_.blocks, options));
    }
    gates_ = heed::dense_numbers<T>(in.extra);
    for (T& gate : gates_) gate = 1 / (1 + std::exp(-gate));
    calls_.clear();
    Reals sum(std::size_t(g.query_rows() * g.dim_v));
    for (std::size_t c = 0; c < 3; ++c) {
      heed::Geometry own = g;
      if (c == 0) own.len_kv = windows;
      heed::Options with = options;
      with.dropout.seed += c;
      calls_.emplace_back(heed::ScaledDot<T>{}, own, std::move(masks[c]), with,
                          heed::CallNumbers<T>{heed::dense_numbers<T>(in.query),
                                               std::move(keys[c]),
                                               std::move(values[c]),
                                               {},
                                               Reals(sum.size())});
      if (own.len_kv == 0) continue;
      calls_[c].forward();
      for (std::size_t n = 0; n < sum.size(); ++n) sum[n] += gate(n, c) * calls_[c].out[n];
    }
    write(sum, out);
  }

  // Writes the gradients of what forward() read.
  void backward(const heed::TensorView<const T>& dout, const heed::Gradients<T>& grads) {
    const heed::Geometry g = calls_[1].geometry();
    const Reals down = heed::dense_numbers<T>(dout);
    Reals dquery(calls_[1].query.size()), dgates(gates_.size());
    std::array<Reals, 3> dkeys, dvalues;
    for (std::size_t c = 0; c < 3; ++c) {
      auto& call = calls_[c];
      dkeys[c].resize(calls_[1].key.size());
      dvalues[c].resize(calls_[1].value.size());
      if (call.geometry().len_kv == 0) continue;
      for (std::size_t n = 0; n < down.size(); ++n) {
        call.grad_out[n] = gate(n, c) * down[n];
        dgates[n / std::size_t(g.dim_v) * 3 + c] +=
            call.grad_out[n] * (1 - gate(n, c)) * call.out[n];
      }
      call.backward();
      for (std::size_t n = 0; n < dquery.size(); ++n) dquery[n] += call.grad_query[n];
      dkeys[c] = c > 0 ? call.grad_key : spread(call.grad_key, g.len_kv, g.dim_qk);
      dvalues[c] = c > 0 ? call.grad_value : spread(call.grad_value, g.len_kv, g.dim_v);
    }
    write(dquery, grads.query.plain());
    write(dgates, grads.extra.plain());
    write_parts(dkeys, grads.key.plain());
    write_parts(dvalues, grads.value.plain());
  }

 private:
  using Reals = std::vector<T>;

  // The gate of branch c for number n of the output.
  [[nodiscard]] T gate(std::size_t n, std::size_t c) const {
    return gates_[n / std::size_t(calls_[0].geometry().dim_v) * 3 + c];
  }
  static void write(const Reals& from, const heed::TensorView<T>& to) {
    const heed::Shape& s = to.shape();
    for (Index n = 0; n < Index(from.size()); ++n)
      to(n / s.dim / s.len / s.heads, n / s.dim / s.len % s.heads, n / s.dim % s.len, n % s.dim) =
          from[std::size_t(n)];
  }
  // The heads of each branch, (batch, kv_heads, len, dim), and back.
  [[nodiscard]] static std::array<Reals, 3> parts_of(const heed::StoredView<const T>& all) {
    const heed::Shape& s = all.shape();
    const Reals from = heed::dense_numbers<T>(all);
    const Index part = s.heads / 3 * s.len * s.dim;
    std::array<Reals, 3> parts;
    for (Index n = 0; n < 3 * s.batch; ++n)
      parts[std::size_t(n % 3)].insert(parts[std::size_t(n % 3)].end(), from.begin() + n * part,
                                       from.begin() + (n + 1) * part);
    return parts;
  }
  static void write_parts(const std::array<Reals, 3>& parts, const heed::TensorView<T>& to) {
    const heed::Shape& s = to.shape();
    const Index part = s.heads / 3 * s.len * s.dim;
    Reals all;
    for (Index n = 0; n < 3 * s.batch; ++n)
      all.insert(all.end(), parts[std::size_t(n % 3)].begin() + n / 3 * part,
                 parts[std::size_t(n % 3)].begin() + (n / 3 + 1) * part);
    write(all, to);
  }
  // Means of the windows of rows (..., len, dim), and the gradient of the rows from that of the means.
  [[nodiscard]] Reals means_of(const Reals& rows, Index len, Index dim) const {
    Reals means(rows.size() / std::size_t(len) * std::size_t(sizes_.windows.count(len)));
    for_windows(Index(means.size()) / dim, len, dim, [&](std::size_t mean, std::size_t row) {
      means[mean] += rows[row] / T(sizes_.windows.size);
    });
    return means;
  }
  [[nodiscard]] Reals spread(const Reals& dmeans, Index len, Index dim) const {
    const std::size_t windows = dmeans.size() / std::size_t(dim);
    Reals drows(windows / std::size_t(sizes_.windows.count(len)) * std::size_t(len * dim));
    for_windows(Index(windows), len, dim, [&](std::size_t mean, std::size_t row) {
      drows[row] += dmeans[mean] / T(sizes_.windows.size);
    });
    return drows;
  }
  // f(number of a mean, number of a row in its window)
  template <class F>
  void for_windows(Index means, Index len, Index dim, F&& f) const {
    const Index count = sizes_.windows.count(len);
    for (Index n = 0; n < means; ++n)
      for (Index t = 0; t < sizes_.windows.size; ++t)
        for (Index column = 0; column < dim; ++column)
          f(std::size_t(n * dim + column),
            std::size_t((n / count * len + n % count * sizes_.windows.stride + t) * dim + column));
  }

  Sizes sizes_;
  std::vector<heed::OpCall<heed::ScaledDot<T>>> calls_;
  Reals gates_;  // of the output's rows, three each
};

template <class T>
class Layer final : public nn::AttentionLayer<T> {
 public:
  explicit Layer(const nn::AttentionOptions& options, const Sizes& sizes = {})
      : frame_(with_branches(options), {3, 0, 0}), branches_(sizes) {}

  // What the branches read in the last forward().
  [[nodiscard]] heed::Inputs<T> inputs(Index batch) const { return frame_.inputs(batch); }

  void forward(nn::Context<T>& c, Index batch, const nn::MatrixView<const T>& x,
               const nn::MatrixView<T>& y) override {
    frame_.project(c, batch, x, x, 0);
    mix(c, batch, frame_.inputs(batch), x.rows, y);
  }
  void backward(nn::Context<T>& c, Index batch, const nn::MatrixView<const T>& x,
                const nn::MatrixView<const T>& dy, const nn::MatrixView<T>& dx) override {
    const auto grads = frame_.begin_backward(c, batch, x, x, dy);
    branches_.backward(grads.mixed, grads.inputs);
    frame_.end_backward(c, batch, x, x, {}, dx, {});
  }
  void visit(const nn::Visitor<T>& f) override {
    frame_.visit_in(f);
    frame_.visit_out(f);
  }
  [[nodiscard]] bool can_step() const override { return true; }
  [[nodiscard]] heed::KvCache<T> new_cache(Index batch) const override {
    return frame_.new_cache(batch);
  }
  void step(nn::Context<T>& c, Index batch, const nn::MatrixView<const T>& x,
            const nn::MatrixView<T>& y, heed::KvCache<T>& cache) override {
    frame_.require_step(c, true);
    const Index position = cache.len();
    frame_.project(c, batch, x, x, position);
    try {
      mix(c, batch, frame_.append_to(cache, batch), x.rows, y);
    } catch (...) {
      cache.truncate(position);
      throw;
    }
  }
  void restrict_to(const heed::Mask<T>&) override {
    heed::fail("zoo:nsa: a mask was given, keys that are means of windows of tokens take none");
  }
  void set_dropout(double rate, std::uint64_t stream) override {
    branches_.set_dropout(rate, stream);
  }
  void set_noise(double sigma, std::uint64_t stream) override { frame_.set_noise(sigma, stream); }

 private:
  [[nodiscard]] static nn::AttentionOptions with_branches(nn::AttentionOptions options) {
    options.heads.kv_heads *= 3;
    return options;
  }
  void mix(nn::Context<T>& c, Index batch, const heed::Inputs<T>& in, Index tokens,
           const nn::MatrixView<T>& y) {
    branches_.forward(in, branches_.options(c, in.query.shape().len),
                      frame_.rows_to_mix(batch, tokens));
    frame_.finish(c, y);
  }

  nn::AttentionFrame<T> frame_;
  Branches<T> branches_;
};

// In plain loops: the row, which has the keys of branch 1 up to its own, with the keys of the blocks that it keeps. weights are
// those of the windows in branch 0, of each head that shares the keys.
inline PlainRow kept(const PlainRow& row, const std::vector<Numbers>& weights, const Sizes& sizes) {
  const Index own = row.position / sizes.block, step = sizes.block / sizes.windows.stride,
              covers = sizes.windows.size / sizes.windows.stride;
  Numbers matters(std::size_t(own + 1));
  for (Index block = 0; block <= own; ++block)
    for (Index m = 0; m < step; ++m)
      for (Index r = 0; r < covers; ++r)
        for (const Numbers& of_head : weights) {
          const Index j = step * block + m - r;
          if (j >= 0 && j < Index(of_head.size()))
            matters[std::size_t(block)] += of_head[std::size_t(j)];
        }
  matters.front() = matters.back() = std::numeric_limits<double>::infinity();
  return row.largest(std::size_t(sizes.blocks), sizes.block, matters);
}

}  // namespace zoo::nsa
