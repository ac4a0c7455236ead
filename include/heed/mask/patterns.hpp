// SPDX-License-Identifier: Apache-2.0
#pragma once

// Masks with a name in the literature, each a function of positions in one line. i is the query, j the key.

#include <heed/mask/block_mask.hpp>
#include <heed/mask/visible.hpp>

#include <algorithm>
#include <utility>
#include <vector>

namespace heed {
inline namespace HEED_ABI {

// j <= i, or j < prefix[b]: every query sees the keys of the prefix, and the keys behind it
// causally. One length per batch, or one for all of them; a length beyond the keys shows all.
//   Raffel et al. 2020, "Exploring the Limits of Transfer Learning", section 3.2.1
template <class Real>
[[nodiscard]] Mask<Real> prefix_lm(std::vector<Index> prefix, Align align = Align::top_left) {
  const Index batch = std::max<Index>(1, Index(prefix.size()));
  require(!prefix.empty(), "prefix_lm: prefix has 0 lengths, it must have one per batch");
  for (std::size_t b = 0; b < prefix.size(); ++b)
    require(prefix[b] >= 0 && prefix[b] < detail::kFarthest, "prefix_lm: the length of batch ", b,
            " is ", prefix[b], ", it must lie in [0, ", detail::kFarthest, ")");
  return detail::mask_of<Real>(detail::visible_rule(
      [prefix = TokenValues(std::move(prefix), batch)](auto b, auto, auto i, auto j) {
        return (j <= i) | (j < prefix(b, 0));
      },
      align, {.name = "prefix_lm", .lengths = batch}));
}

// |i - j| <= window * step, and step divides i - j: every step-th key, `window` of them on each side.
//   Beltagy et al. 2020, "Longformer", section 3.1
template <class Real>
[[nodiscard]] Mask<Real> dilated(Index window, Index step, Align align = Align::top_left) {
  require(window >= 0 && step > 0, "dilated: window is ", window, " and step is ", step,
          "; they must be at least 0 and 1");
  const Index reach = checked_product(window, step, "dilated");
  return visible<Real>(
      [reach, step](auto, auto, auto i, auto j) {
        return (absolute(i - j) <= reach) & ((i - j) % step == 0);
      },
      align);
}

namespace detail {

// First of the `window` places around place i of `length`, moved inwards at the ends.
[[nodiscard]] inline Positions first_neighbour(Positions i, Index window, Index length) {
  return min(max(i - window / 2, 0), length - window);
}

}  // namespace detail

// s <= j < s + window with s = min(max(i - window / 2, 0), length - window): each query sees exactly `window` keys of a
// sequence of `length` tokens, around it where the ends leave room.
//   Hassani et al. 2023, "Neighborhood Attention Transformer" (NATTEN), section 3.1
template <class Real>
[[nodiscard]] Mask<Real> neighbourhood(Index length, Index window) {
  require(window >= 1 && window <= length, "neighbourhood: window is ", window,
          ", it must lie in [1, ", length, "], the length");
  return detail::mask_of<Real>(detail::visible_rule(
      [=](auto, auto, auto i, auto j) {
        const Positions first = detail::first_neighbour(i, window, length);
        return (j >= first) & (j < first + window);
      },
      Align::top_left, {.name = "neighbourhood", .length = length}));
}

// The same along both axes of an image whose rows follow each other: token y * width + x stands at
// (x, y), and each query sees window * window keys.
template <class Real>
[[nodiscard]] Mask<Real> neighbourhood(Index height, Index width, Index window) {
  require(window >= 1 && window <= std::min(height, width), "neighbourhood: window is ", window,
          ", it must lie in [1, ", std::min(height, width), "], the shorter side");
  return detail::mask_of<Real>(detail::visible_rule(
      [=](auto, auto, auto i, auto j) {
        const Positions top = detail::first_neighbour(i / width, window, height),
                        left = detail::first_neighbour(i % width, window, width), y = j / width,
                        x = j % width;
        return (y >= top) & (y < top + window) & (x >= left) & (x < left + window);
      },
      Align::top_left,
      {.name = "neighbourhood", .length = checked_product(height, width, "neighbourhood")}));
}

// Row n of blocks of `block` queries sees blocks indices[start[n]], ..., indices[start[n + 1] - 1] of `block` keys.
//   Child et al. 2019, "Generating Long Sequences with Sparse Transformers"; Zaheer et al. 2020, "Big Bird"
template <class Real>
[[nodiscard]] Mask<Real> block_sparse(std::vector<Index> start, std::vector<Index> indices,
                                      Index block) {
  return block_lists<Real>({block, block, std::move(start), std::move(indices)});
}

// A token sees itself and its ancestors: its parent, the parent's parent, ... parents[j] < j, or -1
// for a root. A walk through the tree numbers the tokens; enter[j] is the first number in j's
// branch and leave[j] the first behind it: enter[j] <= enter[i] < leave[j].
// Calls may have fewer tokens than the tree, but not more.
//   Miao et al. 2024, "SpecInfer", section 4.2, where the tokens are guesses that a model verifies together
template <class Real>
[[nodiscard]] Mask<Real> tree(const std::vector<Index>& parents, Align align = Align::top_left) {
  const std::size_t count = parents.size();
  std::vector<Index> size(count, 1), enter(count, 0), leave(count), taken(count, 0);
  for (std::size_t j = 0; j < count; ++j)
    require(parents[j] >= -1 && parents[j] < Index(j), "tree: the parent of token ", j, " is ",
            parents[j], ", it must lie in [-1, ", j, ")");
  for (std::size_t j = count; j-- > 0;)
    if (parents[j] >= 0) size[std::size_t(parents[j])] += size[j];
  Index roots = 0;
  for (std::size_t j = 0; j < count; ++j) {
    const bool root = parents[j] < 0;
    const auto parent = root ? 0 : std::size_t(parents[j]);
    Index& before = root ? roots : taken[parent];
    enter[j] = root ? before : enter[parent] + 1 + before;
    before += size[j];
    leave[j] = enter[j] + size[j];
  }
  return detail::mask_of<Real>(detail::visible_rule(
      [enter = TokenValues(std::move(enter)), leave = TokenValues(std::move(leave))](
          auto, auto, auto i, auto j) {
        const Positions own = enter(0, i);
        return (enter(0, j) <= own) & (own < leave(0, j));
      },
      align, {.name = "tree", .tokens = Index(count)}));
}

// Documents of these lengths, one behind the other, the same in all batches; a query sees `left` keys before it and
// `right` behind it in its own document, -1 for all.
template <class Real>
[[nodiscard]] Mask<Real> document_window(const std::vector<Index>& lengths, Index batch, Index left,
                                         Index right) {
  require(batch >= 0, "document_window: batch is ", batch, ", it must not be negative");
  std::vector<Index> one, all;
  for (std::size_t d = 0; d < lengths.size(); ++d) {
    require(lengths[d] >= 0, "document_window: document ", d, " has length ", lengths[d],
            ", it must not be negative");
    one.insert(one.end(), std::size_t(lengths[d]), Index(d));
  }
  for (Index b = 0; b < batch; ++b) all.insert(all.end(), one.begin(), one.end());
  return documents<Real>(all, all) & window<Real>(left, right);
}

}  // namespace HEED_ABI
}  // namespace heed
