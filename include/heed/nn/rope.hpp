// SPDX-License-Identifier: Apache-2.0
#pragma once

// Rotary position embedding: pair m of a head at position p turns by the angle p theta^(-2m/dim).
//
//   (a, b) -> (a cos - b sin, a sin + b cos)
//
// The backward pass is the rotation by minus the angle.
//
// Shapes    x (batch * len, heads * dim); row r has position first_position + r % len, or its place in its packed sequence.
// Accuracy  angles, cosines and sines in double, rounded to Real.
// Cost      sqrt(len) dim cosines and as many sines a call: each is made of two table entries, one
//           for multiples of a step of about sqrt(len), one for the rest.
// Source    Su et al. 2021, "RoFormer", equation 34.

#include <heed/nn/elementwise.hpp>
#include <heed/nn/token_places.hpp>
#include <heed/simd/instructions.hpp>

#include <algorithm>
#include <cmath>
#include <utility>
#include <vector>

namespace heed {
inline namespace HEED_ABI {
namespace nn {

// The columns of a head that turn together: (2m, 2m + 1), or (m, m + dim / 2).
enum class RopePairs { interleaved, halves };
// Forward turns by the angle, backward by minus the angle.
enum class RopeDirection { forward, backward };

namespace detail {

// Cosines and sines of frequency times position, for `count` positions from `first` on, `stride` apart.
class AngleTable {
 public:
  AngleTable(const std::vector<double>& frequency, Index first, Index stride, Index count)
      : pairs_(Index(frequency.size())) {
    values_.reserve(std::size_t(2 * pairs_ * count));
    for (Index i = 0; i < count; ++i) {
      const double position = double(first + i * stride);
      for (const double f : frequency) values_.push_back(std::cos(position * f));
      for (const double f : frequency) values_.push_back(std::sin(position * f));
    }
  }
  [[nodiscard]] const double* cosines(Index i) const { return values_.data() + 2 * i * pairs_; }
  [[nodiscard]] const double* sines(Index i) const { return cosines(i) + pairs_; }

 private:
  Index pairs_;
  std::vector<double> values_;
};

// The pack with neighbouring lanes swapped: lanes 1, 0, 3, 2, ...
template <class Real, int... L>
[[nodiscard]] inline Pack<Real> swap_neighbours(Pack<Real> x, std::integer_sequence<int, L...>) {
  const auto swapped = __builtin_shufflevector(x.v, x.v, (L ^ 1)...);
  return Pack<Real>(typename Pack<Real>::Vector(swapped));
}

// Turns the pairs (m, m + dim / 2) of a head; cosine and sine have dim / 2 numbers.
template <class Real>
inline void rotate_half(Real* x, const Real* cosine, const Real* sine, Index pairs) {
  using P = Pack<Real>;
  Index m = 0;
  for (; m + kLanes<Real> <= pairs; m += kLanes<Real>) {
    const P a = P::load(x + m), b = P::load(x + pairs + m);
    const P cos = P::load(cosine + m), sin = P::load(sine + m);
    mul_add(a, cos, -(b * sin)).store(x + m);
    mul_add(a, sin, b * cos).store(x + pairs + m);
  }
  for (; m < pairs; ++m) {
    const Real a = x[m], b = x[pairs + m];
    x[m] = a * cosine[m] - b * sine[m];
    x[pairs + m] = a * sine[m] + b * cosine[m];
  }
}

// Turns the pairs (2m, 2m + 1) of a head; cosine has dim numbers, each twice, and sine dim numbers, each once negated
// and once as it is.
template <class Real>
inline void rotate_interleaved(Real* x, const Real* cosine, const Real* sine, Index dim) {
  using P = Pack<Real>;
  Index j = 0;
  for (; j + kLanes<Real> <= dim; j += kLanes<Real>) {
    const P a = P::load(x + j);
    const P b = swap_neighbours(a, std::make_integer_sequence<int, kLanes<Real>>{});
    mul_add(a, P::load(cosine + j), b * P::load(sine + j)).store(x + j);
  }
  for (; j < dim; j += 2) {
    const Real a = x[j], b = x[j + 1];
    x[j] = a * cosine[j] + b * sine[j];
    x[j + 1] = b * cosine[j + 1] + a * sine[j + 1];
  }
}

}  // namespace detail

struct Rope {
  Index dim = 0;  // width of a head; even
  double theta = 10000;
  RopePairs pairs = RopePairs::interleaved;

  // Rotates x in place.
  template <class Real>
  void rotate(Context<Real>& c, const MatrixView<Real>& x, Index len, Index first_position,
              RopeDirection direction = RopeDirection::forward) const {
    check(x.rows, x.columns, len);
    if (x.rows == 0 || x.columns == 0) return;
    const TokenPlaces places(c, x.rows, len);
    const Index longest = places.longest(), step = Index(std::ceil(std::sqrt(double(longest))));
    const auto frequency = frequencies();
    const detail::AngleTable coarse(frequency, first_position, step, (longest + step - 1) / step);
    const detail::AngleTable fine(frequency, 0, 1, step);
    detail::for_row_blocks(c, x.rows, x.columns, [&](Index first, Index last) {
      Matrix<Real> angles(2, dim);
      Real *cosine = angles.view().row(0), *sine = angles.view().row(1);
      for (Index r = first; r < last; ++r) {
        const Index at = places.position(r);
        fill_angles(coarse, at / step, fine, at % step, direction, cosine, sine);
        for (Index j = 0; j < x.columns; j += dim) rotate_head(x.row(r) + j, cosine, sine);
      }
    });
  }

 private:
  void check(Index rows, Index columns, Index len) const {
    require(dim > 0 && dim % 2 == 0, "Rope::rotate: dim is ", dim,
            ", it must be even and positive");
    require(theta > 0, "Rope::rotate: theta is ", theta, ", it must be positive");
    require(columns % dim == 0, "Rope::rotate: x has ", columns,
            " columns, it must have a multiple of dim ", dim);
    require(rows == 0 || (len > 0 && rows % len == 0), "Rope::rotate: x has ", rows,
            " rows, it must have a multiple of len ", len);
  }

  [[nodiscard]] std::vector<double> frequencies() const {
    std::vector<double> frequency;
    for (Index m = 0; m < dim / 2; ++m)
      frequency.push_back(std::pow(theta, -2.0 * double(m) / double(dim)));
    return frequency;
  }

  // Writes the cosines and sines of one position in the order in which rotate_head() reads them.
  template <class Real>
  void fill_angles(const detail::AngleTable& coarse, Index i, const detail::AngleTable& fine,
                   Index k, RopeDirection direction, Real* cosine, Real* sine) const {
    const double *c1 = coarse.cosines(i), *s1 = coarse.sines(i);
    const double *c2 = fine.cosines(k), *s2 = fine.sines(k);
    const double sign = direction == RopeDirection::forward ? 1.0 : -1.0;
    for (Index m = 0; m < dim / 2; ++m) {
      const Real cos = Real(c1[m] * c2[m] - s1[m] * s2[m]);
      const Real sin = Real(sign * (s1[m] * c2[m] + c1[m] * s2[m]));
      if (pairs == RopePairs::halves) {
        cosine[m] = cos;
        sine[m] = sin;
      } else {
        cosine[2 * m] = cosine[2 * m + 1] = cos;
        sine[2 * m] = -sin;
        sine[2 * m + 1] = sin;
      }
    }
  }

  template <class Real>
  void rotate_head(Real* x, const Real* cosine, const Real* sine) const {
    if (pairs == RopePairs::halves)
      detail::rotate_half(x, cosine, sine, dim / 2);
    else
      detail::rotate_interleaved(x, cosine, sine, dim);
  }
};

}  // namespace nn
}  // namespace HEED_ABI
}  // namespace heed
