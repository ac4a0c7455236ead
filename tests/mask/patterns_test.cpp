// SPDX-License-Identifier: Apache-2.0
// The masks of mask/patterns.hpp compared with their definitions in plain loops.

#include "catch.hpp"
#include "message_of.hpp"

#include <heed/mask/bound_mask.hpp>
#include <heed/mask/patterns.hpp>

#include <algorithm>
#include <functional>
#include <set>
#include <vector>

using namespace heed;
using heed_test::message_of;

namespace {

[[nodiscard]] Geometry sizes(Index batch, Index len_q, Index len_kv) {
  return {batch, 2, 2, 2, len_q, len_kv, 4, 4};
}

void check(const Mask<float>& mask, const Geometry& g,
           const std::function<bool(Index b, Index i, Index j)>& shows) {
  const BoundMask<float> bound(mask, g, "test");
  Index wrong = 0;
  for (Index b = 0; b < g.batch; ++b)
    for (Index h = 0; h < g.heads; ++h)
      for (Index i = 0; i < g.len_q; ++i)
        for (Index j = 0; j < g.len_kv; ++j) wrong += bound.visible(b, h, i, j) != shows(b, i, j);
  CHECK(wrong == 0);
}

// Keys that a query of a row of `length` sees: the window around it, pushed back inside.
[[nodiscard]] std::set<Index> neighbours(Index i, Index length, Index window) {
  Index first = i - window / 2;
  while (first < 0) ++first;
  while (first + window > length) --first;
  std::set<Index> seen;
  for (Index j = first; j < first + window; ++j) seen.insert(j);
  return seen;
}

}  // namespace

TEST_CASE("a prefix is seen by all, what follows causally") {
  const std::vector<Index> prefix{5, 0, 40};
  check(prefix_lm<float>(prefix), sizes(3, 30, 30),
        [&](Index b, Index i, Index j) { return j <= i || j < prefix[std::size_t(b)]; });
  check(prefix_lm<float>(prefix, Align::bottom_right), sizes(3, 7, 30),
        [&](Index b, Index i, Index j) { return j <= i + 23 || j < prefix[std::size_t(b)]; });
  CHECK(message_of([] { (void)prefix_lm<float>({}); }) ==
        "prefix_lm: prefix has 0 lengths, it must have one per batch");
  CHECK(message_of([&] {
          check(prefix_lm<float>({1, 2}), sizes(3, 4, 4), [](Index, Index, Index) { return true; });
        }) == "test: prefix_lm has 2 lengths, the batch is 3");
  // Four lengths for three batches are a mistake as well, and one length serves all.
  CHECK(message_of([&] {
          const BoundMask<float> b(prefix_lm<float>({1, 2, 3, 4}), sizes(3, 4, 4), "test");
        }) == "test: prefix_lm has 4 lengths, the batch is 3");
  check(prefix_lm<float>({3}), sizes(3, 6, 6),
        [](Index, Index i, Index j) { return j <= i || j < 3; });
  CHECK(message_of([] {
          (void)prefix_lm<float>({2, -5});
        }) == "prefix_lm: the length of batch 1 is -5, it must lie in [0, 536870912)");
}

TEST_CASE("a dilated window sees every step-th key on both sides") {
  for (const Index step : {1, 2, 7}) {
    std::set<Index> reach;
    for (Index n = -3; n <= 3; ++n) reach.insert(n * step);
    check(dilated<float>(3, step), sizes(1, 60, 70),
          [&](Index, Index i, Index j) { return reach.count(j - i) > 0; });
    check(dilated<float>(3, step, Align::bottom_right), sizes(1, 60, 70),
          [&](Index, Index i, Index j) { return reach.count(j - i - 10) > 0; });
  }
  CHECK(message_of([] { (void)dilated<float>(2, 0); }) ==
        "dilated: window is 2 and step is 0; they must be at least 0 and 1");
}

