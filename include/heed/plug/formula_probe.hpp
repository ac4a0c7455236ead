// SPDX-License-Identifier: Apache-2.0
#pragma once

// A vector of pairs whose compile errors are sentences. Public calls first compile a formula
// (plug/own_score.hpp), or a streaming normaliser whose members are templates of their vectors
// (plug/streaming.hpp), for this type, and never run it: an operation that vectors of pairs do not
// have ends in one sentence here, and not in pages about the engine's own vectors.

#include <heed/core/scalar.hpp>
#include <heed/simd/functions.hpp>
#include <heed/simd/pack.hpp>

#include <concepts>
#include <type_traits>
#include <utility>

namespace heed {
inline namespace HEED_ABI {
namespace detail {

// A comparison of probes: true or false for each pair.
template <class Real>
struct ProbeMask {
  ProbeMask() = default;
  ProbeMask(const typename Pack<Real>::Mask&) {}

  // Used by functions of packs such as heed::select.
  operator typename Pack<Real>::Mask() const { return typename Pack<Real>::Mask{}; }
  operator bool() const {
    static_assert(
        sizeof(Real) == 0,
        "heed: the value is a vector of pairs, so that a formula cannot branch on it: use "
        "heed::math::select(condition, a, b), maximum or minimum in place of if, ? :, &&, "
        "std::max (plug/own_score.hpp)");
    return false;
  }
  friend ProbeMask operator&(ProbeMask, ProbeMask) { return {}; }
  friend ProbeMask operator|(ProbeMask, ProbeMask) { return {}; }
  friend ProbeMask operator^(ProbeMask, ProbeMask) { return {}; }
  friend ProbeMask operator~(ProbeMask) { return {}; }
  friend bool any_lane(ProbeMask) { return false; }
};

// A pack whose comparisons and conversions do not compile, with a sentence that says what to do.
template <class Real>
struct Probe : Pack<Real> {
  Probe() = default;
  Probe(Pack<Real> pack) : Pack<Real>(pack) {}
  template <class C>
  requires std::is_arithmetic_v<C> Probe(C number) : Pack<Real>(number) {}

  // Functions of <cmath> convert a probe to long double. A conversion to double, too, would make
  // them ambiguous, and with them `flag ? pair.logit : 0.0`.
  template <std::same_as<long double> Number>
  operator Number() const {
    static_assert(
        sizeof(Real) == 0,
        "heed: the value is a vector of pairs, which std::exp and its like do not take: use "
        "heed::math::exp and its like (plug/own_score.hpp lists them)");
    return 0;
  }
};

template <class S>
inline constexpr bool is_probe = false;
template <class Real>
inline constexpr bool is_probe<Probe<Real>> = true;

// Two operands, at least one of them a probe; the other may be a number or a pack.
template <class A, class B>
concept WithProbe = (is_probe<A> && (is_probe<B> || std::convertible_to<B, A>)) ||
                    (is_probe<B> && std::convertible_to<A, B>);
template <class A, class B>
using ProbeOf = std::conditional_t<is_probe<A>, A, B>;
template <class A>
struct ProbeMaskOf;
template <class Real>
struct ProbeMaskOf<Probe<Real>> {
  using Type = ProbeMask<Real>;
};
template <class A, class B>
using ComparedProbes = typename ProbeMaskOf<ProbeOf<A, B>>::Type;

template <class A, class B>
requires WithProbe<A, B> ProbeOf<A, B>
operator+(const A&, const B&) { return {}; }
template <class A, class B>
requires WithProbe<A, B> ProbeOf<A, B>
operator-(const A&, const B&) { return {}; }
template <class A, class B>
requires WithProbe<A, B> ProbeOf<A, B>
operator*(const A&, const B&) { return {}; }
template <class A, class B>
requires WithProbe<A, B> ProbeOf<A, B>
operator/(const A&, const B&) { return {}; }
template <class Real>
Probe<Real> operator-(const Probe<Real>&) {
  return {};
}
template <class A, class B>
requires WithProbe<A, B> ComparedProbes<A, B>
operator<(const A&, const B&) { return {}; }
template <class A, class B>
requires WithProbe<A, B> ComparedProbes<A, B>
operator<=(const A&, const B&) { return {}; }
template <class A, class B>
requires WithProbe<A, B> ComparedProbes<A, B>
operator>(const A&, const B&) { return {}; }
template <class A, class B>
requires WithProbe<A, B> ComparedProbes<A, B>
operator>=(const A&, const B&) { return {}; }
template <class A, class B>
requires WithProbe<A, B> ComparedProbes<A, B>
operator==(const A&, const B&) { return {}; }
template <class A, class B>
requires WithProbe<A, B> ComparedProbes<A, B>
operator!=(const A&, const B&) { return {}; }

// Each of these compiles a member of a streaming normaliser, and does not run it. A probe converts
// to a pack for members that take packs by name.
template <class Normaliser, class State, class S>
[[nodiscard]] auto probe_weight(const Normaliser& normaliser, const State& state, const S& x) {
  return normaliser.weight(state, x);
}
template <class Normaliser, class State, class S>
[[nodiscard]] auto probe_dscore(const Normaliser& normaliser, const State& state, const S& x) {
  return normaliser.dscore(state, x, x, x, x);
}
// True for the result of a <cmath> function on a probe, which a member that returns `auto` passes on.
template <class Result>
inline constexpr bool is_of_cmath = std::is_same_v<std::remove_cvref_t<Result>, long double>;

// The check of a streaming normaliser that plug/check.hpp makes before the engine compiles it.
template <class Normaliser, class Real>
struct StreamProbe {
  using State = typename Normaliser::State;
  using S = Probe<Real>;
  static consteval bool check() {
    if constexpr (requires(const Normaliser& n, const State& state, const S& x) {
                    n.weight(state, x);
                  })
      static_assert(
          !is_of_cmath<decltype(probe_weight(std::declval<const Normaliser&>(),
                                             std::declval<const State&>(),
                                             std::declval<const S&>()))>,
          "heed: weight() gets vectors of pairs, which std::exp and its like do not take: "
          "use heed::math::exp and its like (plug/own_score.hpp lists them)");
    if constexpr (requires(const Normaliser& n, const State& state, const S& x) {
                    n.dscore(state, x, x, x, x);
                  })
      static_assert(
          !is_of_cmath<decltype(probe_dscore(std::declval<const Normaliser&>(),
                                             std::declval<const State&>(),
                                             std::declval<const S&>()))>,
          "heed: dscore() gets vectors of pairs, which std::exp and its like do not take: "
          "use heed::math::exp and its like (plug/own_score.hpp lists them)");
    return true;
  }
};

}  // namespace detail

template <class Real>
struct IsPack<detail::Probe<Real>> : std::true_type {};

namespace math {

// Functions that would return plain packs, whose errors are not sentences, return probes here;
// other functions return the type that they are given.
template <class Real>
detail::Probe<Real> exp(const detail::Probe<Real>&, Lookup) {
  return {};
}
template <class Real>
detail::Probe<Real> log(const detail::Probe<Real>&, Lookup) {
  return {};
}
template <class Real>
detail::Probe<Real> sqrt(const detail::Probe<Real>&, Lookup) {
  return {};
}
template <class Real>
detail::Probe<Real> tanh(const detail::Probe<Real>&, Lookup) {
  return {};
}
template <class Real>
detail::Probe<Real> pow(const detail::Probe<Real>&, const detail::Probe<Real>&, Lookup) {
  return {};
}
template <class Real>
detail::Probe<Real> select(detail::ProbeMask<Real>, const detail::Probe<Real>&,
                           const detail::Probe<Real>&, Lookup) {
  return {};
}

}  // namespace math
}  // namespace HEED_ABI
}  // namespace heed
