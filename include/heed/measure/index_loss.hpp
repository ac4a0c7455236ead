// SPDX-License-Identifier: Apache-2.0
#pragma once

// The loss that teaches an indexer (select_indexed() in measure/select.hpp) to choose as attention weighs. With p_i the mean over
// heads of the weights of query i, a constant, I_ij = sum_a w_ia relu(q_ia . k_j), and r_i = softmax of I_i over the same keys:
//
//   loss = sum over batches and queries of sum_j p_ij (log p_ij - log r_ij)        dL/dI_ij = r_ij - p_ij
//
// The keys of a row are those that `mask` shows: all earlier ones while the indexer warms up, then those that it has chosen,
// mask & block_lists<float>(lists).
//
// Source   DeepSeek-V3.2, the training of its lightning indexer
// Bounds   a row that sees no key has no loss
// Accuracy sums of one row are taken in the keys' order, those of keys and of the loss in the queries' order: the same bits on any
//          number of threads
// Memory   32 rows of scores, and a row per thread
// Cost     the scores of all visible pairs of all heads and index heads; backward of the indexer as much again
// Errors   std::invalid_argument where tensors do not fit

#include <heed/core/parallel.hpp>
#include <heed/measure/select.hpp>

namespace heed {
inline namespace HEED_ABI {

// Gradients of an indexer's tensors, of their shapes, which are written.
template <class Real>
struct IndexGradients {
  TensorView<Real> query, key, weights;
};

namespace detail {

template <class Real>
class IndexLoss {
 public:
  IndexLoss(const Inputs<Real>& in, const Mask<Real>& mask, const IndexInputs<Real>& index,
            const IndexGradients<Real>& grads, const Options& options)
      : index_inputs_{index.query, index.key, {}},
        rows_(in, mask, options.threads, kWhere),
        index_(positioned(index.first_query), mask, options.threads, kWhere),
        copies_(options.threads),
        weights_(copies_.read(index.weights)),
        grads_(grads),
        threads_(resolve_threads(options.threads)),
        scale_(Real(options.scale.value_or(1 / std::sqrt(double(rows_.geometry().dim_qk))))) {
    const Geometry &g = rows_.geometry(), &of = index_.geometry();
    require(g.batch == of.batch && g.len_q == of.len_q && g.len_kv == of.len_kv &&
                in.first_query == index.first_query && of.kv_heads == 1,
            kWhere, ": the indexer's query has shape ", index.query.shape(), ", its key ",
            index.key.shape(),
            "; batch, lengths and first_query must be those of the call, and "
            "one head must serve all");
    const Shape shapes[] = {
        index.query.shape(), index.key.shape(), {of.batch, of.heads, of.len_q, 1}};
    require(weights_.shape() == shapes[2], kWhere, ": weights has shape ", weights_.shape(),
            ", it must be ", shapes[2]);
    const TensorView<Real> views[] = {grads.query, grads.key, grads.weights};
    for (int n = 0; n < 3; ++n)
      require(!views[n].given() || views[n].shape() == shapes[n], kWhere, ": a gradient has shape ",
              views[n].shape(), ", it must be ", shapes[n]);
  }

  [[nodiscard]] double run() {
    const Geometry& g = rows_.geometry();
    zero(grads_.key);
    slopes_.resize(std::size_t(kRows * g.len_kv));
    losses_.resize(std::size_t(kRows));
    double loss = 0;
    for (Index b = 0; b < g.batch; ++b)
      for (Index first = 0; first < g.len_q; first += kRows) {
        const Index rows = std::min(kRows, g.len_q - first);
        parallel_for(rows, threads_, [&](Index i) { take_row(b, first + i, i); });
        for (Index i = 0; i < rows; ++i) loss += losses_[std::size_t(i)];
        if (grads_.key.given()) add_to_keys(b, first, rows);
      }
    return loss;
  }

 private:
  static constexpr const char* kWhere = "heed::index_loss";
  static constexpr Index kRows = 32;

  [[nodiscard]] const Inputs<Real>& positioned(Index first_query) {
    index_inputs_.first_query = first_query;
    return index_inputs_;
  }
  static void zero(const TensorView<Real>& view) {
    if (!view.given()) return;
    for_each_row(view.shape(), [&](Index b, Index h, Index t) {
      std::fill_n(view.row(b, h, t), view.shape().dim, Real(0));
    });
  }
  // Loss and dL/dI of query i, row n of the block, and the gradients of its index heads.
  void take_row(Index b, Index i, Index n) {
    const Geometry &g = rows_.geometry(), &of = index_.geometry();
    const auto row = [&] { return std::vector<Real>(std::size_t(g.len_kv), -kInfinity<Real>); };
    std::vector<Real> p(std::size_t(g.len_kv), Real(0)), r = row();
    for (Index h = 0; h < g.heads; ++h) {
      std::vector<Real> w = row();
      rows_.dots(b, h, i, w.data());
      to_weights(w, scale_);
      for (Index j = 0; j < g.len_kv; ++j) p[std::size_t(j)] += w[std::size_t(j)] / Real(g.heads);
    }
    std::vector<std::vector<Real>> dots;
    for (Index a = 0; a < of.heads; ++a) {
      index_.dots(b, a, i, dots.emplace_back(row()).data());
      for (Index j = 0; j < g.len_kv; ++j) {
        const Real dot = dots.back()[std::size_t(j)];
        if (dot == -kInfinity<Real>) continue;  // hidden
        Real& score = r[std::size_t(j)];
        score = (a == 0 ? Real(0) : score) + weights_.row(b, a, i)[0] * std::max(dot, Real(0));
      }
    }
    to_weights(r, Real(1));
    Real* const slope = slopes_.data() + n * g.len_kv;
    double loss = 0;
    for (Index j = 0; j < g.len_kv; ++j) {
      const double own = double(p[std::size_t(j)]);
      slope[j] = r[std::size_t(j)] - p[std::size_t(j)];
      if (own > 0) loss += own * (std::log(own) - std::log(double(r[std::size_t(j)])));
    }
    losses_[std::size_t(n)] = loss;
    for (Index a = 0; a < of.heads; ++a) {
      Real dweight = 0;
      std::vector<Real> dquery(std::size_t(of.dim_qk), Real(0));
      for (Index j = 0; j < g.len_kv; ++j) {
        const Real dot = dots[std::size_t(a)][std::size_t(j)];
        if (!(dot > Real(0))) continue;
        dweight += slope[j] * dot;
        for (Index c = 0; c < of.dim_qk; ++c)
          dquery[std::size_t(c)] += slope[j] * index_.key().row(b, 0, j)[c];
      }
      const Real weight = weights_.row(b, a, i)[0];
      if (grads_.weights.given()) grads_.weights.row(b, a, i)[0] = dweight;
      for (Index c = 0; c < of.dim_qk && grads_.query.given(); ++c)
        grads_.query.row(b, a, i)[c] = weight * dquery[std::size_t(c)];
    }
  }
  // dk_j += sum over the block's queries and the index heads of w dL/dI_ij q where q . k_j > 0
  void add_to_keys(Index b, Index first, Index rows) const {
    const Geometry& of = index_.geometry();
    parallel_for(of.len_kv, threads_, [&](Index j) {
      Real* const to = grads_.key.row(b, 0, j);
      for (Index i = 0; i < rows; ++i) {
        const Real slope = slopes_[std::size_t(i * of.len_kv + j)];
        for (Index a = 0; a < of.heads && slope != Real(0); ++a) {
          if (!(index_.dot(b, a, first + i, index_.key().row(b, 0, j)) > Real(0))) continue;
          const Real* const query = index_.query(b, a, first + i);
          const Real by = slope * weights_.row(b, a, first + i)[0];
          for (Index c = 0; c < of.dim_qk; ++c) to[c] += by * query[c];
        }
      }
    });
  }

  Inputs<Real> index_inputs_;
  ChoiceRows<Real> rows_, index_;
  WidenedTensors<Real> copies_;
  TensorView<const Real> weights_;
  IndexGradients<Real> grads_;
  int threads_;
  Real scale_;
  std::vector<Real> slopes_;  // [row of the block][key]
  std::vector<double> losses_;
};

}  // namespace detail

// The loss, and the gradients of the indexer's tensors where views are given. `in` has the call's query and key; its scale is that of
// options, 1 / sqrt(dim) by default.
template <class Real>
[[nodiscard]] double index_loss(const Inputs<Real>& in,
                                const std::type_identity_t<Mask<Real>>& mask,
                                const std::type_identity_t<IndexInputs<Real>>& index,
                                const std::type_identity_t<IndexGradients<Real>>& grads = {},
                                const Options& options = {}) {
  return detail::IndexLoss<Real>(in, mask, index, grads, options).run();
}

}  // namespace HEED_ABI
}  // namespace heed
