// SPDX-License-Identifier: Apache-2.0
#pragma once

// std::complex as a scalar of core/scalar.hpp: the complex-step derivative.
//
// Complex arguments follow the complex functions: their first-order change along the imaginary axis
// is the derivative wherever the real function is smooth. Outside its domain (log or sqrt of a
// negative real part) the complex function is finite where the real one is NaN.

#include <heed/core/scalar.hpp>

#include <complex>

namespace heed {
inline namespace HEED_ABI {
namespace math {

template <std::floating_point Real>
[[nodiscard]] constexpr Real value_of(const std::complex<Real>& x, Lookup) {
  return x.real();
}
template <std::floating_point Real>
[[nodiscard]] std::complex<Real> exp(const std::complex<Real>& x, Lookup) {
  return std::exp(x);
}
template <std::floating_point Real>
[[nodiscard]] std::complex<Real> log(const std::complex<Real>& x, Lookup) {
  return std::log(x);
}
template <std::floating_point Real>
[[nodiscard]] std::complex<Real> sqrt(const std::complex<Real>& x, Lookup) {
  return std::sqrt(x);
}
template <std::floating_point Real>
[[nodiscard]] std::complex<Real> tanh(const std::complex<Real>& x, Lookup) {
  return std::tanh(x);
}

}  // namespace math
}  // namespace HEED_ABI
}  // namespace heed
