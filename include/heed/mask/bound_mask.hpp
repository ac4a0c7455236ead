// SPDX-License-Identifier: Apache-2.0
#pragma once

// A mask that was checked against the sizes of a call. It says which keys a query sees, and whether a tile of
// queries and keys is hidden, visible in part, or visible as a whole, so that the engine skips hidden tiles.

#include <heed/core/geometry.hpp>
#include <heed/mask/mask.hpp>

#include <algorithm>
#include <bit>
#include <cmath>
#include <cstring>
#include <limits>

namespace heed {
inline namespace HEED_ABI {

// Throws, its sentence starting with `where`, unless a boolean mask or bias (`what`) of that shape fits the call.
inline void require_mask_shape(const Shape& s, const Geometry& g, const char* what,
                               const char* where) {
  require(s.dim == g.len_kv, where, ": the ", what, " has shape ", s,
          ", its last extent must be len_kv, ", g.len_kv, ": it does not broadcast over keys");
  const bool fits = (s.batch == 1 || s.batch == g.batch) && (s.heads == 1 || s.heads == g.heads) &&
                    (s.len == 1 || s.len == g.len_q);
  require(fits, where, ": the ", what, " has shape ", s, ", it must broadcast to ",
          Shape{g.batch, g.heads, g.len_q, g.len_kv});
}

template <class Real>
class BoundMask {
 public:
  // Throws std::invalid_argument if a part does not fit the sizes; `where` is the beginning of its
  // sentence. `threads` threads classify functions of positions.
  BoundMask(const Mask<Real>& mask, const Geometry& g, const char* where, int threads = 1)
      : mask_(mask), g_(g), first_key_(0), last_key_(kUnbounded) {
    for (const auto& rule : mask.rules) rules_.push_back(rule->classify(g, threads, where));
    require_at_end(where);
    for (const Band& band : mask.bands) {
      const Index shift = shift_of(band.align);
      if (band.left >= 0) from_ = std::max(from_, bound_at(band.offset, -band.left, shift));
      if (band.right >= 0) to_ = std::min(to_, bound_at(band.offset, band.right, shift));
    }
    hides_all_ = from_ > to_;
    detail::require_near(mask.slope_offset, "alibi", where);
    slope_shift_ = mask.slope_offset + shift_of(mask.slope_align);
    require(mask.soft_cap >= Real(0) && mask.soft_cap <= std::numeric_limits<Real>::max(), where,
            ": soft_cap is ", mask.soft_cap, ", it must be positive and finite, or 0 for none");
    check_lengths(where);
    for (const KeyRange& keys : mask.key_ranges) {
      require(keys.begin <= keys.end, where, ": key_range is [", keys.begin, ", ", keys.end,
              "), its end must not lie before its beginning");
      require(keys.begin >= 0 && keys.end <= g.len_kv, where, ": key_range is [", keys.begin, ", ",
              keys.end, "), it must lie in [0, ", g.len_kv, "]");
      first_key_ = std::max(first_key_, keys.begin);
      last_key_ = std::min(last_key_, keys.end);
    }
    check_broadcast(mask.allowed, "boolean mask", where);
    check_broadcast(mask.bias, "bias", where);
    check_documents(where);
    if (!mask.slopes) return;
    const std::vector<Real>& slopes = *mask.slopes;
    require(Index(slopes.size()) == g.heads, where, ": alibi has ", slopes.size(),
            " slopes, there are ", g.heads, " heads");
    for (std::size_t h = 0; h < slopes.size(); ++h)
      require(std::isfinite(slopes[h]), where, ": alibi has slope ", slopes[h], " for head ", h,
              ", it must be finite");
  }

  // Does this call have the first key of its rows, of which key ranges and other ranks may have parts?
  [[nodiscard]] bool has_first_key() const { return first_key_ == 0 && g_.share.keys_before == 0; }
  [[nodiscard]] bool has_bias() const { return mask_.bias.given(); }
  [[nodiscard]] bool has_slopes() const { return mask_.slopes.has_value(); }
  [[nodiscard]] bool has_allowed() const { return mask_.allowed.given(); }
  [[nodiscard]] bool has_documents() const { return mask_.query_documents.has_value(); }
  [[nodiscard]] bool has_rules() const { return !rules_.empty(); }
  // The mask's function of positions or list, if it has one alone; else null.
  [[nodiscard]] const PairBlocks* only_rule() const {
    return rules_.size() == 1 ? rules_[0].get() : nullptr;
  }
  // True if this call had to classify a function of positions, which a BlockMask would have spared it.
  [[nodiscard]] bool classifies_rules() const {
    return std::any_of(mask_.rules.begin(), mask_.rules.end(),
                       [](const auto& rule) { return !rule->is_classified(); });
  }
  // Number of keys in the blocks by which functions of positions are classified; 0 without a function.
  [[nodiscard]] Index rule_block() const {
    Index least = 0;
    for (const auto& rule : rules_)
      least = least == 0 ? rule->key_block : std::min(least, rule->key_block);
    return least;
  }
  [[nodiscard]] Real slope(Index h) const { return (*mask_.slopes)[std::size_t(h)]; }
  [[nodiscard]] Index slope_shift() const { return slope_shift_; }
  [[nodiscard]] Real soft_cap() const { return mask_.soft_cap; }
  [[nodiscard]] const TensorView<const Real>& bias() const { return mask_.bias; }
  [[nodiscard]] Index query_document(Index b, Index i) const {
    return (*mask_.query_documents)[std::size_t(b * g_.len_q + i)];
  }
  [[nodiscard]] Index key_document(Index b, Index j) const {
    return (*mask_.key_documents)[std::size_t(b * g_.len_kv + j)];
  }

  // What bands and key lengths leave to the queries of a batch: query i sees those of `keys` that are in [i + from, i + to).
  struct KeyBand {
    Index from, to;
    KeyRange keys;
    [[nodiscard]] KeyRange of(Index i) const {
      return {std::clamp<Index>(i + from, keys.begin, keys.end),
              std::clamp<Index>(i + to, keys.begin, keys.end)};
    }
  };
  [[nodiscard]] KeyBand band_of(Index b) const {
    return band_between(std::max(first_key_, g_.share.keys_before),
                        std::min(last_key_, g_.held_keys_end()), b);
  }
  // Keys that the bands and the key length leave to query i of batch b. The mask's other parts may hide some of them.
  [[nodiscard]] KeyRange keys_of(Index b, Index i) const { return band_of(b).of(i); }
  // Keys that the bands and the key length leave to some query in [first, first + rows).
  [[nodiscard]] KeyRange keys_of_rows(Index b, Index first, Index rows) const {
    if (rows == 0) return {};
    return {keys_of(b, first).begin, keys_of(b, first + rows - 1).end};
  }
  // Keys that the bands and the key length leave to every query in [first, first + rows).
  [[nodiscard]] KeyRange keys_of_all_rows(Index b, Index first, Index rows) const {
    if (rows == 0) return {};
    return {keys_of(b, first + rows - 1).begin, keys_of(b, first).end};
  }

  // First element of the row of a broadcast view that pair (b, h, i, .) reads.
  template <class U>
  [[nodiscard]] static U* broadcast_row(const TensorView<U>& view, Index b, Index h, Index i) {
    return view.row(view.shape().batch == 1 ? 0 : b, view.shape().heads == 1 ? 0 : h,
                    view.shape().len == 1 ? 0 : i);
  }
  [[nodiscard]] const bool* allowed_row(Index b, Index h, Index i) const {
    return broadcast_row(mask_.allowed, b, h, i);
  }
  [[nodiscard]] const Real* bias_row(Index b, Index h, Index i) const {
    return broadcast_row(mask_.bias, b, h, i);
  }

  // Calls hide(j) for every key j in [first, last) that query i may not see, once for each part that hides it.
  template <class Hide>
  void for_keys_of_other_documents(Index b, Index i, Index first, Index last, Hide&& hide) const {
    if (!has_documents()) return;
    const Index own = query_document(b, i);
    for (Index j = first; j < last; ++j)
      if (key_document(b, j) != own) hide(j);
  }
  template <class Hide>
  void for_keys_hidden_by_bias(Index b, Index h, Index i, Index first, Index last,
                               Hide&& hide) const {
    if (!has_bias()) return;
    const Real* bias = bias_row(b, h, i);
    for (Index j = first; j < last; ++j)
      if (bias[j] == -std::numeric_limits<Real>::infinity()) hide(j);
  }
  // Kind of a block under the functions of positions alone.
  [[nodiscard]] TileKind rule_kind(const PairBlock& at) const {
    TileKind kind = TileKind::full;
    for (std::size_t n = 0; n < rules_.size() && kind != TileKind::empty; ++n)
      kind = std::min(kind, rules_[n]->classify(at));
    return kind;
  }
  // Writes the bits of pairs that the functions of positions show, as PairFunction::fill() lays them out. A function that
  // hides none of these pairs is not asked; bits behind the last key mean nothing.
  void fill_by_rules(const PairBlock& at, std::uint64_t* words) const {
    bool first = true;
    for (const auto& rule : rules_) {
      if (rule->classify(at) == TileKind::full) continue;
      if (first)
        rule->pairs->fill(at, words);
      else
        keep_by_rule(*rule->pairs, at, words);
      first = false;
    }
    for (Index r = 0; r < at.rows && first; ++r)
      std::fill_n(words + r * kRuleWords, kRuleWords, ~std::uint64_t(0));
  }
  template <class Hide>
  void for_keys_hidden_by_rules(Index b, Index h, Index i, Index first, Index last,
                                Hide&& hide) const {
    std::uint64_t seen[kRuleWords];
    for (Index from = first; from < last && has_rules(); from += kRuleKeys) {
      const Index keys = std::min(kRuleKeys, last - from);
      fill_by_rules({b, h, i, 1, from, keys}, seen);
      for (Index j = 0; j < keys; ++j)
        if ((seen[j / 64] >> (j % 64) & 1) == 0) hide(from + j);
    }
  }
  // Calls hide(j) for every key in [first, last) that the mask hides from query i. Every other
  // answer of this class agrees with this one.
  template <class Hide>
  void for_hidden_keys(Index b, Index h, Index i, Index first, Index last, Hide&& hide) const {
    const KeyRange left_by_bands = keys_of(b, i);
    for (Index j = first; j < std::min(left_by_bands.begin, last); ++j) hide(j);
    for (Index j = std::max(left_by_bands.end, first); j < last; ++j) hide(j);
    for_keys_hidden_within_bands(b, h, i, first, last, hide);
  }

  [[nodiscard]] bool visible(Index b, Index h, Index i, Index j) const {
    bool seen = true;
    for_hidden_keys(b, h, i, j, j + 1, [&seen](Index) { seen = false; });
    return seen;
  }

  // True if query i sees any key.
  [[nodiscard]] bool sees_any(Index b, Index h, Index i) const {
    const KeyRange keys = keys_of(b, i);
    if (!has_allowed() && !has_documents() && !has_bias() && !has_rules()) return keys.size() > 0;
    for (Index j = keys.begin; j < keys.end; j += 64)
      if (seen_bits(b, h, i, j, std::min(j + 64, keys.end)) != 0) return true;
    return false;
  }

  // Number of keys of the whole call that query i sees, at hand or not; a bias of -infinity hides
  // its key. O(1) under bands and key lengths alone, else O(keys).
  [[nodiscard]] Index count_visible(Index b, Index h, Index i) const {
    const KeyRange keys = band_between(first_key_, last_key_, b).of(i);
    if (!has_allowed() && !has_documents() && !has_bias() && !has_rules()) return keys.size();
    Index count = 0;
    for (Index j = keys.begin; j < keys.end; j += 64)
      count += std::popcount(seen_bits(b, h, i, j, std::min(j + 64, keys.end)));
    return count;
  }

  // Kind of the tile of queries [first, first + rows) and keys [key, key + count). The bias is not looked at: pairs
  // that it hides are found when it is added to their scores.
  [[nodiscard]] TileKind classify(Index b, Index h, Index first, Index rows, Index key,
                                  Index count) const {
    TileKind kind = band_kind(b, first, rows, key, count);
    if (kind != TileKind::empty && has_documents())
      kind = std::min(kind, document_kind(b, first, rows, key, count));
    if (kind != TileKind::empty && has_allowed())
      kind = std::min(kind, allowed_kind(b, h, first, rows, key, count));
    if (kind != TileKind::empty && has_rules())
      kind = std::min(kind, rule_kind({b, h, first, rows, key, count}));
    return kind;
  }

 private:
  // The band of batch b within keys [first_key, last_key).
  [[nodiscard]] KeyBand band_between(Index first_key, Index last_key, Index b) const {
    if (hides_all_) return {};
    const Index length = mask_.key_lengths ? (*mask_.key_lengths)[std::size_t(b)] : g_.len_kv;
    const Index last = std::min(length, last_key), first = std::min(first_key, last);
    return {from_, to_ + 1, {first, last}};
  }
  // Calls hide(j) for the keys in [first, last) that a part other than bands and key lengths hides.
  template <class Hide>
  void for_keys_hidden_within_bands(Index b, Index h, Index i, Index first, Index last,
                                    Hide&& hide) const {
    for_keys_of_other_documents(b, i, first, last, hide);
    for_keys_hidden_by_bias(b, h, i, first, last, hide);
    for_keys_hidden_by_rules(b, h, i, first, last, hide);
    if (!has_allowed()) return;
    const bool* allowed = allowed_row(b, h, i);
    for (Index j = first; j < last; ++j)
      if (!allowed[j]) hide(j);
  }
  // One bit for each of up to 64 keys [first, end), the lowest for key `first`: 1 if query i sees
  // the key. Bands and key lengths must leave all of these keys to the query.
  [[nodiscard]] std::uint64_t seen_bits(Index b, Index h, Index i, Index first, Index end) const {
    std::uint64_t seen = ~std::uint64_t(0) >> (64 - (end - first));
    for_keys_hidden_within_bands(b, h, i, first, end,
                                 [&](Index key) { seen &= ~(std::uint64_t(1) << (key - first)); });
    return seen;
  }

  // A bound that is beyond every position, and does not overflow when positions are added to it.
  static constexpr Index kUnbounded = std::numeric_limits<Index>::max() / 4;

  [[nodiscard]] Index shift_of(Align align) const {
    return align == Align::bottom_right ? g_.len_kv - g_.len_q : 0;
  }
  // offset + side + shift, limited to [-kUnbounded, kUnbounded]. No position lies beyond, so the limit changes nothing.
  [[nodiscard]] static Index bound_at(Index offset, Index side, Index shift) {
    Index sum;
    if (__builtin_add_overflow(offset, side, &sum))
      sum = side > 0 ? 2 * kUnbounded : -2 * kUnbounded;
    return std::clamp(std::clamp(sum, -2 * kUnbounded, 2 * kUnbounded) + shift, -kUnbounded,
                      kUnbounded);
  }

  // Clears the bits of pairs that `pairs` hides, row by row.
  static void keep_by_rule(const PairFunction& pairs, const PairBlock& at, std::uint64_t* words) {
    std::uint64_t seen[kRuleWords];
    for (Index r = 0; r < at.rows; ++r) {
      PairBlock row = at;
      row.query += r;
      row.rows = 1;
      pairs.fill(row, seen);
      for (Index w = 0; w * 64 < at.keys; ++w) words[r * kRuleWords + w] &= seen[w];
    }
  }

  [[nodiscard]] TileKind band_kind(Index b, Index first, Index rows, Index key, Index count) const {
    const KeyRange top = keys_of(b, first), bottom = keys_of(b, first + rows - 1);
    if (key >= bottom.end || key + count <= top.begin) return TileKind::empty;
    const bool all = key >= bottom.begin && key + count <= top.end;
    return all ? TileKind::full : TileKind::partial;
  }

  [[nodiscard]] TileKind document_kind(Index b, Index first, Index rows, Index key,
                                       Index count) const {
    const Index* q = mask_.query_documents->data() + b * g_.len_q + first;
    const Index* k = mask_.key_documents->data() + b * g_.len_kv + key;
    const auto [q_min, q_max] = std::minmax_element(q, q + rows);
    const auto [k_min, k_max] = std::minmax_element(k, k + count);
    if (*q_max < *k_min || *k_max < *q_min) return TileKind::empty;
    const bool one = *q_min == *q_max && *k_min == *k_max;
    return one ? TileKind::full : TileKind::partial;
  }

  [[nodiscard]] TileKind allowed_kind(Index b, Index h, Index first, Index rows, Index key,
                                      Index count) const {
    bool all = true, any = false;
    const Index distinct = mask_.allowed.shape().len == 1 ? 1 : rows;
    for (Index r = 0; r < distinct && (all || !any); ++r) {
      const bool* row = allowed_row(b, h, first + r) + key;
      all = all && std::memchr(row, false, std::size_t(count)) == nullptr;
      any = any || std::memchr(row, true, std::size_t(count)) != nullptr;
    }
    return all ? TileKind::full : any ? TileKind::partial : TileKind::empty;
  }

  [[nodiscard]] bool slopes_stand_at_first_key() const {
    return mask_.slopes && mask_.slope_align == Align::top_left && mask_.slope_offset == 0;
  }
  // Throws for queries that are the last tokens of the keys while a part of the mask places query 0 at key 0.
  void require_at_end(const char* where) const {
    if (!g_.queries_at_end || g_.len_q >= g_.len_kv) return;
    const auto first = [](const auto& part) { return part.stands_at_first_key(); };
    const auto first_rule = [&](const auto& rule) { return first(*rule); };
    const char* const parts = std::any_of(mask_.bands.begin(), mask_.bands.end(), first) ? "bands"
                              : slopes_stand_at_first_key()                              ? "slopes"
                              : std::any_of(mask_.rules.begin(), mask_.rules.end(), first_rule)
                                  ? "functions of positions"
                                  : nullptr;
    require(parts == nullptr, where, ": the queries are the last tokens of the keys, len_q is ",
            g_.len_q, " and len_kv is ", g_.len_kv, "; the mask's ", parts ? parts : "",
            " place them at the first keys, Align::bottom_right at the last ones");
  }
  void check_lengths(const char* where) const {
    if (!mask_.key_lengths) return;
    require(Index(mask_.key_lengths->size()) == g_.batch, where, ": key_lengths has ",
            mask_.key_lengths->size(), " entries, the batch is ", g_.batch);
    for (Index b = 0; b < g_.batch; ++b) {
      const Index length = (*mask_.key_lengths)[std::size_t(b)];
      require(length >= 0 && length <= g_.len_kv, where, ": key_lengths[", b, "] is ", length,
              ", it must lie in [0, ", g_.len_kv, "]");
    }
  }

  template <class U>
  void check_broadcast(const TensorView<U>& view, const char* what, const char* where) const {
    if (!view.given()) return;
    const Shape& s = view.shape();
    require_mask_shape(s, g_, what, where);
    require(!view.has_elements() || view.data() != nullptr, where, ": the ", what,
            " has a null pointer and shape ", s);
  }

  void check_documents(const char* where) const {
    if (!mask_.query_documents && !mask_.key_documents) return;
    const auto check = [&](const std::optional<std::vector<Index>>& ids, Index count,
                           const char* of) {
      require(ids.has_value(), where, ": documents has no ", of,
              " ids, but those of the other side");
      require(Index(ids->size()) == count, where, ": documents has ", ids->size(), " ", of,
              " ids, there are ", count, " (batch x length)");
    };
    check(mask_.query_documents, g_.batch * g_.len_q, "query");
    check(mask_.key_documents, g_.batch * g_.len_kv, "key");
  }

  const Mask<Real>& mask_;
  Geometry g_;
  std::vector<std::shared_ptr<const PairBlocks>> rules_;
  // All bands together: query i sees keys [i + from_, i + to_].
  Index from_ = -kUnbounded, to_ = kUnbounded;
  Index first_key_, last_key_;  // keys that all key ranges have in common
  bool hides_all_ = false;      // the bands contradict each other, and leave no key to any query
  Index slope_shift_ = 0;
};

}  // namespace HEED_ABI
}  // namespace heed
