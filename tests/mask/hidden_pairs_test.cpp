// SPDX-License-Identifier: Apache-2.0
// A mask answers in several ways which pairs it hides: key by key, for one pair, for whole rows, for tiles, and a vector at
// a time. All agree with the rules of mask.hpp, written down here pair by pair.

#include "catch.hpp"

#include <heed/core/random.hpp>
#include <heed/engine/tile/hidden_pairs.hpp>

#include <algorithm>
#include <memory>

using namespace heed;

namespace {

constexpr Geometry kG{.batch = 2,
                      .heads = 2,
                      .query_heads = 2,
                      .kv_heads = 2,
                      .len_q = 37,
                      .len_kv = 83,
                      .dim_qk = 4,
                      .dim_v = 4};

// A mask of random parts, and the memory to which its views refer.
struct RandomMask {
  RandomSequence random;
  Mask<float> mask;
  std::unique_ptr<bool[]> allowed;
  std::vector<float> bias;

  explicit RandomMask(unsigned seed) : random(seed) {
    for (Index bands = below(3); bands > 0; --bands)
      mask.bands.push_back({below(60) - 1, below(60) - 1,
                            below(2) ? Align::top_left : Align::bottom_right, below(9) - 4});
    if (below(2)) mask.key_lengths = std::vector<Index>{below(84), 60 + below(24)};
    if (below(2)) {
      const Shape shape = broadcast();
      allowed.reset(new bool[std::size_t(element_count(shape, "mask"))]);
      for (Index n = 0; n < element_count(shape, "mask"); ++n)
        allowed[std::size_t(n)] = below(4) > 0;
      mask.allowed = {allowed.get(), shape};
    }
    if (below(2)) {
      const Shape shape = broadcast();
      for (Index n = 0; n < element_count(shape, "mask"); ++n)
        bias.push_back(below(4) > 0 ? 1.0F : -kInfinity<float>);
      mask.bias = {bias.data(), shape};
    }
    if (below(2)) {
      mask.query_documents.emplace();
      mask.key_documents.emplace();
      for (Index n = 0; n < kG.batch * kG.len_q; ++n)
        mask.query_documents->push_back(n % kG.len_q / 20);
      for (Index n = 0; n < kG.batch * kG.len_kv; ++n)
        mask.key_documents->push_back(n % kG.len_kv / 25);
    }
  }

  [[nodiscard]] Index below(Index n) { return random.below(n); }
  [[nodiscard]] Shape broadcast() {
    return {below(2) ? 1 : kG.batch, below(2) ? 1 : kG.heads, below(2) ? 1 : kG.len_q, kG.len_kv};
  }
};

// The rules of mask.hpp, pair by pair.
[[nodiscard]] bool hidden_in_words(const Mask<float>& m, Index b, Index h, Index i, Index j) {
  for (const Band& band : m.bands) {
    const Index p =
        i + band.offset + (band.align == Align::bottom_right ? kG.len_kv - kG.len_q : 0);
    if (band.left >= 0 && j < p - band.left) return true;
    if (band.right >= 0 && j > p + band.right) return true;
  }
  if (m.key_lengths && j >= (*m.key_lengths)[std::size_t(b)]) return true;
  const auto at = [&](const auto& view) {
    const Shape& s = view.shape();
    return view(s.batch == 1 ? 0 : b, s.heads == 1 ? 0 : h, s.len == 1 ? 0 : i, j);
  };
  if (m.allowed.given() && !at(m.allowed)) return true;
  if (m.bias.given() && at(m.bias) == -kInfinity<float>) return true;
  return m.query_documents && (*m.query_documents)[std::size_t(b * kG.len_q + i)] !=
                                  (*m.key_documents)[std::size_t(b * kG.len_kv + j)];
}

// Compares hidden(i, j) over a tile with the marks that the engine computes for it.
void check_tile(const BoundMask<float>& bound, const Mask<float>& mask, const TilePlace& at) {
  const int vectors = int((at.rows + kLanes<float> - 1) / kLanes<float>);
  const Index lanes = vectors * kLanes<float>;
  std::vector<float> memory(std::size_t(at.keys * lanes), 0.0F);
  const LaneTile<float> marks{memory.data(), at.keys, lanes};
  const TileMask<float> tile(bound, at, vectors);
  tile.hide(marks);
  if (bound.has_bias()) tile.hide_biased(marks);
  Index wrong = 0, visible = 0, hidden_before_bias = 0;
  Mask<float> unbiased = mask;
  unbiased.bias = {};
  for (Index i = 0; i < lanes; ++i)
    for (Index j = 0; j < at.keys; ++j) {
      const bool lane_hides = marks.row(j)[i] == -kInfinity<float>;
      if (i >= at.rows) {
        wrong += !lane_hides;  // a lane beyond the last query sees no key
        continue;
      }
      wrong += lane_hides != hidden_in_words(mask, at.batch, at.head, at.query + i, at.key + j);
      const bool hidden = hidden_in_words(unbiased, at.batch, at.head, at.query + i, at.key + j);
      hidden_before_bias += hidden;
      visible += !hidden;
    }
  CHECK(wrong == 0);
  // A tile that is classified as empty or full is so; a partial one may be either.
  const TileKind kind = bound.classify(at.batch, at.head, at.query, at.rows, at.key, at.keys);
  if (kind == TileKind::empty) CHECK(visible == 0);
  if (kind == TileKind::full) CHECK(hidden_before_bias == 0);
}

}  // namespace

TEST_CASE("every answer about hidden pairs follows the words of mask.hpp") {
  for (unsigned seed = 0; seed < 300; ++seed) {
    INFO("seed " << seed);
    RandomMask random(seed);
    const BoundMask<float> bound(random.mask, kG, "test");
    const auto hidden = [&](Index b, Index h, Index i, Index j) {
      return hidden_in_words(random.mask, b, h, i, j);
    };
    Index wrong = 0;
    for (Index b = 0; b < kG.batch; ++b)
      for (Index h = 0; h < kG.heads; ++h)
        for (Index i = 0; i < kG.len_q; ++i) {
          const Index first = random.below(kG.len_kv),
                      last = first + random.below(kG.len_kv - first + 1);
          std::vector<char> named(std::size_t(kG.len_kv), 0);
          bound.for_hidden_keys(b, h, i, first, last, [&](Index j) {
            REQUIRE(j >= first);
            REQUIRE(j < last);
            named[std::size_t(j)] = 1;
          });
          bool any = false;
          for (Index j = 0; j < kG.len_kv; ++j) {
            if (j >= first && j < last) wrong += bool(named[std::size_t(j)]) != hidden(b, h, i, j);
            wrong += bound.visible(b, h, i, j) == hidden(b, h, i, j);
            any = any || !hidden(b, h, i, j);
          }
          wrong += bound.sees_any(b, h, i) != any;
        }
    CHECK(wrong == 0);
    for (int tile = 0; tile < 20; ++tile) {
      TilePlace at{.batch = random.below(kG.batch), .head = random.below(kG.heads)};
      at.query = random.below(kG.len_q);
      at.rows = 1 + random.below(std::min(kPanelLanes<float>, kG.len_q - at.query));
      at.key = random.below(kG.len_kv);
      at.keys = 1 + random.below(kG.len_kv - at.key);
      check_tile(bound, random.mask, at);
    }
  }
}
