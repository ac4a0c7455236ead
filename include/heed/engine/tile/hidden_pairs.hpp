// SPDX-License-Identifier: Apache-2.0
#pragma once

// Masks on lane tiles: rows are keys, lanes are queries. Adding a bias or a slope, and hiding: a hidden
// score becomes -infinity, whatever it was. BoundMask::for_hidden_keys() says which pairs are hidden; bands and boolean
// masks are hidden here a vector at a time, and mask/hidden_pairs_test.cpp holds both to the same pairs.

#include <heed/engine/tile/place.hpp>
#include <heed/mask/bound_mask.hpp>
#include <heed/plug/tile.hpp>
#include <heed/simd/exp.hpp>
#include <heed/simd/instructions.hpp>
#include <heed/simd/transpose.hpp>

#include <algorithm>
#include <bit>
#include <cstdint>
#include <cstring>
#include <type_traits>

namespace heed {
inline namespace HEED_ABI {

template <class Real>
class TileMask {
 public:
  TileMask(const BoundMask<Real>& mask, const TilePlace& place, int vectors)
      : mask_(mask), place_(place), vectors_(vectors) {}

  // scores += bias. Rows of a bias are turned a block of W keys at a time, which the first level of cache holds.
  void add_bias(const LaneTile<Real>& scores) const {
    constexpr Index W = kLanes<Real>;
    const auto& p = place_;
    const Real* source = mask_.bias_row(p.batch, p.head, p.query) + p.key;
    const Index row = mask_.bias().strides().row;
    const bool shared = mask_.bias().shape().len == 1;
    const auto add = [&](Index j, int v, Pack<Real> x) {
      scores.store(j, v, select(is_hidden(x), x, scores.load(j, v) + x));
    };
    alignas(64) Real turned[std::size_t(W * W)];
    for_computed([&](int v, const KeyRange& keys) {
      if (shared) {
        for (Index j = keys.begin; j < keys.end; ++j) add(j, v, Pack<Real>(source[j]));
        return;
      }
      const Real* rows = source + v * W * row;
      const Index count = std::min(W, p.rows - v * W);
      if (count <= 0) return;  // lanes beyond the last query
      for (Index first = keys.begin; first < keys.end; first += W) {
        const Index some = std::min(W, keys.end - first);
        for (Index i = 0; i < count; ++i) __builtin_prefetch(rows + i * row + first + kAhead);
        pack_lanes(rows + first, row, count, some, turned, W);
        for (Index j = 0; j < some; ++j) add(first + j, v, Pack<Real>::load(turned + j * W));
      }
    });
  }

  // Hides what a bias of -infinity hides.
  void hide_biased(const LaneTile<Real>& scores) const {
    hide_rows(scores, [&](Index i, auto&& hide) {
      mask_.for_keys_hidden_by_bias(place_.batch, place_.head, i, place_.key, key_end(), hide);
    });
  }

  // scores -= slope * |p - j|
  void add_slopes(const LaneTile<Real>& scores) const {
    const Pack<Real> slope = mask_.slope(place_.head);
    // Positions relative to the tile: exact in Real for any sequence length that fits in memory.
    const Index origin = place_.query + mask_.slope_shift() - place_.key;
    for_computed([&](int v, const KeyRange& keys) {
      const Pack<Real> position = Pack<Real>::iota() + Real(origin + v * kLanes<Real>);
      for (Index j = keys.begin; j < keys.end; ++j) {
        const Pack<Real> distance = math::absolute(position - Real(j));
        scores.store(j, v, scores.load(j, v) - slope * distance);
      }
    });
  }

  // Hides what band, key length, documents, boolean mask and functions of positions hide, and lanes beyond the last query.
  void hide(const LaneTile<Real>& scores) const {
    hide_band(scores);
    if (mask_.has_documents()) hide_documents(scores);
    if (mask_.has_allowed()) hide_disallowed(scores);
    if (mask_.has_rules()) hide_by_rules(scores);
  }

 private:
  // Numbers of a row of a bias that are fetched into cache before they are read: four lines.
  static constexpr Index kAhead = 256 / Index(sizeof(Real));

  // body(v, keys) for each vector and the keys that it is computed with.
  template <class Body>
  void for_computed(Body&& body) const {
    for (int v = 0; v < vectors_; ++v) body(v, place_.keys_of(v));
  }

  // Keys are counted from the tile's first.
  void hide_band(const LaneTile<Real>& scores) const {
    constexpr Index W = kLanes<Real>;
    const auto band = mask_.band_of(place_.batch);
    const auto in_tile = [&](Index key) { return std::clamp<Index>(key, 0, place_.keys); };
    const Index first = in_tile(band.keys.begin - place_.key),
                last = in_tile(band.keys.end - place_.key);
    for_computed([&](int v, const KeyRange& keys) {
      // The ends of what lanes see: those of lane 0, limited to where they decide, and one more for each lane.
      const Index query = place_.query + v * W - place_.key;
      const auto ends = [&](Index offset) {
        const Pack<Real> unlimited =
            Pack<Real>::iota() + Real(std::clamp(query + offset, -W, place_.keys));
        return min(max(unlimited, Pack<Real>(Real(first))), Pack<Real>(Real(last)));
      };
      const Pack<Real> from = ends(band.from);
      Pack<Real> to = ends(band.to);
      const Index queries = place_.rows - v * W;
      if (queries < W) to = select(Pack<Real>::iota() < Pack<Real>(Real(queries)), to, from);
      const auto hide_keys = [&](Index begin, Index end) {
        for (Index j = begin; j < end; ++j) {
          const Pack<Real> key = Real(j);
          const auto visible = (key >= from) & (key < to);
          scores.store(j, v, select(visible, scores.load(j, v), Pack<Real>(-kInfinity<Real>)));
        }
      };
      // Keys that every lane sees.
      const KeyRange all{std::max(keys.begin, Index(from.lane(int(W) - 1))),
                         std::min(keys.end, Index(to.lane(0)))};
      if (queries < W || all.size() == 0) return hide_keys(keys.begin, keys.end);
      hide_keys(keys.begin, all.begin);
      hide_keys(all.end, keys.end);
    });
  }

  void hide_documents(const LaneTile<Real>& scores) const {
    hide_rows(scores, [&](Index i, auto&& hide) {
      mask_.for_keys_of_other_documents(place_.batch, i, place_.key, key_end(), hide);
    });
  }

  // hidden_of(i, hide) calls hide(key) for the keys that are hidden from query i.
  template <class HiddenOf>
  void hide_rows(const LaneTile<Real>& scores, HiddenOf&& hidden_of) const {
    for (Index r = 0; r < place_.rows; ++r)
      hidden_of(place_.query + r,
                [&](Index key) { scores.row(key - place_.key)[r] = -kInfinity<Real>; });
  }
  [[nodiscard]] Index key_end() const { return place_.key + place_.keys; }

  // In blocks of W queries and as many keys as a lane has bits: one word per query, whose highest bit says
  // whether it may see the first key.
  void hide_disallowed(const LaneTile<Real>& scores) const {
    constexpr Index W = kLanes<Real>, block = 8 * Index(sizeof(Real));
    using Bits = typename Pack<Real>::Bits;
    using Mask = typename Pack<Real>::Mask;
    for (Index first = 0; first < place_.rows; first += W) {
      const Index rows = std::min(W, place_.rows - first);
      const int v = int(first / W);
      for (Index j = 0; j < place_.keys; j += block) {
        const Index keys = std::min(block, place_.keys - j);
        Bits words{};
        for (Index r = 0; r < rows; ++r) {
          const bool* allowed =
              mask_.allowed_row(place_.batch, place_.head, place_.query + first + r);
          __builtin_prefetch(allowed + place_.key + j + place_.keys);  // of the next tile
          words[r] =
              word_of<std::remove_cvref_t<decltype(words[0])>>(allowed + place_.key + j, keys);
        }
        for (Index k = 0; k < keys; ++k, words <<= 1) {
          const Mask visible = Mask(words) < Mask{};
          scores.store(j + k, v,
                       select(visible, scores.load(j + k, v), Pack<Real>(-kInfinity<Real>)));
        }
      }
    }
  }

  // One call for all pairs, where the tile has no more keys than it may ask for; then in blocks as above, but with the
  // first key in the lowest bit of a word.
  void hide_by_rules(const LaneTile<Real>& scores) const {
    constexpr Index W = kLanes<Real>, block = 8 * Index(sizeof(Real));
    using Bits = typename Pack<Real>::Bits;
    using Mask = typename Pack<Real>::Mask;
    std::uint64_t seen[kPanelLanes<Real> * kRuleWords];
    for (Index from = 0; from < place_.keys; from += kRuleKeys) {
      const PairBlock at{place_.batch, place_.head,       place_.query,
                         place_.rows,  place_.key + from, std::min(kRuleKeys, place_.keys - from)};
      if (mask_.rule_kind(at) == TileKind::full) continue;
      mask_.fill_by_rules(at, seen);
      for (Index first = 0; first < at.rows; first += W)
        for (Index j = 0; j < at.keys; j += block) {
          Bits words{};
          for (Index r = 0; r < std::min(W, at.rows - first); ++r)
            words[r] = std::remove_cvref_t<decltype(words[0])>(
                seen[(first + r) * kRuleWords + j / 64] >> (j % 64));
          for (Index k = from + j; k < from + std::min(j + block, at.keys); ++k, words >>= 1) {
            const Mask visible = Mask(Bits{} - (words & 1));
            const int v = int(first / W);
            scores.store(k, v, select(visible, scores.load(k, v), Pack<Real>(-kInfinity<Real>)));
          }
        }
    }
  }

  // Flags from the highest bit down, no more than it has bits.
  template <class Word>
  [[nodiscard]] static Word word_of(const bool* flags, Index count) {
    constexpr Index bits = 8 * Index(sizeof(Word));
    std::uint64_t word = 0;
    Index j = 0;
    for (; j + 8 <= count; j += 8) {
      // Eight bytes of 0 or 1: the product gathers them in its highest byte.
      std::uint64_t bytes;
      std::memcpy(&bytes, flags + j, 8);
      if constexpr (std::endian::native == std::endian::big) bytes = __builtin_bswap64(bytes);
      word |= bytes * 0x8040201008040201u >> 56 << (bits - 8 - j);
    }
    for (; j < count; ++j) word |= std::uint64_t(flags[j]) << (bits - 1 - j);
    return Word(word);
  }

  const BoundMask<Real>& mask_;
  TilePlace place_;
  int vectors_;
};

}  // namespace HEED_ABI
}  // namespace heed
