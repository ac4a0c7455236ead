// SPDX-License-Identifier: Apache-2.0
#pragma once

// LayerNorm and RMSNorm of rows.
//
//   LayerNorm   n = (x - mean(x)) s,  s = 1 / sqrt(mean((x - mean(x))^2) + eps)    y = n w + b
//   RMSNorm     n = x s,              s = 1 / sqrt(mean(x^2) + eps)                y = n w
//
//   dx = s (g - mean(g) - n mean(g n)),  g = dy w      dw += sum of dy n      db += sum of dy
//
// where RMSNorm leaves mean(g) out; means are over the width, sums over the rows.
//
// Shapes    x, y, dy, dx (tokens, width), weight and bias (width). RMSNorm also takes a multiple of
//           its width, (tokens, heads * dim), and norms every head by itself, with the same weight.
// Accuracy  the variance is the mean square of the differences from the mean.
// Bounds    statistics are taken in Real, where squares overflow for |x| above 1e18 (float).
// Results   do not depend on the number of threads, not in their last bit: 64 rows at a time are
//           summed into the weights' gradients, in the order of rows.

#include <heed/core/parallel.hpp>
#include <heed/nn/multiply.hpp>
#include <heed/nn/weight.hpp>

#include <cmath>

namespace heed {
inline namespace HEED_ABI {
namespace nn {

namespace detail {

// Reads a value of type S: a pack, or, behind the last whole pack of a row, a single Real.
template <class S, class Real>
[[nodiscard]] inline S read(const Real* from) {
  if constexpr (IsPack<S>::value)
    return S::load(from);
  else
    return *from;
}
inline void write(float value, float* to) { *to = value; }
inline void write(double value, double* to) { *to = value; }
template <class Real>
inline void write(Pack<Real> value, Real* to) {
  value.store(to);
}

// Calls body(S(), j) for all columns; S is the type of the columns from j on: a pack of them, or a single one.
template <class Real, class Body>
inline void for_columns(Index width, const Body& body) {
  Index j = 0;
  for (; j + kLanes<Real> <= width; j += kLanes<Real>) body(Pack<Real>(), j);
  for (; j < width; ++j) body(Real(), j);
}

// The mean of term(S(), j) over all columns. Four chains of sums: an addition need not wait for the one before.
template <class Real, class Term>
[[nodiscard]] inline Real mean_over(Index width, const Term& term) {
  constexpr Index W = kLanes<Real>, chains = 4;
  Pack<Real> sums[chains] = {Real(0), Real(0), Real(0), Real(0)};
  Real rest = 0;
  Index j = 0;
  for (; j + chains * W <= width; j += chains * W)
#pragma GCC unroll 4
    for (Index k = 0; k < chains; ++k) sums[k] += term(Pack<Real>(), j + k * W);
  for (; j + W <= width; j += W) sums[0] += term(Pack<Real>(), j);
  for (; j < width; ++j) rest += term(Real(), j);
  return (sum_lanes((sums[0] + sums[1]) + (sums[2] + sums[3])) + rest) / Real(width);
}

// The formula of both norms on one group of `width` columns.
template <class Real>
struct GroupNorm {
  Index width;
  Real eps;
  bool centred;               // true for LayerNorm: the mean is subtracted
  const Real *weight, *bias;  // either may be null

  struct Statistics {
    Real mean, scale;
  };
  [[nodiscard]] Statistics statistics(const Real* x) const {
    const auto value = [&](auto s, Index j) { return read<decltype(s)>(x + j); };
    const Real mean = centred ? mean_over<Real>(width, value) : Real(0);
    const Real square = mean_over<Real>(width, [&](auto s, Index j) {
      const auto difference = value(s, j) - mean;
      return difference * difference;
    });
    return {mean, Real(1) / std::sqrt(square + eps)};
  }

  void forward(const Real* x, Real* y) const {
    const Statistics at = statistics(x);
    for_columns<Real>(width, [&](auto s, Index j) {
      using S = decltype(s);
      S value = (read<S>(x + j) - at.mean) * at.scale;
      if (weight) value = value * read<S>(weight + j);
      if (bias) value = value + read<S>(bias + j);
      write(value, y + j);
    });
  }

  // Adds to the gradients of weight and bias; writes dx or adds to it. All three may be null.
  void backward(const Real* x, const Real* dy, Real* dx, Into into, Real* dweight,
                Real* dbias) const {
    const Statistics at = statistics(x);
    const auto normal = [&](auto s, Index j) {
      return (read<decltype(s)>(x + j) - at.mean) * at.scale;
    };
    const auto weighted = [&](auto s, Index j) {
      using S = decltype(s);
      return weight ? read<S>(dy + j) * read<S>(weight + j) : read<S>(dy + j);
    };
    const Real along =
        mean_over<Real>(width, [&](auto s, Index j) { return weighted(s, j) * normal(s, j); });
    const Real offset = centred ? mean_over<Real>(width, weighted) : Real(0);
    for_columns<Real>(width, [&](auto s, Index j) {
      using S = decltype(s);
      const S n = normal(s, j), d = read<S>(dy + j);
      const S change = (weighted(s, j) - offset - n * along) * at.scale;
      if (dweight) write(S(read<S>(dweight + j) + d * n), dweight + j);
      if (dbias) write(S(read<S>(dbias + j) + d), dbias + j);
      if (dx) write(into == Into::add ? S(read<S>(dx + j) + change) : change, dx + j);
    });
  }
};

// Number of rows whose weight gradients are summed by one worker at a time.
inline constexpr Index kNormRows = 64;

// Calls body(block, first row, row behind the last) for each block of kNormRows rows.
template <class Real, class Body>
void for_norm_blocks(Context<Real>& c, Index rows, Index columns, const Body& body) {
  constexpr Index numbers_per_thread = 100000;
  const Index worth = 1 + rows * columns / numbers_per_thread;
  const Index threads = std::min<Index>(resolve_threads(c.threads), worth);
  parallel_for((rows + kNormRows - 1) / kNormRows, int(threads),
               [&](Index b) { body(b, b * kNormRows, std::min(rows, (b + 1) * kNormRows)); });
}

template <class Real>
void norm_forward(Context<Real>& c, const GroupNorm<Real>& norm, const MatrixView<const Real>& x,
                  const MatrixView<Real>& y) {
  for_norm_blocks(c, x.rows, x.columns, [&](Index, Index first, Index last) {
    for (Index r = first; r < last; ++r)
      for (Index j = 0; j < x.columns; j += norm.width) norm.forward(x.row(r) + j, y.row(r) + j);
  });
}

template <class Real>
void norm_backward(Context<Real>& c, const GroupNorm<Real>& norm, const MatrixView<const Real>& x,
                   const MatrixView<const Real>& dy, const MatrixView<Real>& dx, Into into,
                   Real* dweight, Real* dbias) {
  const Index width = norm.width, learned = dweight || dbias ? 2 * width : 0;
  Matrix<Real> sums((x.rows + kNormRows - 1) / kNormRows, learned);
  for_norm_blocks(c, x.rows, x.columns, [&](Index block, Index first, Index last) {
    Real* sum = sums.view().row(block);
    std::fill(sum, sum + learned, Real(0));
    for (Index r = first; r < last; ++r)
      for (Index j = 0; j < x.columns; j += width)
        norm.backward(x.row(r) + j, dy.row(r) + j, dx.given() ? dx.row(r) + j : nullptr, into,
                      dweight ? sum : nullptr, dbias ? sum + width : nullptr);
  });
  for (Index block = 0; block < sums.rows(); ++block) {
    const Real* sum = sums.view().row(block);
    for (Index j = 0; dweight && j < width; ++j) dweight[j] += sum[j];
    for (Index j = 0; dbias && j < width; ++j) dbias[j] += sum[width + j];
  }
}

inline void require_norm(Index width, double eps, const char* norm) {
  require(width > 0, norm, ": width is ", width, ", it must be positive");
  require(eps > 0, norm, ": eps is ", eps, ", it must be positive");
}

}  // namespace detail

template <class Real>
class LayerNorm {
 public:
  Weight<Real> weight, bias;

  LayerNorm() = default;
  explicit LayerNorm(Index width, double eps = 1e-5) : eps_(Real(eps)) {
    detail::require_norm(width, eps, "LayerNorm");
    weight = bias = Weight<Real>({width});
    std::fill(weight.value.data(), weight.value.data() + width, Real(1));
  }

  [[nodiscard]] Index width() const { return weight.value.size(); }

  // y may be x.
  void forward(Context<Real>& c, const MatrixView<const Real>& x, const MatrixView<Real>& y) const {
    require_extents(x, x.rows, width(), "LayerNorm::forward", "x");
    require_extents(y, x.rows, width(), "LayerNorm::forward", "y");
    detail::norm_forward(c, norm(), x, y);
  }

  // Adds to the weights' gradients; writes dx, or adds to it, unless it is not given. dx may be dy.
  void backward(Context<Real>& c, const MatrixView<const Real>& x, const MatrixView<const Real>& dy,
                const MatrixView<Real>& dx, Into into = Into::overwrite) {
    require_extents(x, x.rows, width(), "LayerNorm::backward", "x");
    require_extents(dy, x.rows, width(), "LayerNorm::backward", "dy");
    if (dx.given()) require_extents(dx, x.rows, width(), "LayerNorm::backward", "dx");
    detail::norm_backward(c, norm(), x, dy, dx, into, weight.grad.data(), bias.grad.data());
  }

  void visit(const Visitor<Real>& f) {
    visit_weight("weight", weight, f);
    visit_weight("bias", bias, f);
  }

 private:
  [[nodiscard]] detail::GroupNorm<Real> norm() const {
    return {width(), eps_, true, weight.value.data(), bias.value.data()};
  }
  Real eps_ = Real(1e-5);
};

template <class Real>
class RMSNorm {
 public:
  Weight<Real> weight;

  RMSNorm() = default;
  explicit RMSNorm(Index width, double eps = 1e-6, bool with_weight = true)
      : width_(width), eps_(Real(eps)) {
    detail::require_norm(width, eps, "RMSNorm");
    if (!with_weight) return;
    weight = Weight<Real>({width});
    std::fill(weight.value.data(), weight.value.data() + width, Real(1));
  }

  [[nodiscard]] Index width() const { return width_; }

  // y may be x.
  void forward(Context<Real>& c, const MatrixView<const Real>& x, const MatrixView<Real>& y) const {
    require_groups(x, "RMSNorm::forward");
    require_extents(y, x.rows, x.columns, "RMSNorm::forward", "y");
    detail::norm_forward(c, norm(), x, y);
  }

  // Adds to the weight's gradient; writes dx, or adds to it, unless it is not given. dx may be dy.
  void backward(Context<Real>& c, const MatrixView<const Real>& x, const MatrixView<const Real>& dy,
                const MatrixView<Real>& dx, Into into = Into::overwrite) {
    require_groups(x, "RMSNorm::backward");
    require_extents(dy, x.rows, x.columns, "RMSNorm::backward", "dy");
    if (dx.given()) require_extents(dx, x.rows, x.columns, "RMSNorm::backward", "dx");
    detail::norm_backward(c, norm(), x, dy, dx, into, weight.given() ? weight.grad.data() : nullptr,
                          static_cast<Real*>(nullptr));
  }

  void visit(const Visitor<Real>& f) { visit_weight("weight", weight, f); }

 private:
  void require_groups(const MatrixView<const Real>& x, const char* where) const {
    require(width_ > 0 && x.columns % width_ == 0, where, ": x has ", x.columns,
            " columns, it must have a multiple of the width ", width_);
  }
  [[nodiscard]] detail::GroupNorm<Real> norm() const {
    return {width_, eps_, false, weight.given() ? weight.value.data() : nullptr, nullptr};
  }
  Index width_ = 0;
  Real eps_ = Real(1e-6);
};

}  // namespace nn
}  // namespace HEED_ABI
}  // namespace heed
