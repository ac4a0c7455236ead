// SPDX-License-Identifier: Apache-2.0

// Attention in blocks over OpenBLAS: products by cblas_?gemm on blocks of queries and keys, with a
// running softmax (Dao et al. 2022). Memory is linear in the length, as in heed.

#include "peer.hpp"
#include "peers.hpp"

#include <Eigen/Core>

#include <cblas.h>

namespace heed_bench {

namespace {

constexpr CBLAS_TRANSPOSE kAsIs = CblasNoTrans, kTransposed = CblasTrans;

// Row-major C = alpha op(A) op(B) + beta C; leading dimensions are the rows' lengths.
inline void gemm(CBLAS_TRANSPOSE a_as, CBLAS_TRANSPOSE b_as, Index m, Index n, Index k, float alpha,
                 const float* a, Index lda, const float* b, Index ldb, float beta, float* c,
                 Index ldc) {
  cblas_sgemm(CblasRowMajor, a_as, b_as, int(m), int(n), int(k), alpha, a, int(lda), b, int(ldb),
              beta, c, int(ldc));
}
inline void gemm(CBLAS_TRANSPOSE a_as, CBLAS_TRANSPOSE b_as, Index m, Index n, Index k,
                 double alpha, const double* a, Index lda, const double* b, Index ldb, double beta,
                 double* c, Index ldc) {
  cblas_dgemm(CblasRowMajor, a_as, b_as, int(m), int(n), int(k), alpha, a, int(lda), b, int(ldb),
              beta, c, int(ldc));
}

template <class T>
class BlasPeer {
 public:
  static constexpr int kThreads = 1 << 10;
  static constexpr bool kWholeMap = false;

  explicit BlasPeer(const Case& c)
      : heads(c),
        lse_(std::size_t(c.heads * c.len_q)),
        scores_(kRows * kKeys),
        dscores_(kRows * kKeys) {}

  void forward() {
    openblas_set_num_threads(heads.shape.threads);
    for_blocks([&](const Block& b) { forward(b); });
  }
  void backward() {
    openblas_set_num_threads(heads.shape.threads);
    for (auto* x : {&heads.dq, &heads.dk, &heads.dv}) std::fill(x->begin(), x->end(), T(0));
    for_blocks([&](const Block& b) { backward(b); });
  }

  Heads<T> heads;

 private:
  static constexpr Index kRows = 256, kKeys = 256;
  using Rows = Eigen::Array<T, Eigen::Dynamic, 1>;
  using Matrix = Eigen::Array<T, Eigen::Dynamic, Eigen::Dynamic, Eigen::RowMajor>;

  struct Block {
    Index head, row, rows;
  };

  template <class Body>
  void for_blocks(Body&& body) {
    const Case& c = heads.shape;
    for (Index h = 0; h < c.heads; ++h)
      for (Index i = 0; i < c.len_q; i += kRows) body(Block{h, i, std::min(kRows, c.len_q - i)});
  }
  [[nodiscard]] Index keys_end(const Block& b) const {
    return heads.causal() ? std::min(heads.shape.len_kv, b.row + b.rows) : heads.shape.len_kv;
  }
  [[nodiscard]] T* query(std::vector<T>& x, const Block& b, Index width) {
    return x.data() + (b.head * heads.shape.len_q + b.row) * width;
  }
  [[nodiscard]] T* key(std::vector<T>& x, const Block& b, Index j, Index width) {
    return x.data() + (b.head * heads.shape.len_kv + j) * width;
  }

  // Scores of a block against keys j ... j + n - 1, -infinity where hidden.
  [[nodiscard]] Eigen::Map<Matrix> scores(const Block& b, Index j, Index n) {
    const Index d = heads.shape.dim;
    gemm(kAsIs, kTransposed, b.rows, n, d, heads.scale(), query(heads.q, b, d), d,
         key(heads.k, b, j, d), d, T(0), scores_.data(), n);
    Eigen::Map<Matrix> s(scores_.data(), b.rows, n);
    if (heads.causal())
      for (Index r = std::max<Index>(0, j - b.row); r < b.rows; ++r) {
        const Index seen = b.row + r - j + 1;
        if (seen < n) s.row(r).tail(n - seen).setConstant(-heed::kInfinity<T>);
      }
    if (heads.causal())
      for (Index r = 0; r < std::min(b.rows, j - b.row); ++r)
        s.row(r).setConstant(-heed::kInfinity<T>);
    return s;
  }

  void forward(const Block& b) {
    const Index dv = heads.shape.dim_v;
    Rows top = Rows::Constant(b.rows, std::numeric_limits<T>::lowest()), sum = Rows::Zero(b.rows);
    Eigen::Map<Matrix> out(query(heads.out, b, dv), b.rows, dv);
    out.setZero();
    for (Index j = 0; j < keys_end(b); j += kKeys) {
      const Index n = std::min(kKeys, keys_end(b) - j);
      auto s = scores(b, j, n);
      const Rows higher = top.max(s.rowwise().maxCoeff());
      const Rows rescale = (top - higher).exp();
      top = higher;
      s = (s.colwise() - top).exp();
      sum = sum * rescale + s.rowwise().sum();
      out.colwise() *= rescale;
      gemm(kAsIs, kAsIs, b.rows, dv, n, T(1), s.data(), n, key(heads.v, b, j, dv), dv, T(1),
           out.data(), dv);
    }
    out.colwise() /= sum;
    Eigen::Map<Rows>(lse_.data() + b.head * heads.shape.len_q + b.row, b.rows) = top + sum.log();
  }

  void backward(const Block& b) {
    const Index d = heads.shape.dim, dv = heads.shape.dim_v;
    const Eigen::Map<Rows> lse(lse_.data() + b.head * heads.shape.len_q + b.row, b.rows);
    const Eigen::Map<Matrix> out(query(heads.out, b, dv), b.rows, dv),
        dout(query(heads.dout, b, dv), b.rows, dv);
    const Rows delta = (out * dout).rowwise().sum();
    for (Index j = 0; j < keys_end(b); j += kKeys) {
      const Index n = std::min(kKeys, keys_end(b) - j);
      auto weights = scores(b, j, n);
      weights = (weights.colwise() - lse).exp();
      Eigen::Map<Matrix> ds(dscores_.data(), b.rows, n);
      gemm(kTransposed, kAsIs, n, dv, b.rows, T(1), weights.data(), n, dout.data(), dv, T(1),
           key(heads.dv, b, j, dv), dv);
      gemm(kAsIs, kTransposed, b.rows, n, dv, T(1), dout.data(), dv, key(heads.v, b, j, dv), dv,
           T(0), ds.data(), n);
      ds = weights * (ds.colwise() - delta);
      gemm(kAsIs, kAsIs, b.rows, d, n, heads.scale(), ds.data(), n, key(heads.k, b, j, d), d, T(1),
           query(heads.dq, b, d), d);
      gemm(kTransposed, kAsIs, n, d, b.rows, heads.scale(), ds.data(), n, query(heads.q, b, d), d,
           T(1), key(heads.dk, b, j, d), d);
    }
  }

  std::vector<T> lse_, scores_, dscores_;
};

}  // namespace

void add_blas() {
  add_peer<BlasPeer<float>, float>("openblas-blocked", "float");
  add_peer<BlasPeer<double>, double>("openblas-blocked", "double");
}

}  // namespace heed_bench
