// SPDX-License-Identifier: Apache-2.0
#pragma once

// One layer of a language model, around any attention layer.
//
//   x1 = x  + drop(out(attention(norm1(x))))      out only where the attention's rows are narrower than x
//   y  = x1 + drop(mlp(norm2(x1)))

#include <heed/nn/attention_layer.hpp>
#include <heed/nn/dropout.hpp>
#include <heed/nn/elementwise.hpp>
#include <heed/nn/mlp.hpp>
#include <heed/nn/norm.hpp>

#include <optional>
#include <variant>

namespace heed {
inline namespace HEED_ABI {
namespace nn {

struct BlockNames {
  std::string norm1 = "ln1", attention = "attn", out = "out", norm2 = "ln2", mlp = "mlp";
};

enum class NormKind { layer, rms };

// A LayerNorm or an RMSNorm over whole rows.
template <class Real>
class Norm {
 public:
  Norm(NormKind kind, Index width) {
    if (kind == NormKind::layer)
      norm_.template emplace<LayerNorm<Real>>(width);
    else
      norm_.template emplace<RMSNorm<Real>>(width);
  }
  void forward(Context<Real>& c, const MatrixView<const Real>& x, const MatrixView<Real>& y) const {
    std::visit([&](const auto& norm) { norm.forward(c, x, y); }, norm_);
  }
  void backward(Context<Real>& c, const MatrixView<const Real>& x, const MatrixView<const Real>& dy,
                const MatrixView<Real>& dx, Into into) {
    std::visit([&](auto& norm) { norm.backward(c, x, dy, dx, into); }, norm_);
  }
  void visit(const Visitor<Real>& f) {
    std::visit([&](auto& norm) { norm.visit(f); }, norm_);
  }

 private:
  std::variant<LayerNorm<Real>, RMSNorm<Real>> norm_{LayerNorm<Real>(1)};
};

template <class Real>
class TransformerBlock {
 public:
  // `out` projects the attention's rows to the width, where they are narrower.
  TransformerBlock(BlockNames names, NormKind norm, Index width,
                   std::unique_ptr<AttentionLayer<Real>> attention, Mlp<Real> mlp,
                   std::optional<Linear<Real>> out = {})
      : names_(std::move(names)),
        norm1_(norm, width),
        norm2_(norm, width),
        attention_(std::move(attention)),
        mlp_(std::move(mlp)),
        out_(std::move(out)) {}

  double dropout = 0;        // rate for the outputs of attention and MLP
  std::uint64_t stream = 0;  // first of the block's two streams of random numbers

  [[nodiscard]] AttentionLayer<Real>& attention() { return *attention_; }
  [[nodiscard]] const AttentionLayer<Real>& attention() const { return *attention_; }
  [[nodiscard]] Mlp<Real>& mlp() { return mlp_; }

  // Number of rows of y and dy per row of x: see AttentionLayer::scored_steps().
  [[nodiscard]] Index rows_per_token(const Context<Real>& c) const {
    return c.training ? attention_->scored_steps() : 1;
  }

  // y must not be x.
  void forward(Context<Real>& c, Index batch, const MatrixView<const Real>& x,
               const MatrixView<Real>& y) {
    run(c, x, y, [&](const MatrixView<Real>& mixed) {
      attention_->forward(c, batch, normed1_.view(), mixed);
    });
  }
  // The forward pass of the tokens that follow those in the cache.
  void step(Context<Real>& c, Index batch, const MatrixView<const Real>& x,
            const MatrixView<Real>& y, KvCache<Real>& cache) {
    run(c, x, y, [&](const MatrixView<Real>& mixed) {
      attention_->step(c, batch, normed1_.view(), mixed, cache);
    });
  }

  // x is that of forward(); dx may be the first rows of dy.
  void backward(Context<Real>& c, Index batch, const MatrixView<const Real>& x,
                const MatrixView<const Real>& dy, const MatrixView<Real>& dx) {
    for (Matrix<Real>* m : {&dresidual_, &dnormed_}) m->resize(dy.rows, dy.columns);
    mlp_.backward(c, normed2_.view(), before_dropout(c, 1, dy), dnormed_.view(), Into::overwrite);
    copy<Real>(c, dy, dresidual_.view());
    norm2_.backward(c, residual_.view(), dnormed_.view(), dresidual_.view(), Into::add);

    const MatrixView<const Real> dbranch = before_dropout(c, 0, dresidual_.view());
    MatrixView<const Real> dmixed = dbranch;
    if (out_) {
      dmixed_.resize(dy.rows, out_->in());
      out_->backward(c, mixed_.view(), dbranch, dmixed_.view());
      dmixed = dmixed_.view();
    }
    dnormed_.resize(x.rows, x.columns);
    attention_->backward(c, batch, normed1_.view(), dmixed, dnormed_.view());
    copy<Real>(c, dresidual_.view().row_range(0, x.rows), dx);
    for (Index first = x.rows; first < dy.rows; first += x.rows)
      add<Real>(c, dresidual_.view().row_range(first, x.rows), dx);
    norm1_.backward(c, x, dnormed_.view(), dx, Into::add);
  }

  void visit(const Visitor<Real>& f) {
    visit_part<Real>(names_.norm1, norm1_, f);
    visit_part<Real>(names_.attention, *attention_, f);
    if (out_) visit_part<Real>(names_.out, *out_, f);
    visit_part<Real>(names_.norm2, norm2_, f);
    visit_part<Real>(names_.mlp, mlp_, f);
  }
  void keep_in_range() { attention_->keep_in_range(); }
  void visit_state(const StateVisitor<Real>& f) {
    visit_state_of<Real>(names_.attention, *attention_, f);
  }

 private:
  template <class Attend>
  void run(Context<Real>& c, const MatrixView<const Real>& x, const MatrixView<Real>& y,
           Attend&& attend) {
    normed1_.resize(x.rows, x.columns);
    for (Matrix<Real>* m : {&residual_, &normed2_}) m->resize(y.rows, y.columns);
    norm1_.forward(c, x, normed1_.view());
    if (out_) {
      mixed_.resize(y.rows, out_->in());
      attend(mixed_.view());
      out_->forward(c, mixed_.view(), residual_.view());
    } else {
      attend(residual_.view());
    }
    apply_dropout(c, 0, residual_.view(), residual_.view());
    for (Index first = 0; first < y.rows; first += x.rows)
      add<Real>(c, x, residual_.view().row_range(first, x.rows));
    norm2_.forward(c, residual_.view(), normed2_.view());
    mlp_.forward(c, normed2_.view(), y);
    apply_dropout(c, 1, y, y);
    add<Real>(c, residual_.view(), y);
  }
  // The gradient of what a branch's dropout read, from that of what it left.
  [[nodiscard]] MatrixView<const Real> before_dropout(Context<Real>& c, std::uint64_t branch,
                                                      const MatrixView<const Real>& dy) {
    if (!drops(c, dropout)) return dy;
    dbranch_.resize(dy.rows, dy.columns);
    apply_dropout(c, branch, dy, dbranch_.view());
    return dbranch_.view();
  }
  void apply_dropout(Context<Real>& c, std::uint64_t branch, const MatrixView<const Real>& from,
                     const MatrixView<Real>& to) const {
    nn::apply_dropout(c, dropout, stream + branch, from, to);
  }

  BlockNames names_;
  Norm<Real> norm1_, norm2_;
  std::unique_ptr<AttentionLayer<Real>> attention_;
  Mlp<Real> mlp_;
  std::optional<Linear<Real>> out_;
  Matrix<Real> normed1_, mixed_, residual_, normed2_;
  Matrix<Real> dresidual_, dbranch_, dnormed_, dmixed_;
};

}  // namespace nn
}  // namespace HEED_ABI
}  // namespace heed
