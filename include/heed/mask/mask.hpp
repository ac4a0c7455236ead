// SPDX-License-Identifier: Apache-2.0
#pragma once

// A mask says which keys each query sees, and what is added to the scores. It is a value, built
// from parts that are joined with `&`.
//
//   score(i, j) = op's score - slope_h |p - j| + bias(b, h, i, j)      where (i, j) is visible
//
// with p = i (top-left) or i + len_kv - len_q (bottom-right), plus offset: the position of query i on the key axis.
// Inputs::first_query (engine/call.hpp) moves the positions that scores read, and not p. For queries that are the last
// tokens of their keys, Align::bottom_right gives the position that scores read; a call with Inputs::queries_at_end refuses
// top_left without an offset. A pair is visible when every part allows it. Weights and gradients of a hidden pair are
// exactly 0, whatever its key and value hold.
//
//   auto mask = causal<float>() & key_lengths<float>({7, 9}) & bias(view) & boolean(allowed);
//
// mask/visible.hpp makes a mask of a function of positions, mask/patterns.hpp has some of them, mask/combine.hpp joins
// masks with | and negates them with !, and mask/block_mask.hpp keeps for many calls which pairs a function hides.

#include <heed/core/view.hpp>
#include <heed/mask/pair_rule.hpp>

#include <limits>
#include <memory>
#include <optional>
#include <string>
#include <vector>

