// SPDX-License-Identifier: Apache-2.0
#pragma once

// What the normaliser's source() says of all score maps of a call at once: which of them read rows in common,
// so that their gradients are sums.

#include <heed/core/error.hpp>
#include <heed/core/geometry.hpp>
#include <heed/plug/normaliser.hpp>

#include <string>
#include <vector>

namespace heed {
inline namespace HEED_ABI {
namespace detail {

// f(head, map, source) for every score map of a call.
template <class Normaliser, class F>
void for_each_source(const Normaliser& normaliser, const Geometry& g, F&& f) {
  for (Index h = 0; h < g.heads; ++h)
    for (int map = 0; map < Normaliser::maps; ++map) f(h, map, normaliser.source(g, h, map));
}

// Throws unless every map reads columns that exist.
template <class Normaliser>
void require_sources(const Normaliser& normaliser, const Geometry& g, const std::string& where) {
  for_each_source(normaliser, g, [&](Index h, int map, const Source& s) {
    const auto check = [&](bool fits, const char* what, Index got, Index from, Index to) {
      require(fits, where, ": the normaliser's source() gives map ", map, " of head ", h, " the ",
              what, " ", got, ", it must lie in [", from, ", ", to, "]");
    };
    check(s.width >= 1 && s.width <= g.dim_qk, "width", s.width, 1, g.dim_qk);
    const auto within = [&](const char* what, Index at, Index last) {
      check(at >= 0 && at <= last, what, at, 0, last);
    };
    within("query head", s.query_head, g.query_heads - 1);
    within("key-value head", s.kv_head, g.kv_heads - 1);
    within("query column", s.query_column, g.dim_qk - s.width);
    within("key column", s.key_column, g.dim_qk - s.width);
  });
}

// Is every number of query read by exactly one map, and by the head of its own if `by_own_head`? Else the
// gradient of query is a sum.
template <class Normaliser>
[[nodiscard]] bool reads_each_query_once(const Normaliser& normaliser, const Geometry& g,
                                         bool by_own_head) {
  std::vector<char> readers(std::size_t(g.query_heads * g.dim_qk), 0);
  bool once = true;
  for_each_source(normaliser, g, [&](Index h, int, const Source& s) {
    once = once && (!by_own_head || s.query_head == h);
    for (Index c = 0; c < s.width; ++c) {
      char& taken = readers[std::size_t(s.query_head * g.dim_qk + s.query_column + c)];
      once = once && !taken;
      taken = 1;
    }
  });
  for (const char taken : readers) once = once && taken;
  return once;
}

// Does every head read the keys of its own key-value head, and the heads of a group the same columns of them?
template <class Normaliser>
[[nodiscard]] bool reads_keys_by_group(const Normaliser& normaliser, const Geometry& g) {
  bool by_group = true;
  for_each_source(normaliser, g, [&](Index h, int map, const Source& s) {
    const Source first = normaliser.source(g, g.kv_head(h) * g.group(), map);
    by_group = by_group && s.kv_head == g.kv_head(h) && s.key_column == first.key_column &&
               s.width == first.width;
  });
  return by_group;
}

}  // namespace detail
}  // namespace HEED_ABI
}  // namespace heed
