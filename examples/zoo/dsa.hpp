// SPDX-License-Identifier: Apache-2.0
#pragma once

// DeepSeek sparse attention: a small indexer chooses the keys of each token, one choice for all heads, and learns to choose as
// attention weighs.
//
//   I_ij  = sum_a w_ia relu(p_ia . z_j)      p = x W_p^T (4 index heads), z = x W_z^T (one for all), w = x W_w^T
//   K_i   = the 64 visible keys with the largest I_ij
//   out_i = attention over K_i
//
// The indexer has a loss of its own beside the model's, in training. Let m_i be the mean over heads of the weights of token i, a
// constant; x counts as a constant for it, too:
//
//   loss += sum_i KL(m_i || softmax over K_i of I_i) / tokens          dloss/dI_ij = (softmax(I_i)_j - m_ij) / tokens
//
// While `dense` is set, K_i is all visible keys: that is how the indexer warms up.
//
// Source  DeepSeek-AI, DeepSeek-V3.2 (2025), section 2.1, where keys are 2048 and the indexer has 64 heads, with rotary positions.
//         The model here does not report the indexer's loss, diagnostics() does.

#include "plain.hpp"

#include <heed/measure/index_loss.hpp>
#include <heed/nn/projected_attention.hpp>
#include <heed/ops/scaled_dot.hpp>

#include <algorithm>
#include <optional>
#include <string>
#include <utility>
#include <vector>

namespace zoo::dsa {

namespace nn = heed::nn;
using heed::Index;

struct Sizes {
  Index keys = 64;    // of a token
  Index heads = 4;    // of the indexer
  Index columns = 0;  // of an index head; 0: those of a head
};

// It does not take tokens in steps, for the cache of a layer has no place for z.
template <class T>
class Layer final : public nn::AttentionLayer<T> {
 public:
  nn::ProjectedAttention<heed::ScaledDot<T>> projected;
  nn::Linear<T> index_query, index_key, index_weights;  // W_p, W_z, W_w
  bool dense = false;

  explicit Layer(const nn::AttentionOptions& options, const Sizes& sizes = {})
      : projected(options, {}, heed::causal<T>()), sizes_(sizes) {
    if (sizes_.columns == 0) sizes_.columns = options.heads.dim_qk;
    index_query = nn::Linear<T>(options.width, sizes_.heads * sizes_.columns, false);
    index_key = nn::Linear<T>(options.width, sizes_.columns, false);
    index_weights = nn::Linear<T>(options.width, sizes_.heads, false);
  }

  // What the indexer read in the last forward().
  [[nodiscard]] heed::IndexInputs<T> index(Index batch) const {
    return {nn::heads_of(p_.view(), batch, sizes_.heads), nn::heads_of(z_.view(), batch, 1),
            nn::heads_of(w_.view(), batch, sizes_.heads)};
  }

  void forward(nn::Context<T>& c, Index batch, const nn::MatrixView<const T>& x,
               const nn::MatrixView<T>& y) override {
    const auto project = [&](const nn::Linear<T>& linear, nn::Matrix<T>& to) {
      to.resize(x.rows, linear.out());
      linear.forward(c, x, to.view());
    };
    project(index_query, p_);
    project(index_key, z_);
    project(index_weights, w_);
    loss_.reset();
    projected.stage.choose = nullptr;
    if (!dense)
      projected.stage.choose = [this, batch](const auto&, const auto& mask, const auto& options) {
        return heed::block_lists<T>(
            heed::select_indexed(index(batch), mask, sizes_.keys, options.threads));
      };
    projected.forward(c, batch, x, y);
  }
  void backward(nn::Context<T>& c, Index batch, const nn::MatrixView<const T>& x,
                const nn::MatrixView<const T>& dy, const nn::MatrixView<T>& dx) override {
    projected.backward(c, batch, x, dy, dx);
    dp_.resize(x.rows, p_.columns());
    dz_.resize(x.rows, z_.columns());
    dw_.resize(x.rows, w_.columns());
    heed::Options options;
    options.threads = c.threads;
    const double tokens = double(c.rows_of_batch(x.rows));
    loss_ = heed::index_loss<T>(
                projected.inputs(batch), projected.stage.mask_read(), index(batch),
                {nn::heads_of(dp_.view(), batch, sizes_.heads), nn::heads_of(dz_.view(), batch, 1),
                 nn::heads_of(dw_.view(), batch, sizes_.heads)},
                options) /
            tokens;
    const auto learn = [&](nn::Linear<T>& linear, nn::Matrix<T>& of) {
      for (Index n = 0; n < of.rows() * of.columns(); ++n) of.view().data[n] /= T(tokens);
      linear.backward(c, x, std::as_const(of).view(), {});
    };
    learn(index_query, dp_);
    learn(index_key, dz_);
    learn(index_weights, dw_);
  }
  void visit(const nn::Visitor<T>& f) override {
    projected.visit(f);
    nn::visit_part<T>("index_query", index_query, f);
    nn::visit_part<T>("index_key", index_key, f);
    nn::visit_part<T>("index_weights", index_weights, f);
  }
  [[nodiscard]] bool can_step() const override { return false; }
  [[nodiscard]] heed::KvCache<T> new_cache(Index batch) const override {
    return projected.new_cache(batch);
  }
  void step(nn::Context<T>&, Index, const nn::MatrixView<const T>&, const nn::MatrixView<T>&,
            heed::KvCache<T>&) override {
    heed::fail("zoo:dsa: a step was asked for, the layer takes whole sequences");
  }
  void restrict_to(const heed::Mask<T>& also) override { projected.restrict_to(also); }
  void set_dropout(double rate, std::uint64_t stream) override {
    projected.set_dropout(rate, stream);
  }
  void set_noise(double sigma, std::uint64_t stream) override {
    projected.set_noise(sigma, stream);
  }
  // The indexer's loss, behind backward().
  [[nodiscard]] std::vector<std::pair<std::string, double>> diagnostics() const override {
    if (!loss_) return {};
    return {{"index_loss", *loss_}};
  }

 private:
  Sizes sizes_;
  nn::Matrix<T> p_, z_, w_, dp_, dz_, dw_;
  std::optional<double> loss_;
};

// In plain loops: the row with the keys that the indexer chooses. p and w are of the row's token, z of all tokens.
inline PlainRow chosen(const PlainRow& row, const std::vector<Numbers>& p, const Numbers& w,
                       const std::vector<Numbers>& z, std::size_t count) {
  const Numbers scores = scores_by(row, [&](std::size_t j) {
    double sum = 0;
    for (std::size_t a = 0; a < p.size(); ++a)
      sum += w[a] * std::max(0.0, dot(p[a], z[std::size_t(row.positions[j])]));
    return sum;
  });
  return row.largest(count, 1, scores);
}

}  // namespace zoo::dsa
