// SPDX-License-Identifier: Apache-2.0
#pragma once

// The parameters and options of a part of an op (a score, a normaliser, a readout), named once:
//
//   template <class Real>
//   struct Recency {
//     Param<Real> slope = Real(0.5);
//     int reach = 3;
//     static constexpr auto parameters = std::tuple{
//         named("slope", &Recency::slope, Range::positive),     learnt, one value or one per head
//         option("reach", &Recency::reach)};                    a number, flag or enumeration
//   };
//
//   named(name, member, range)           a learnt Param with one value, or one per head
//   named_if_given(name, member, range)  the same, or empty where the part does without it
//   tensor(name, member, shape)          a learnt Param of the shape that the member function `shape` gives for a
//                                        geometry, -1 for any extent, of finite numbers; tensor_if_given: or empty
//   fixed(name, member)                  a Param of finite numbers that is not learnt
//   option(name, member, range)          no Param
//
// From this list the library visits, checks and converts a part. `range` is a Range, an Interval,
// or a member function that returns an Interval. Two members of the part do what the list cannot:
//
//   check(geometry, where) const         throws std::invalid_argument, its sentence starting with `where`
//   keep_jointly()                       brings several parameters with a common bound back inside of it
//
// A member that the list does not name is not learnt, and has its default value where the op is converted.

#include <heed/core/geometry.hpp>
#include <heed/core/interval.hpp>
#include <heed/core/param.hpp>
#include <heed/core/scalar.hpp>

#include <algorithm>
#include <cmath>
#include <limits>
#include <string>
#include <tuple>
#include <type_traits>
#include <utility>
#include <vector>