namespace heed {
inline namespace HEED_ABI {

// The place of query 0 on the key axis when the lengths differ: at key 0, or so that the last query stands at the last key.
enum class Align { top_left, bottom_right };

// Pair (i, j) is visible if p - left <= j <= p + right; a negative left or right is no bound.
struct Band {
  Index left = -1, right = -1;
  Align align = Align::top_left;
  Index offset = 0;  // added to p

  // True if the band's place depends on query 0 standing at key 0: top left, a bounded side and no offset.
  [[nodiscard]] bool stands_at_first_key() const {
    return align == Align::top_left && offset == 0 && (left >= 0 || right >= 0);
  }
  [[nodiscard, gnu::cold]] std::string text() const {
    return detail::sentence("(left ", left, ", right ", right, ", offset ", offset,
                            align == Align::top_left ? ", top_left)" : ", bottom_right)");
  }
  bool operator==(const Band&) const = default;
};

// Keys [begin, end); none if end <= begin.
struct KeyRange {
  Index begin = 0, end = 0;
  [[nodiscard]] Index size() const { return end > begin ? end - begin : 0; }
  [[nodiscard, gnu::cold]] std::string text() const {
    return detail::sentence("[", begin, ", ", end, ")");
  }
  bool operator==(const KeyRange&) const = default;
};

namespace detail {

// Positions fit 32 bits, and so do sums of two of them.
inline constexpr Index kFarthest = Index(1) << 29;

// Throws if an offset that positions are added to is too large; `what` names it.
inline void require_near(Index offset, const char* what, const char* where) {
  require(offset > -kFarthest && offset < kFarthest, where, ": ", what, " has offset ", offset,
          ", it must lie between ", -kFarthest, " and ", kFarthest);
}

}  // namespace detail

template <class Real>
struct Mask {
  std::vector<Band> bands;
  // Every query sees only keys that lie in all of these ranges.
  std::vector<KeyRange> key_ranges;
  // Number of visible keys per batch; if not given, all are visible.
  std::optional<std::vector<Index>> key_lengths;
  // (batch or 1, heads or 1, len_q or 1, len_kv): true where visible.
  TensorView<const bool> allowed;
  // (batch or 1, heads or 1, len_q or 1, len_kv): added to the score; -infinity hides.
  TensorView<const Real> bias;
  // One id per (batch, query) and per (batch, key); pairs of different ids are hidden. Both are given, or none.
  std::optional<std::vector<Index>> query_documents, key_documents;
  // ALiBi: one slope per head, for distances from p.
  std::optional<std::vector<Real>> slopes;
  Align slope_align = Align::top_left;
  Index slope_offset = 0;  // added to p
  // Soft cap c: scale * q.k becomes c tanh(scale * q.k / c); 0 for none.
  Real soft_cap = Real(0);
  // Functions of positions; each must show a pair.
  std::vector<std::shared_ptr<const PairRule>> rules;

  [[nodiscard]] friend Mask operator&(Mask a, const Mask& b) {
    a.bands.insert(a.bands.end(), b.bands.begin(), b.bands.end());
    a.key_ranges.insert(a.key_ranges.end(), b.key_ranges.begin(), b.key_ranges.end());
    a.rules.insert(a.rules.end(), b.rules.begin(), b.rules.end());
    const auto join_given = [](auto& to, const auto& from, const char* what) {
      join(to, from, to.has_value(), from.has_value(), what);
    };
    join_given(a.key_lengths, b.key_lengths, "key_lengths");
    join(a.allowed, b.allowed, a.allowed.given(), b.allowed.given(), "a boolean mask");
    join(a.bias, b.bias, a.bias.given(), b.bias.given(), "bias");
    join_given(a.query_documents, b.query_documents, "documents");
    join_given(a.key_documents, b.key_documents, "documents");
    join_given(a.slopes, b.slopes, "alibi");
    if (b.slopes) a.slope_align = b.slope_align, a.slope_offset = b.slope_offset;
    join(a.soft_cap, b.soft_cap, a.soft_cap != Real(0), b.soft_cap != Real(0), "soft_cap");
    return a;
  }

 private:
  template <class Part>
  static void join(Part& a, const Part& b, bool a_given, bool b_given, const char* what) {
    require(!(a_given && b_given), "Mask: both sides of & have ", what, "; one mask holds one");
    if (b_given) a = b;
  }
};

// Query i sees keys up to its own position.
template <class Real>
[[nodiscard]] Mask<Real> causal(Align align = Align::top_left, Index offset = 0) {
  Mask<Real> mask;
  mask.bands.push_back({-1, 0, align, offset});
  return mask;
}

namespace detail {

// The band of a window; `who` begins the error's sentence.
[[nodiscard]] inline Band band_of_window(Index left, Index right, Align align, Index offset,
                                         const std::string& who) {
  require(left >= -1 && right >= -1, who, " left is ", left, " and right is ", right,
          ", each must be -1 (open) or at least 0");
  return {left, right, align, offset};
}

}  // namespace detail

// Query at p sees keys in [p - left, p + right]; -1 leaves a side open. A causal window of w keys that
// includes the own one is window(w - 1, 0).
template <class Real>
[[nodiscard]] Mask<Real> window(Index left, Index right, Align align = Align::top_left,
                                Index offset = 0) {
  Mask<Real> mask;
  mask.bands.push_back(detail::band_of_window(left, right, align, offset, "window:"));
  return mask;
}

// Batch b sees its first lengths[b] keys; 0 is allowed.
template <class Real>
[[nodiscard]] Mask<Real> key_lengths(std::vector<Index> lengths) {
  Mask<Real> mask;
  mask.key_lengths = std::move(lengths);
  return mask;
}

// Every query sees keys [begin, end) only; 0 <= begin <= end <= len_kv. The keys keep their
// positions. Outputs over ranges that make up all keys can be merged (engine/partial.hpp).
template <class Real>
[[nodiscard]] Mask<Real> key_range(Index begin, Index end) {
  Mask<Real> mask;
  mask.key_ranges.push_back({begin, end});
  return mask;
}

// (batch or 1, heads or 1, len_q or 1, len_kv), true where visible.
template <class Real>
[[nodiscard]] Mask<Real> boolean(TensorView<const bool> allowed) {
  Mask<Real> mask;
  mask.allowed = allowed;
  return mask;
}

// The result of boolean(view), whose scalar is not known yet: it becomes a Mask of the type that it
// is joined with, or of the op that it is given to.
struct BooleanMask {
  TensorView<const bool> allowed;
  template <class Real>
  operator Mask<Real>() const {
    return boolean<Real>(allowed);
  }
};
[[nodiscard]] inline BooleanMask boolean(TensorView<const bool> allowed) { return {allowed}; }

// (batch or 1, heads or 1, len_q or 1, len_kv), added to the scores; -infinity hides.
template <class Real>
[[nodiscard]] Mask<Real> bias(TensorView<const Real> values) {
  Mask<Real> mask;
  mask.bias = values;
  return mask;
}

// Ids of shape (batch, len_q) and (batch, len_kv): a query sees keys of its own document.
template <class Real>
[[nodiscard]] Mask<Real> documents(std::vector<Index> of_queries, std::vector<Index> of_keys) {
  Mask<Real> mask;
  mask.query_documents = std::move(of_queries);
  mask.key_documents = std::move(of_keys);
  return mask;
}

// Attention with linear biases: -slopes[h] |p - j| is added to the score.
template <class Real>
[[nodiscard]] Mask<Real> alibi(std::vector<Real> slopes, Align align = Align::top_left,
                               Index offset = 0) {
  Mask<Real> mask;
  mask.slopes = std::move(slopes);
  mask.slope_align = align;
  mask.slope_offset = offset;
  return mask;
}

// scale * q.k is replaced by cap * tanh(scale * q.k / cap).
template <class Real>
[[nodiscard]] Mask<Real> soft_cap(Real cap) {
  require(cap > Real(0) && cap <= std::numeric_limits<Real>::max(), "soft_cap: cap is ", cap,
          ", it must be positive and finite");
  Mask<Real> mask;
  mask.soft_cap = cap;
  return mask;
}

}  // namespace HEED_ABI
}  // namespace heed
