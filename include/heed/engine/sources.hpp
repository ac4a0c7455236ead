// SPDX-License-Identifier: Apache-2.0
#pragma once

// What the normaliser's source() says of all score maps of a call at once: which of them read rows in common,
// so that their gradients are sums.

#include <heed/core/error.hpp>
#include <heed/core/geometry.hpp>
#include <heed/engine/tiles.hpp>

#include <algorithm>
#include <string>
#include <vector>

namespace heed {
inline namespace HEED_ABI {
namespace detail {

// f(head, map, source) for every score map of a call.
template <class Real, class F>
void for_each_source(const OpTiles<Real>& op, const Geometry& g, F&& f) {
  for (Index h = 0; h < g.heads; ++h)
    for (int map = 0; map < op.maps(); ++map) f(h, map, op.normaliser.source(g, h, map));
}

// Throws unless every map reads columns that exist.
template <class Real>
void require_sources(const OpTiles<Real>& op, const Geometry& g, const std::string& where) {
  for_each_source(op, g, [&](Index h, int map, const Source& s) {
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

// Who reads the numbers of query: one map each of them; or not so, but never two heads the same number; or several
// heads. The gradient of query is a sum but in the first case. `by_own_head`: head h reads query head h, too.
enum class QueryReaders { one, one_head, several_heads };
template <class Real>
[[nodiscard]] QueryReaders readers_of_queries(const OpTiles<Real>& op, const Geometry& g,
                                              bool by_own_head) {
  constexpr Index nobody = -1;
  std::vector<Index> reader(std::size_t(g.query_heads * g.dim_qk), nobody);
  bool once = true, one_head = true;
  for_each_source(op, g, [&](Index h, int, const Source& s) {
    if (by_own_head && s.query_head != h) once = one_head = false;
    Index* const readers = reader.data() + s.query_head * g.dim_qk + s.query_column;
    bool unread = true, own = true;
    for (Index c = 0; c < s.width; ++c) {
      unread = unread && readers[c] == nobody;
      own = own && (readers[c] == nobody || readers[c] == h);
    }
    std::fill_n(readers, s.width, h);
    once = once && unread;
    one_head = one_head && own;
  });
  for (const Index head : reader) once = once && head != nobody;
  return once ? QueryReaders::one : one_head ? QueryReaders::one_head : QueryReaders::several_heads;
}

// Does every head read the keys of its own key-value head, and the heads of a group the same columns of them?
template <class Real>
[[nodiscard]] bool reads_keys_by_group(const OpTiles<Real>& op, const Geometry& g) {
  bool by_group = true;
  for_each_source(op, g, [&](Index h, int map, const Source& s) {
    const Source first = op.normaliser.source(g, g.kv_head(h) * g.group(), map);
    by_group = by_group && s.kv_head == g.kv_head(h) && s.key_column == first.key_column &&
               s.width == first.width;
  });
  return by_group;
}

}  // namespace detail
}  // namespace HEED_ABI
}  // namespace heed
