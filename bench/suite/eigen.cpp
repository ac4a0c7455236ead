// SPDX-License-Identifier: Apache-2.0

// What a user writes without heed: plain Eigen matrices, the whole T x T map in memory, one thread.

#include "ops.hpp"

#include <Eigen/Core>

namespace heed_bench {

namespace {

template <class T>
using Matrix = Eigen::Matrix<T, Eigen::Dynamic, Eigen::Dynamic, Eigen::RowMajor>;

template <class T>
class EigenHead {
 public:
  explicit EigenHead(const BenchShape& s)
      : causal_(s.causal), scale_(T(1 / std::sqrt(double(s.dim)))) {
    std::uint64_t stream = 1;
    for (Matrix<T>* m : {&q_, &k_, &v_, &dout_}) {
      const std::vector<T> x = normals<T>(s.len * s.dim, stream++);
      *m = Eigen::Map<const Matrix<T>>(x.data(), s.len, s.dim);
    }
  }

  void forward() {
    weights_.noalias() = scale_ * (q_ * k_.transpose());
    if (causal_)
      for (Eigen::Index i = 0; i < weights_.rows(); ++i)
        weights_.row(i).tail(weights_.cols() - i - 1).setConstant(-heed::kInfinity<T>);
    for (Eigen::Index i = 0; i < weights_.rows(); ++i) {
      const Eigen::Index seen = causal_ ? i + 1 : weights_.cols();
      auto row = weights_.row(i);
      row.head(seen) = (row.head(seen).array() - row.head(seen).maxCoeff()).exp().matrix();
      row.tail(weights_.cols() - seen).setZero();
      row /= row.sum();
    }
    out_.noalias() = weights_ * v_;
  }

  void backward() {
    dv_.noalias() = weights_.transpose() * dout_;
    dscore_.noalias() = dout_ * v_.transpose();
    for (Eigen::Index i = 0; i < dscore_.rows(); ++i) {
      const T delta = dout_.row(i).dot(out_.row(i));
      dscore_.row(i) =
          (scale_ * weights_.row(i).array() * (dscore_.row(i).array() - delta)).matrix();
    }
    dq_.noalias() = dscore_ * k_;
    dk_.noalias() = dscore_.transpose() * q_;
  }

  [[nodiscard]] const Matrix<T>& out() const { return out_; }

 private:
  bool causal_;
  T scale_;
  Matrix<T> q_, k_, v_, dout_, weights_, out_, dscore_, dq_, dk_, dv_;
};

// Against heed on the same numbers.
template <class T>
bool agrees(const BenchShape& s) {
  EigenHead<T> head(s);
  head.forward();
  const heed::Shape shape{1, 1, s.len, s.dim};
  const auto q = normals<T>(s.len * s.dim, 1), k = normals<T>(s.len * s.dim, 2);
  const auto v = normals<T>(s.len * s.dim, 3);
  Matrix<T> out(s.len, s.dim);
  heed::forward(heed::ScaledDot<T>{},
                heed::Inputs<T>{{q.data(), shape}, {k.data(), shape}, {v.data(), shape}, {}},
                s.causal ? heed::causal<T>() : heed::Mask<T>{}, heed::TensorView<T>(out));
  return double((out - head.out()).cwiseAbs().maxCoeff()) < (sizeof(T) == 4 ? 1e-4 : 1e-12);
}

template <class T>
void add(const char* dtype) {
  for (const BenchShape& s : kShapes)
    for (const bool backward : {false, true}) {
      const std::string name =
          std::string("naive-eigen") + (backward ? "/backward/" : "/forward/") + dtype + "/" + s.text();
      configure(benchmark::RegisterBenchmark(name.c_str(), [=](benchmark::State& state) {
        if (!agrees<T>({1, 70, s.dim, s.causal})) {
          state.SkipWithError("differs from heed");
          return;
        }
        EigenHead<T> head(s);
        head.forward();
        for (auto _ : state)
          for (Index h = 0; h < s.heads; ++h) {
            if (backward)
              head.backward();
            else
              head.forward();
          }
        report_rate(state, s, backward);
      }));
    }
}

}  // namespace

void add_eigen() {
  add<float>("float");
  add<double>("double");
}

}  // namespace heed_bench
