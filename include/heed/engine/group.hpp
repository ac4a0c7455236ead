// SPDX-License-Identifier: Apache-2.0
#pragma once

// Panels that a worker takes through the tiles of keys together, while each tile is in cache.

#include <heed/engine/queries.hpp>

#include <span>

namespace heed {
inline namespace HEED_ABI {
namespace detail {

// My: what a pass keeps of a panel, with a member `panel`.
template <class Real, class My>
class PanelGroup {
 public:
  // The group has room for as many panels as the plan says, which emplace() makes.
  explicit PanelGroup(const CallContext<Real>& c) : c_(c), panels_(c.plan.group) {}
  template <class... Arguments>
  void emplace(Arguments&&... arguments) {
    panels_.emplace(std::forward<Arguments>(arguments)...);
  }

  [[nodiscard]] std::span<My> active() const { return {panels_.data(), std::size_t(active_)}; }
  [[nodiscard]] My& first() const { return panels_[0]; }

  // Takes the panels of group `group` of those of heads first_head, first_head + 1, ..., head by head. Where others compute some of
  // them, those at hand are active, in the parts of tiles of the whole group.
  void move_to(Index b, Index first_head, Index heads, Index group) {
    active_ = 0;
    seen_ = {c_.geometry.len_kv, 0};
    const Index panels = c_.plan.panels, first = group * c_.plan.group,
                end = std::min(first + c_.plan.group, heads * panels);
    for (Index item = first; item < end; ++item) {
      Panel<Real>& panel = panels_[std::size_t(active_)].panel;
      panel.move_to(b, first_head + item / panels, item % panels);
      const KeyRange& seen = panel.seen_by_all;
      core_ = item == first
                  ? seen
                  : KeyRange{std::max(core_.begin, seen.begin), std::min(core_.end, seen.end)};
      if (!c_.holds(item % panels)) continue;
      ++active_;
      seen_.begin = std::min(seen_.begin, panel.seen_by_any.begin);
      seen_.end = std::max(seen_.end, panel.seen_by_any.end);
    }
  }
  // The keys that some query of the panels at hand sees, and the tiles that have them.
  [[nodiscard]] const KeyRange& seen() const { return seen_; }
  [[nodiscard]] KeyRange tiles() const { return tiles_of(c_.plan, seen_); }
  // body(keys) for the parts of tile t: its core, the keys that all queries of the group see, and what lies beside.
  template <class Body>
  void for_parts(Index t, Body&& body) const {
    detail::for_parts(c_.plan, t, c_.geometry.len_kv, core_, body);
  }
  [[nodiscard]] int parts(Index t) const {
    int count = 0;
    for_parts(t, [&](const KeyRange&) { ++count; });
    return count;
  }
  // body(my, tile) for all parts of tile t and all panels; of kind empty for those that see nothing of it.
  template <class Body>
  void for_tile(Index t, Body&& body) const {
    for_parts(t, [&](const KeyRange& keys) {
      for (My& my : active()) body(my, my.panel.tile(keys));
    });
  }

 private:
  const CallContext<Real>& c_;
  FixedList<My> panels_;
  Index active_ = 0;
  KeyRange core_;  // keys that all queries of the group see
  KeyRange seen_;
};

}  // namespace detail
}  // namespace HEED_ABI
}  // namespace heed