namespace heed {
inline namespace HEED_ABI {

// The range of a number; NaN and infinity are never in it. Learnt parameters are moved back into it
// after each step of an optimiser.
enum class Range { finite, not_negative, positive };

[[nodiscard]] constexpr Interval interval_of(Range range) {
  if (range == Range::positive) return positive_numbers();
  return range == Range::finite ? Interval{} : at_least(0, "it must not be negative");
}

enum class ParameterKind { per_head, tensor, fixed, option };

// One entry of a list of parameters. Pointer: to the member. Rule: an Interval, or a pointer to the member function
// that returns an interval or a shape.
template <ParameterKind kind_, class Pointer, class Rule>
struct Named {
  static constexpr ParameterKind kind = kind_;
  static constexpr bool learnt = kind == ParameterKind::per_head || kind == ParameterKind::tensor;
  const char* name;
  Pointer member;
  Rule rule;
  bool may_be_empty;
};

namespace detail {

template <ParameterKind kind, class Pointer, class Rule>
[[nodiscard]] constexpr auto name_member(const char* name, Pointer member, Rule rule,
                                         bool may_be_empty = false) {
  if constexpr (std::is_same_v<Rule, Range>)
    return Named<kind, Pointer, Interval>{name, member, interval_of(rule), may_be_empty};
  else
    return Named<kind, Pointer, Rule>{name, member, rule, may_be_empty};
}

}  // namespace detail

template <class Owner, class Member, class Rule = Range>
[[nodiscard]] constexpr auto option(const char* name, Member Owner::*member,
                                    Rule range = Range::finite) {
  return detail::name_member<ParameterKind::option>(name, member, range);
}
template <class Owner, class Member, class Rule = Range>
[[nodiscard]] constexpr auto named(const char* name, Member Owner::*member,
                                   Rule range = Range::finite) {
  if constexpr (is_param<Member>)
    return detail::name_member<ParameterKind::per_head>(name, member, range);
  else
    return option(name, member, range);
}
template <class Owner, class Real, class Rule = Range>
[[nodiscard]] constexpr auto named_if_given(const char* name, Param<Real> Owner::*member,
                                            Rule range = Range::finite) {
  return detail::name_member<ParameterKind::per_head>(name, member, range, true);
}
template <class Owner, class Real, class Shape>
[[nodiscard]] constexpr auto tensor(const char* name, Param<Real> Owner::*member, Shape shape) {
  return detail::name_member<ParameterKind::tensor>(name, member, shape);
}
template <class Owner, class Real, class Shape>
[[nodiscard]] constexpr auto tensor_if_given(const char* name, Param<Real> Owner::*member,
                                             Shape shape) {
  return detail::name_member<ParameterKind::tensor>(name, member, shape, true);
}
template <class Owner, class Real>
[[nodiscard]] constexpr auto fixed(const char* name, Param<Real> Owner::*member) {
  return detail::name_member<ParameterKind::fixed>(name, member, Range::finite, true);
}

// Calls f(entry) for each entry of a part's list, in its order; a part without a list has none.
template <class Part, class F>
constexpr void for_each_entry(F&& f) {
  if constexpr (requires { Part::parameters; })
    std::apply([&](const auto&... entries) { (f(entries), ...); }, Part::parameters);
}

// Calls f(name, Param&) for each learnt parameter of a part; Params are constant if the part is.
template <class Part, class F>
void visit_parameters(Part& part, F&& f) {
  for_each_entry<std::remove_const_t<Part>>([&]<class Entry>(const Entry& entry) {
    if constexpr (Entry::learnt) f(entry.name, part.*entry.member);
  });
}

namespace detail {

template <class Part>
[[nodiscard]] constexpr int count_scalars() {
  static_assert(sizeof(Part) > 0, "heed: asked before the part was complete");
  int count = 0;
  for_each_entry<Part>(
      [&]<class Entry>(const Entry&) { count += Entry::kind == ParameterKind::per_head ? 1 : 0; });
  return count;
}

// Calls f(entry, number) for the entries of kind per_head, numbered from 0.
template <class Part, class F>
constexpr void for_each_scalar(F&& f) {
  int i = 0;
  for_each_entry<Part>([&]<class Entry>(const Entry& entry) {
    if constexpr (Entry::kind == ParameterKind::per_head) f(entry, i++);
  });
}

template <class Part, class Entry>
[[nodiscard]] Interval range_of(const Part& part, const Entry& entry) {
  if constexpr (std::is_same_v<decltype(entry.rule), Interval>)
    return entry.rule;
  else
    return (part.*entry.rule)();
}

[[nodiscard, gnu::cold]] inline std::string extents_text(const std::vector<Index>& shape) {
  std::string text;
  for (const Index extent : shape)
    text += (text.empty() ? "" : ",") + (extent < 0 ? "any" : std::to_string(extent));
  return "(" + text + ")";
}

// The widths on which shapes depend, for error texts.
[[nodiscard]] inline std::string widths_text(const Geometry& g) {
  const std::string qk = std::to_string(g.dim_qk), v = std::to_string(g.dim_v);
  return g.dim_qk == g.dim_v ? " for heads of width " + qk
                             : " for queries of width " + qk + " and values of width " + v;
}

// The place of number n in a tensor of that shape: "[1,0,7]".
[[nodiscard, gnu::cold]] inline std::string place_text(const std::vector<Index>& shape, Index n) {
  std::string text;
  for (std::size_t axis = shape.size(); axis-- > 0; n /= shape[axis])
    text = std::to_string(n % shape[axis]) + (text.empty() ? "" : ",") + text;
  return "[" + text + "]";
}

// Throws if one of the tensor's numbers is NaN or infinite. It runs in each call, so it is one pass without a branch.
template <class Real>
void require_finite(const Param<Real>& tensor, const char* where, const char* name) {
  const auto is_finite = [&tensor](Index n) {
    const auto x = math::value_of(tensor[n]);
    return std::abs(x) <= std::numeric_limits<std::remove_const_t<decltype(x)>>::max();
  };
  int wrong = 0;
  for (Index n = 0; n < tensor.size(); ++n) wrong |= int(!is_finite(n));
  if (wrong == 0) return;
  Index n = 0;
  while (is_finite(n)) ++n;
  fail(where, ": ", name, place_text(tensor.shape(), n), " is ", double(math::value_of(tensor[n])),
       ", it must be finite");
}

template <class Part, class Entry>
void check_entry(const Part& part, const Entry& entry, const Geometry& g, const char* where) {
  const auto& member = part.*entry.member;
  if constexpr (Entry::kind == ParameterKind::per_head) {
    if (entry.may_be_empty && !member.given()) return;
    require_per_head(member, g.heads, where, entry.name);
    const Interval range = range_of(part, entry);
    for (Index i = 0; i < member.size(); ++i)
      require_within(double(math::value_of(member[i])), range, where, entry.name);
  } else if constexpr (Entry::kind == ParameterKind::tensor) {
    if (entry.may_be_empty && !member.given()) return;
    const std::vector<Index> wanted = (part.*entry.rule)(g);
    const bool fits =
        std::equal(wanted.begin(), wanted.end(), member.shape().begin(), member.shape().end(),
                   [](Index want, Index got) { return want < 0 || got == want; });
    require(fits, where, ": ", entry.name, " has shape ", extents_text(member.shape()),
            ", it must be ", extents_text(wanted), widths_text(g),
            entry.may_be_empty ? ", or empty" : "");
    require_finite(member, where, entry.name);
  } else if constexpr (Entry::kind == ParameterKind::fixed) {
    require_finite(member, where, entry.name);
  } else if constexpr (std::is_arithmetic_v<std::remove_cvref_t<decltype(member)>>) {
    require_within(double(member), range_of(part, entry), where, entry.name);
  }
}

}  // namespace detail

// Number of values per head that a score reads as p[0], p[1], ...: its learnt parameters with one value, or one per head.
template <class Score>
inline constexpr int scalars_of = detail::count_scalars<Score>();

// The p[i] of head h.
template <class Real, class Score>
[[nodiscard]] Real scalar_of(const Score& score, int i, Index h) {
  Real value{};
  detail::for_each_scalar<Score>([&](const auto& entry, int n) {
    if (n == i) value = (score.*entry.member).head(h);
  });
  return value;
}
// Adds the gradients dp[0], dp[1], ... of head h to the parameters of `grad`.
template <class Score>
void chain_scalars(Score& grad, Index h, const double* dp) {
  detail::for_each_scalar<Score>([&](const auto& entry, int n) {
    auto& to = (grad.*entry.member).head(h);
    to += std::remove_reference_t<decltype(to)>(dp[n]);
  });
}

// Throws std::invalid_argument, its sentence starting with `where`, unless every parameter and option of a part
// lies where its list and its check() allow. `also`: what else check() asks for.
template <class Part, class... Also>
void validate(const Part& part, const Geometry& g, const char* where, const Also&... also) {
  for_each_entry<Part>([&](const auto& entry) { detail::check_entry(part, entry, g, where); });
  part.check(g, where, also...);
}

// Moves the learnt parameters of a part back into their ranges. A value inside is never moved. A
// NaN or an infinity stays for validate() to name: no step of a sound size leads there.
template <class Part>
void keep_in_range(Part& part) {
  detail::for_each_scalar<Part>([&](const auto& entry, int) {
    const Interval range = detail::range_of(part, entry);
    auto& param = part.*entry.member;
    for (Index i = 0; i < param.size(); ++i)
      param[i] = std::remove_cvref_t<decltype(param[i])>(range.nearest(double(param[i])));
  });
  part.keep_jointly();
}

// The same part over another scalar, as a type: Part<Real> becomes Part<U>, and Part<Real, Inner<Real>> becomes
// Part<U, Inner<U>>. A part of another form defines it: template <class U> using rebind = ...;
template <class Part, class U>
struct Rebind {
  static_assert(
      requires { typename Part::template rebind<U>; },
      "heed: a part of an op that is no template of its scalar alone says what it is over another: "
      "`template <class U> using rebind = ...;` (plug/parameters.hpp)");
  using Type = typename Part::template rebind<U>;
};
template <template <class> class Part, class Real, class U>
struct Rebind<Part<Real>, U> {
  using Type = Part<U>;
};
template <template <class, class> class Part, class Real, class Inner, class U>
struct Rebind<Part<Real, Inner>, U> {
  using Type = Part<U, typename Rebind<Inner, U>::Type>;
};
template <class Part, class U>
using Rebound = typename Rebind<Part, U>::Type;

// The same part over another scalar: everything that its list names is converted or copied.
template <class U, class Part>
[[nodiscard]] Rebound<Part, U> cast_part(const Part& part) {
  using To = Rebound<Part, U>;
  To to;
  if constexpr (requires { Part::parameters; }) [&]<std::size_t... n>(std::index_sequence<n...>) {
      [[maybe_unused]] const auto copy = [&](const auto& from_entry, const auto& to_entry) {
        const auto& from = part.*from_entry.member;
        if constexpr (is_param<std::remove_cvref_t<decltype(from)>>)
          to.*to_entry.member = from.template cast<U>();
        else
          to.*to_entry.member = from;
      };
      (copy(std::get<n>(Part::parameters), std::get<n>(To::parameters)), ...);
    }
  (std::make_index_sequence<std::tuple_size_v<std::remove_cvref_t<decltype(Part::parameters)>>>{});
  return to;
}

}  // namespace HEED_ABI
}  // namespace heed
