// SPDX-License-Identifier: Apache-2.0
#pragma once

// The cases that are timed: shapes, masks and threads, with their names, products and bytes.

#include <heed/core/geometry.hpp>
#include <heed/explain.hpp>

#include <algorithm>
#include <cstdint>
#include <string>
#include <type_traits>
#include <vector>

namespace heed_bench {

using heed::Index;
using heed::Pass;

// blocks: a BlockMask that shows a quarter of the pairs in blocks of 128; function: the same mask
// as a function that is asked in every call. keys, lists: each query has a list of its own, of 512 keys that lie apart, or of 8
// blocks of 64 with its own among them, none behind it.
enum class MaskKind { full, causal, boolean, bias, blocks, function, keys, lists };

[[nodiscard]] constexpr bool has_lists(MaskKind kind) {
  return kind == MaskKind::keys || kind == MaskKind::lists;
}
// Keys in one block of a query's list, and the most blocks.
[[nodiscard]] constexpr Index list_block(MaskKind kind) { return kind == MaskKind::keys ? 1 : 64; }
[[nodiscard]] constexpr Index list_count(MaskKind kind) { return 512 / list_block(kind); }

struct Case {
  Index heads, kv_heads, len_q, len_kv, dim, dim_v;  // batch 1
  MaskKind mask = MaskKind::full;
  int threads = 1;

  [[nodiscard]] heed::Geometry geometry() const {
    return {1, heads, heads, kv_heads, len_q, len_kv, dim, dim_v};
  }
  // True if there is one query per head: time then goes to reading keys and values.
  [[nodiscard]] bool decodes() const { return len_q == 1; }

  [[nodiscard]] std::string text() const {
    const auto number = [](Index n) { return std::to_string(n); };
    std::string s = "H" + number(heads);
    if (kv_heads != heads) s += ":" + number(kv_heads);
    s += "_T" + (len_q == len_kv ? number(len_q) : number(len_q) + "x" + number(len_kv));
    s += "_d" + number(dim);
    if (dim_v != dim) s += "v" + number(dim_v);
    if (mask == MaskKind::causal) s += "_causal";
    if (mask == MaskKind::boolean) s += "_boolean";
    if (mask == MaskKind::bias) s += "_bias";
    if (mask == MaskKind::blocks) s += "_blocks";
    if (mask == MaskKind::function) s += "_function";
    if (mask == MaskKind::keys) s += "_keys";
    if (mask == MaskKind::lists) s += "_lists";
    if (threads > 1) s += "_" + number(threads) + "threads";
    return s;
  }

  // True if no query sees a later key.
  [[nodiscard]] bool is_causal() const { return mask == MaskKind::causal || has_lists(mask); }
  // The pairs of a head that the mask leaves.
  [[nodiscard]] double pairs() const {
    const double rows = double(len_q), columns = double(len_kv);
    if (mask == MaskKind::causal) return rows * (rows + 1) / 2;
    if (mask == MaskKind::blocks || mask == MaskKind::function) return rows * columns / 4;
    if (!has_lists(mask)) return rows * columns;
    double listed = 0;
    for (Index i = 0, block = list_block(mask); i < len_q; ++i)
      listed += double(std::min(i / block, list_count(mask) - 1) * block + i % block + 1);
    return listed;
  }

  // Flops of the two products of forward, or the five of backward, over the pairs that the mask leaves.
  [[nodiscard]] double flops(Pass pass) const {
    const double per_pair =
        pass == Pass::forward ? 2.0 * double(dim + dim_v) : 2.0 * double(3 * dim + 2 * dim_v);
    return per_pair * pairs() * double(heads);
  }
  // Bytes of keys and values, with the scales of int8 rows.
  template <class Stored>
  [[nodiscard]] double bytes() const {
    const double rows = double(kv_heads * len_kv);
    const double scales = std::is_same_v<Stored, std::int8_t> ? 2 * sizeof(float) : 0;
    return rows * (double(dim + dim_v) * sizeof(Stored) + scales);
  }
};

[[nodiscard]] inline Case square(Index heads, Index len, Index dim, MaskKind mask = MaskKind::full,
                                 int threads = 1) {
  return {heads, heads, len, len, dim, dim, mask, threads};
}

// The cases that run when no filter is given come first.
inline constexpr std::size_t kUsualCases = 4;

[[nodiscard]] inline const std::vector<Case>& cases() {
  static const std::vector<Case> list{
      square(4, 512, 64, MaskKind::causal),
      square(4, 2048, 64),
      square(4, 2048, 64, MaskKind::causal),
      square(2, 2048, 128),
      // Other masks, widths, lengths.
      square(4, 2048, 64, MaskKind::boolean),
      square(4, 2048, 64, MaskKind::bias),
      square(4, 2048, 64, MaskKind::blocks),
      square(4, 2048, 64, MaskKind::function),
      square(4, 4096, 64, MaskKind::blocks),
      square(1, 8192, 64, MaskKind::keys),
      square(1, 8192, 64, MaskKind::lists),
      square(4, 1024, 64),
      square(8, 200, 40),
      square(4, 333, 80),
      square(4, 512, 96),
      square(2, 512, 256),
      {4, 4, 512, 512, 64, 128},
      {8, 1, 512, 512, 64, 64},
      // Lengths that double.
      square(1, 4096, 64),
      square(1, 8192, 64),
      square(1, 16384, 64),
      square(1, 32768, 64),
      // Two threads; one head, too.
      square(4, 2048, 64, MaskKind::full, 2),
      square(1, 2048, 64, MaskKind::full, 2),
      square(1, 2048, 64, MaskKind::causal, 2),
      square(1, 2048, 64),
      // One query: keys and values of 256 KiB, 8 MiB and 256 MiB in float, twice that in double.
      {1, 1, 1, 512, 64, 64},
      {16, 16, 1, 1024, 64, 64},
      {8, 8, 1, 1024, 128, 128},
      {32, 32, 1, 16384, 64, 64},
      {16, 16, 1, 16384, 128, 128},
      {32, 4, 1, 4096, 64, 64},
      {32, 32, 1, 16384, 64, 64, MaskKind::full, 2},
  };
  return list;
}

[[nodiscard]] inline const char* text(Pass pass) {
  return pass == Pass::forward ? "forward" : "backward";
}

}  // namespace heed_bench
