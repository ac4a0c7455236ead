// SPDX-License-Identifier: Apache-2.0

// Attention with plain Eigen matrices, the whole T x T map in memory, one thread.

#include "peer.hpp"
#include "peers.hpp"

#include <Eigen/Core>

namespace heed_bench {

namespace {

template <class T>
class EigenPeer {
 public:
  static constexpr int kThreads = 1;
  static constexpr bool kWholeMap = true;

  explicit EigenPeer(const Case& c) : heads(c), weights_(std::size_t(c.heads)) {
    Eigen::setNbThreads(kThreads);  // its products otherwise take all that OpenMP has
  }

  void forward() {
    const Case& c = heads.shape;
    for (Index h = 0; h < c.heads; ++h) {
      Matrix& weights = weights_[std::size_t(h)];
      weights.noalias() = heads.scale() * (queries(heads.q, h) * keys(heads.k, h).transpose());
      for (Index i = 0; i < c.len_q; ++i) {
        const Index seen = heads.causal() ? i + 1 : c.len_kv;
        auto row = weights.row(i);
        row.head(seen) = (row.head(seen).array() - row.head(seen).maxCoeff()).exp().matrix();
        row.tail(c.len_kv - seen).setZero();
        row /= row.sum();
      }
      outputs(heads.out, h).noalias() = weights * values(heads.v, h);
    }
  }

  void backward() {
    for (Index h = 0; h < heads.shape.heads; ++h) {
      const Matrix& weights = weights_[std::size_t(h)];
      const auto dout = outputs(heads.dout, h), out = outputs(heads.out, h);
      values(heads.dv, h).noalias() = weights.transpose() * dout;
      dscore_.noalias() = dout * values(heads.v, h).transpose();
      for (Index i = 0; i < dscore_.rows(); ++i)
        dscore_.row(i) = (heads.scale() * weights.row(i).array() *
                          (dscore_.row(i).array() - dout.row(i).dot(out.row(i))))
                             .matrix();
      queries(heads.dq, h).noalias() = dscore_ * keys(heads.k, h);
      keys(heads.dk, h).noalias() = dscore_.transpose() * queries(heads.q, h);
    }
  }

  Heads<T> heads;

 private:
  using Matrix = Eigen::Matrix<T, Eigen::Dynamic, Eigen::Dynamic, Eigen::RowMajor>;
  using Map = Eigen::Map<Matrix>;
  [[nodiscard]] static Map head(std::vector<T>& x, Index h, Index rows, Index columns) {
    return Map(x.data() + h * rows * columns, rows, columns);
  }
  [[nodiscard]] Map queries(std::vector<T>& x, Index h) const {
    return head(x, h, heads.shape.len_q, heads.shape.dim);
  }
  [[nodiscard]] Map keys(std::vector<T>& x, Index h) const {
    return head(x, h, heads.shape.len_kv, heads.shape.dim);
  }
  [[nodiscard]] Map values(std::vector<T>& x, Index h) const {
    return head(x, h, heads.shape.len_kv, heads.shape.dim_v);
  }
  [[nodiscard]] Map outputs(std::vector<T>& x, Index h) const {
    return head(x, h, heads.shape.len_q, heads.shape.dim_v);
  }

  std::vector<Matrix> weights_;
  Matrix dscore_;
};

}  // namespace

void add_eigen() {
  add_peer<EigenPeer<float>, float>("naive-eigen", "float");
  add_peer<EigenPeer<double>, double>("naive-eigen", "double");
}

}  // namespace heed_bench