TEST_CASE("each query sees as many neighbours as the window is wide") {
  for (const Index window : {1, 3, 6, 7, 20}) {
    const Geometry g = sizes(1, 20, 20);
    check(neighbourhood<float>(20, window), g,
          [&](Index, Index i, Index j) { return neighbours(i, 20, window).count(j) > 0; });
  }
  // At the borders, from the paper: a window of 3 of 5 tokens.
  const Mask<float> three_of_five = neighbourhood<float>(5, 3);
  const BoundMask<float> bound(three_of_five, sizes(1, 5, 5), "test");
  const std::vector<Index> firsts{0, 0, 1, 2, 2};
  for (Index i = 0; i < 5; ++i)
    for (Index j = 0; j < 5; ++j)
      CHECK(bound.visible(0, 0, i, j) ==
            (j >= firsts[std::size_t(i)] && j < firsts[std::size_t(i)] + 3));
  CHECK(message_of([] { (void)neighbourhood<float>(5, 6); }) ==
        "neighbourhood: window is 6, it must lie in [1, 5], the length");
  CHECK(message_of([&] {
          const BoundMask<float> b(neighbourhood<float>(5, 3), sizes(1, 5, 6), "test");
        }) == "test: neighbourhood is one of 5 tokens, the call has 6");
}

TEST_CASE("neighbours in an image are those of both directions") {
  for (const auto& [height, width, window] :
       {std::tuple<Index, Index, Index>{6, 9, 3}, {5, 5, 5}, {7, 4, 2}, {3, 30, 1}}) {
    const Index w = width;
    check(neighbourhood<float>(height, width, window), sizes(1, height * width, height * width),
          [&, height = height, window = window](Index, Index i, Index j) {
            return neighbours(i / w, height, window).count(j / w) > 0 &&
                   neighbours(i % w, w, window).count(j % w) > 0;
          });
  }
  CHECK(message_of([] { (void)neighbourhood<float>(5, 4, 5); }) ==
        "neighbourhood: window is 5, it must lie in [1, 4], the shorter side");
}

TEST_CASE("block-sparse attention sees the listed blocks") {
  check(block_sparse<float>({0, 2, 3, 3}, {0, 2, 1}, 10), sizes(2, 25, 30),
        [](Index, Index i, Index j) {
          return (i / 10 == 0 && j / 10 != 1) || (i / 10 == 1 && j / 10 == 1);
        });
}

TEST_CASE("a token of a tree sees its ancestors and itself") {
  //  0 - 1 - 3
  //    \ 2 - 4, 6        5 - 7 is a tree of its own
  const std::vector<Index> parents{-1, 0, 0, 1, 2, -1, 2, 5};
  const auto is_ancestor = [&](Index i, Index j) {
    for (Index at = i; at >= 0; at = parents[std::size_t(at)])
      if (at == j) return true;
    return false;
  };
  check(tree<float>(parents), sizes(2, 8, 8),
        [&](Index, Index i, Index j) { return is_ancestor(i, j); });
  check(tree<float>(parents, Align::bottom_right), sizes(1, 3, 8),
        [&](Index, Index i, Index j) { return is_ancestor(i + 5, j); });
  // A chain is causal.
  check(tree<float>({-1, 0, 1, 2, 3}), sizes(1, 5, 5),
        [](Index, Index i, Index j) { return j <= i; });
  CHECK(message_of([] {
          (void)tree<float>({-1, 1});
        }) == "tree: the parent of token 1 is 1, it must lie in [-1, 1)");
  // The first tokens of a larger tree, and tokens that a tree does not have.
  check(tree<float>(parents), sizes(1, 4, 6),
        [&](Index, Index i, Index j) { return is_ancestor(i, j); });
  const auto refusal = [](Index len_q, Index len_kv, Align align) {
    return message_of([&] {
      const BoundMask<float> b(tree<float>({-1, 0, 0}, align), sizes(1, len_q, len_kv), "test");
    });
  };
  CHECK(refusal(2, 4, Align::top_left) == "test: tree has 3 tokens, the call has 4 keys");
  CHECK(refusal(4, 3, Align::top_left) ==
        "test: tree has 3 tokens, the queries of the call stand at [0, 4)");
  CHECK(refusal(3, 2, Align::bottom_right) ==
        "test: tree has 3 tokens, the queries of the call stand at [-1, 2)");
}

TEST_CASE("documents that follow each other see a window of their own") {
  const std::vector<Index> lengths{4, 0, 9, 7};
  const auto document = [](Index t) { return t < 4 ? 0 : t < 13 ? 1 : 2; };
  check(document_window<float>(lengths, 2, 3, 1), sizes(2, 20, 20), [&](Index, Index i, Index j) {
    return document(i) == document(j) && j >= i - 3 && j <= i + 1;
  });
  check(document_window<float>(lengths, 2, -1, 0), sizes(2, 20, 20),
        [&](Index, Index i, Index j) { return document(i) == document(j) && j <= i; });
  CHECK(message_of([] {
          (void)document_window<float>({3, -1}, 1, 0, 0);
        }) == "document_window: document 1 has length -1, it must not be negative");
}
