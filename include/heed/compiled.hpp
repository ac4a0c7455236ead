// SPDX-License-Identifier: Apache-2.0
#pragma once

// forward() and backward() of heed's own variants without their code, for programs that link heed::compiled:
// including this costs a compiler little more than the variants' headers do. Other calls, such as explain(), take the code of the
// variants and of the engine from there, too. Ops of your own keep working beside it with <heed/attention.hpp>.
//
// Cost  a file that calls two variants, forward and backward: see `cmake --build build -t compile_cost`.

#include <heed/compiled_engine.hpp>
#include <heed/variants.hpp>

#include <tuple>

namespace heed {
inline namespace HEED_ABI {

namespace detail {

// The type at places behind the end of the list: a different one at each, without code.
template <std::size_t place, class Real>
struct NoOp {};
template <std::size_t place, class Real>
struct Door<NoOp<place, Real>> {};

template <std::size_t place, class Real, class... Ops>
[[nodiscard]] auto built_in_at(OpList<Ops...>) {
  if constexpr (place < sizeof...(Ops))
    return std::type_identity<std::tuple_element_t<place, std::tuple<Ops...>>>{};
  else
    return std::type_identity<NoOp<place, Real>>{};
}
// The op at this place of BuiltIn, from 0.
template <std::size_t place, class Real>
using BuiltInAt = typename decltype(built_in_at<place, Real>(BuiltIn<Real>{}))::type;

// The number of places below, each with two lines; the library is made from them (cmake/compiled.cmake).
inline constexpr std::size_t kCompiledPlaces = 16;
static_assert(BuiltIn<float>::size <= kCompiledPlaces,
              "heed: more ops than places; raise kCompiledPlaces and add lines below it");

}  // namespace detail

// The code of the op at each place is in heed::compiled.
extern template struct detail::Door<detail::BuiltInAt<0, float>>;
extern template struct detail::Door<detail::BuiltInAt<0, double>>;
extern template struct detail::Door<detail::BuiltInAt<1, float>>;
extern template struct detail::Door<detail::BuiltInAt<1, double>>;
extern template struct detail::Door<detail::BuiltInAt<2, float>>;
extern template struct detail::Door<detail::BuiltInAt<2, double>>;
extern template struct detail::Door<detail::BuiltInAt<3, float>>;
extern template struct detail::Door<detail::BuiltInAt<3, double>>;
extern template struct detail::Door<detail::BuiltInAt<4, float>>;
extern template struct detail::Door<detail::BuiltInAt<4, double>>;
extern template struct detail::Door<detail::BuiltInAt<5, float>>;
extern template struct detail::Door<detail::BuiltInAt<5, double>>;
extern template struct detail::Door<detail::BuiltInAt<6, float>>;
extern template struct detail::Door<detail::BuiltInAt<6, double>>;
extern template struct detail::Door<detail::BuiltInAt<7, float>>;
extern template struct detail::Door<detail::BuiltInAt<7, double>>;
extern template struct detail::Door<detail::BuiltInAt<8, float>>;
extern template struct detail::Door<detail::BuiltInAt<8, double>>;
extern template struct detail::Door<detail::BuiltInAt<9, float>>;
extern template struct detail::Door<detail::BuiltInAt<9, double>>;
extern template struct detail::Door<detail::BuiltInAt<10, float>>;
extern template struct detail::Door<detail::BuiltInAt<10, double>>;
extern template struct detail::Door<detail::BuiltInAt<11, float>>;
extern template struct detail::Door<detail::BuiltInAt<11, double>>;
extern template struct detail::Door<detail::BuiltInAt<12, float>>;
extern template struct detail::Door<detail::BuiltInAt<12, double>>;
extern template struct detail::Door<detail::BuiltInAt<13, float>>;
extern template struct detail::Door<detail::BuiltInAt<13, double>>;
extern template struct detail::Door<detail::BuiltInAt<14, float>>;
extern template struct detail::Door<detail::BuiltInAt<14, double>>;
extern template struct detail::Door<detail::BuiltInAt<15, float>>;
extern template struct detail::Door<detail::BuiltInAt<15, double>>;

}  // namespace HEED_ABI
}  // namespace heed
