// SPDX-License-Identifier: Apache-2.0
// Blocks of masks: kept for many calls, given as lists, and joined by | and !; which tiles calls skip by them.

#include "catch.hpp"
#include "door_case.hpp"
#include "message_of.hpp"
#include "pair_answers.hpp"

#include <heed/compiled.hpp>
#include <heed/core/random.hpp>
#include <heed/explain.hpp>
#include <heed/mask/block_mask.hpp>
#include <heed/mask/visible.hpp>
#include <heed/nn/attention_layer.hpp>

#include <atomic>
#include <memory>
#include <string>
#include <vector>

using namespace heed;
using heed_test::check_pairs;
using heed_test::message_of;

namespace {

constexpr Geometry kG{2, 2, 2, 2, 75, 91, 4, 4};

struct Results {
  std::vector<float> out, dquery, dkey, dvalue;
  bool operator==(const Results&) const = default;
};
[[nodiscard]] Results run(const Mask<float>& mask, const Geometry& g, const Options& options = {}) {
  OpCall<ScaledDot<float>> call({}, g, mask, options);
  call.forward();
  call.backward();
  return {call.out, call.grad_query, call.grad_key, call.grad_value};
}

// Random lists: about a quarter of the blocks.
[[nodiscard]] BlockLists random_lists(const Geometry& g, Index query_block, Index key_block,
                                      Index batch, Index heads, unsigned seed) {
  RandomSequence random(seed);
  BlockLists lists{query_block, key_block, {0}, {}, batch, heads};
  const Index rows = (g.len_q + query_block - 1) / query_block,
              keys = (g.len_kv + key_block - 1) / key_block;
  for (Index row = 0; row < batch * heads * rows; ++row) {
    for (Index k = 0; k < keys; ++k)
      if (random.below(4) == 0) lists.indices.push_back(k);
    lists.start.push_back(Index(lists.indices.size()));
  }
  return lists;
}
[[nodiscard]] bool listed(const BlockLists& l, const Geometry& g, Index b, Index h, Index i,
                          Index j) {
  const Index rows = (g.len_q + l.query_block - 1) / l.query_block;
  const Index row =
      ((l.batch == 1 ? 0 : b) * l.heads + (l.heads == 1 ? 0 : h)) * rows + i / l.query_block;
  for (Index n = l.start[std::size_t(row)]; n < l.start[std::size_t(row + 1)]; ++n)
    if (l.indices[std::size_t(n)] == j / l.key_block) return true;
  return false;
}

}  // namespace

TEST_CASE("a BlockMask gives the bits of its mask, and asks no function again") {
  const Geometry g{1, 2, 2, 2, 200, 200, 8, 8};
  std::atomic<Index> asked{0};
  const Mask<float> mask = visible<float>([&](auto, auto, auto i, auto j) {
                             ++asked;
                             return i / 64 == j / 64;
                           }) &
                           causal<float>(Align::top_left, 70);
  const BlockMask<float> blocks(mask, g);
  const BlockMask<float> copy = blocks;
  CHECK(blocks.count(TileKind::full) + blocks.count(TileKind::empty) == blocks.bytes());
  CHECK(blocks.count(TileKind::partial) == 0);
  CHECK(blocks.bytes() == (200 + 15) / 16 * ((200 + 63) / 64));
  const Results expected = run(mask, g, {.key_tile = 64});
  asked = 0;
  CHECK(run(copy, g, {.key_tile = 64}) == expected);
  CHECK(asked == 0);
}

TEST_CASE("a BlockMask of other sizes is refused") {
  const Mask<float> mask = visible<float>([](auto, auto, auto i, auto j) { return j <= i; });
  const BlockMask<float> blocks(mask, kG);
  const auto refused = [&](Geometry g) {
    return message_of([&] { OpCall<ScaledDot<float>>({}, g, blocks).forward(); });
  };
  Geometry g = kG;
  g.batch = 3;
  CHECK(refused(g) == "heed::forward: the BlockMask is one for batch 2, the call has 3");
  g = kG;
  g.heads = g.query_heads = g.kv_heads = 4;
  CHECK(refused(g) == "heed::forward: the BlockMask is one for heads 2, the call has 4");
  g = kG;
  g.len_q = 76;
  CHECK(refused(g) == "heed::forward: the BlockMask is one for len_q 75, the call has 76");
  g = kG;
  g.len_kv = 90;
  CHECK(refused(g) == "heed::forward: the BlockMask is one for len_kv 91, the call has 90");
  g = kG;
  g.dim_qk = 6;  // no size of the mask
  CHECK_NOTHROW(OpCall<ScaledDot<float>>({}, g, blocks).forward());
  g.batch = -1;
  CHECK(message_of([&] { BlockMask<float>(mask, g); }) ==
        "BlockMask: batch -1, heads 2, len_q 75, len_kv 91; none may be negative");
}

TEST_CASE("blocks grow where there were more of them than memory is promised for") {
  const Mask<float> mask = visible<float>([](auto, auto h, auto i, auto j) { return j <= i + h; });
  // 16 queries by 64 keys were 2^24 blocks and more.
  const Geometry g{1, 2048, 2048, 2048, 2100, 4200, 1, 1};
  const auto rule = mask.rules[0]->bind(g, "test");
  PairBlocks blocks;
  blocks.batch = 1;
  blocks.heads = g.heads;
  detail::size_blocks(blocks, g);
  CHECK(blocks.query_block == 32);
  CHECK(blocks.key_block == 64);
  CHECK(blocks.heads * blocks.query_blocks * blocks.key_blocks <= kMostBlocks);
  Geometry longer = g;
  longer.heads = 1;
  longer.len_q = longer.len_kv = Index(1) << 28;
  PairBlocks one;
  detail::size_blocks(one, longer);
  CHECK(one.query_blocks * one.key_blocks <= kMostBlocks);
  CHECK(one.query_block * one.query_blocks >= longer.len_q);
}

TEST_CASE("large blocks have the kinds that their pairs say") {
  const Geometry g{1, 1, 1, 1, 300, 900, 4, 4};
  const Mask<float> mask = visible<float>(
      [](auto, auto, auto i, auto j) { return (j < 512) | ((i >= 256) & (j == 700)); });
  PairBlocks blocks;
  blocks.pairs = mask.rules[0]->bind(g, "test");
  blocks.query_block = 128;
  blocks.key_block = 256;
  blocks.query_blocks = 3;
  blocks.key_blocks = 4;
  blocks.kinds.resize(12);
  for (Index q = 0; q < 3; ++q)
    detail::classify_row(*blocks.pairs, g, blocks, 0, 0, q, blocks.kinds.data() + 4 * q);
  constexpr auto E = TileKind::empty, P = TileKind::partial, F = TileKind::full;
  CHECK(blocks.kinds == std::vector<TileKind>{F, F, E, E, F, F, E, E, F, F, P, E});
}

TEST_CASE("block lists show the blocks that they name") {
  for (const auto& [query_block, key_block] :
       {std::pair<Index, Index>{16, 16}, {32, 8}, {7, 13}, {128, 128}, {1, 91}})
    for (const Index batch : {1, 2})
      for (const Index heads : {1, 2}) {
        const BlockLists lists = random_lists(kG, query_block, key_block, batch, heads, 17);
        INFO("blocks of " << query_block << " by " << key_block << ", tables " << batch << " "
                          << heads);
        check_pairs(block_lists<float>(lists), kG, [&](Index b, Index h, Index i, Index j) {
          return listed(lists, kG, b, h, i, j);
        });
      }
}

TEST_CASE("lists of any integers and dense tables are lists of the same blocks") {
  const BlockLists wanted{2, 3, {0, 2, 2, 3, 3}, {0, 4, 1}, 2, 1};
  const auto check = [&](const BlockLists& got) {
    CHECK(got.query_block == wanted.query_block);
    CHECK(got.key_block == wanted.key_block);
    CHECK(got.start == wanted.start);
    CHECK(got.indices == wanted.indices);
    CHECK(got.batch == 2);
    CHECK(got.heads == 1);
  };
  check(block_lists_of(2, 3, std::vector<unsigned char>{0, 2, 2, 3, 3}, std::vector<int>{0, 4, 1},
                       2));
  const bool keep[20] = {true,  false, false, false, true,  false,
                         false, false, false, false, false, true};
  check(block_lists_of(TensorView<const bool>(keep, {2, 1, 2, 5}), 2, 3));
  const std::uint8_t bytes[20] = {7, 0, 0, 0, 1, 0, 0, 0, 0, 0, 0, 1};
  check(block_lists_of(TensorView<const std::uint8_t>(bytes, {2, 1, 2, 5}), 2, 3));
}

TEST_CASE("calls under block lists agree with a tensor of their pairs") {
  for (const Index block : {16, 48, 96, 128}) {
    const Geometry g{1, 2, 2, 2, 300, 400, 8, 8};
    const BlockLists lists = random_lists(g, block, block, 1, 2, unsigned(block));
    const auto allowed = std::make_unique<bool[]>(std::size_t(2 * 300 * 400));
    for (Index h = 0; h < 2; ++h)
      for (Index i = 0; i < 300; ++i)
        for (Index j = 0; j < 400; ++j)
          allowed[std::size_t((h * 300 + i) * 400 + j)] = listed(lists, g, 0, h, i, j);
    const auto tensor = boolean<double>({allowed.get(), Shape{1, 2, 300, 400}});
    OpCall<ScaledDot<double>> expected({}, g, tensor), found({}, g, block_lists<double>(lists));
    for (auto* call : {&expected, &found}) {
      call->forward();
      call->backward();
    }
    CHECK(heed_test::deviation(found.out, expected.out, 1e-3) < 1e-12);
    CHECK(heed_test::deviation(found.grad_query, expected.grad_query, 1e-3) < 1e-12);
    CHECK(heed_test::deviation(found.grad_key, expected.grad_key, 1e-3) < 1e-12);
    CHECK(heed_test::deviation(found.grad_value, expected.grad_value, 1e-3) < 1e-12);
  }
}

TEST_CASE("bad block lists are refused") {
  const auto made = [](BlockLists lists) {
    return message_of([&] { (void)block_lists<float>(std::move(lists)); });
  };
  CHECK(made({0, 16, {0}, {}}) ==
        "block_lists: blocks are 0 queries by 16 keys, both must be at least 1");
  CHECK(made({16, 16, {}, {}}) ==
        "block_lists: start has 0 entries, it must have one more than rows");
  CHECK(made({16, 16, {1, 2}, {0, 1}}) == "block_lists: start begins with 1, it must begin with 0");
  CHECK(made({16, 16, {0, 2, 1}, {0}}) == "block_lists: start falls from 2 to 1 at row 1");
  CHECK(made({16, 16, {0, 1}, {0, 1}}) == "block_lists: start ends with 1, there are 2 indices");
  CHECK(made({16, 16, {0, 1, 3}, {5, 4, 2}}) ==
        "block_lists: row 1 has block 2 behind block 4, the blocks of a row must ascend");
  CHECK(made({16, 16, {0, 2}, {4, 4}}) ==
        "block_lists: row 0 has block 4 behind block 4, the blocks of a row must ascend");
  CHECK(message_of([] {
          (void)block_lists_of(1, 1, std::vector<int>{0, 1},
                               std::vector<std::uint64_t>{~std::uint64_t(0)});
        }) ==
        "block_lists_of: a number is 18446744073709551615, the largest one may be "
        "9223372036854775807");
  CHECK(made({16, 16, {0}, {}, 0, 1}) ==
        "block_lists: batch is 0 and heads is 1, both must be at least 1");

  const auto called = [](BlockLists lists) {
    const Mask<float> mask = block_lists<float>(std::move(lists));
    return message_of([&] { OpCall<ScaledDot<float>>({}, kG, mask).forward(); });
  };
  // 75 queries are 5 rows of 16, 91 keys 6 blocks.
  CHECK(called({16, 16, {0, 0, 0, 0, 0}, {}}) ==
        "heed::forward: start of the block lists has 5 entries, 1 tables of 5 rows need 6");
  CHECK(called({16, 16, {0, 1, 1, 1, 1, 1}, {6}}) ==
        "heed::forward: an index of the block lists is 6, it must lie in [0, 6)");
  CHECK(called({16, 16, {0, 1, 1, 1, 1, 1}, {-1}}) ==
        "heed::forward: an index of the block lists is -1, it must lie in [0, 6)");
  CHECK(called({16, 16, std::vector<Index>(16), {}, 3, 1}) ==
        "heed::forward: the block lists are for batch 3, the call has 2");
  CHECK(called({16, 16, std::vector<Index>(16), {}, 1, 3}) ==
        "heed::forward: the block lists are for 3 heads, the call has 2");
}

TEST_CASE("a union shows what either side shows, and a negation what its mask hides") {
  const Mask<float> near =
      visible<float>([](auto, auto h, auto i, auto j) { return absolute(i - j) <= 5 + h; });
  const auto is_near = [](Index h, Index i, Index j) { return std::abs(i - j) <= 5 + h; };
  std::vector<Index> of_queries, of_keys;
  for (Index b = 0; b < 2; ++b) {
    for (Index i = 0; i < 75; ++i) of_queries.push_back(i / (10 + b));
    for (Index j = 0; j < 91; ++j) of_keys.push_back(j / (10 + b));
  }
  const auto same = [](Index b, Index i, Index j) { return i / (10 + b) == j / (10 + b); };
  const auto allowed = std::make_unique<bool[]>(2 * 91);
  for (Index n = 0; n < 2 * 91; ++n) allowed[std::size_t(n)] = n % 3 != 0;
  const auto tensor = boolean<float>({allowed.get(), Shape{2, 1, 1, 91}});
  const auto is_allowed = [&](Index b, Index j) { return allowed[std::size_t(b * 91 + j)]; };

  check_pairs(near | causal<float>(Align::top_left, -9), kG,
              [&](Index, Index h, Index i, Index j) { return is_near(h, i, j) || j <= i - 9; });
  check_pairs(documents<float>(of_queries, of_keys) | key_lengths<float>({3, 0}), kG,
              [&](Index b, Index, Index i, Index j) { return same(b, i, j) || (b == 0 && j < 3); });
  check_pairs(!near, kG, [&](Index, Index h, Index i, Index j) { return !is_near(h, i, j); });
  check_pairs(!(window<float>(4, -1) & tensor & near), kG, [&](Index b, Index h, Index i, Index j) {
    return !(j >= i - 4 && is_allowed(b, j) && is_near(h, i, j));
  });
  check_pairs((!(near | tensor)) & causal<float>(), kG, [&](Index b, Index h, Index i, Index j) {
    return !(is_near(h, i, j) || is_allowed(b, j)) && j <= i;
  });
  check_pairs(!Mask<float>{}, kG, [](Index, Index, Index, Index) { return false; });
  check_pairs(!!Mask<float>{}, kG, [](Index, Index, Index, Index) { return true; });
  const BlockLists lists = random_lists(kG, 16, 16, 1, 1, 23);
  check_pairs(block_lists<float>(lists) | near, kG, [&](Index b, Index h, Index i, Index j) {
    return listed(lists, kG, b, h, i, j) || is_near(h, i, j);
  });
  check_pairs(BlockMask<float>(near, kG).mask() | (window<float>(-1, -1) & causal<float>()), kG,
              [&](Index, Index h, Index i, Index j) { return is_near(h, i, j) || j <= i; });
  // Halves that complement each other hide nothing.
  const Mask<float> odd = visible<float>([](auto, auto, auto, auto j) { return j % 2 == 1; });
  CHECK(BlockMask<float>(odd | !odd, kG).count(TileKind::full) ==
        BlockMask<float>(odd | !odd, kG).bytes());
}

TEST_CASE("a union and a negation of as many keys as a row of bits has write nothing behind them") {
  const Geometry g{1, 1, 1, 1, 2, 600, 4, 4};
  const Mask<float> odd = visible<float>([](auto, auto, auto, auto j) { return j % 2 == 1; });
  for (const auto& mask : {odd | causal<float>(), !odd, !(odd | causal<float>())})
    for (const std::uint64_t behind : {std::uint64_t(0), ~std::uint64_t(0)}) {
      std::uint64_t words[kRuleWords + 1];
      words[kRuleWords] = behind;
      mask.rules[0]->bind(g, "")->fill({.query = 1, .rows = 1, .keys = kRuleKeys}, words);
      CHECK(words[kRuleWords] == behind);
    }
}

TEST_CASE("what adds to scores is no side of a union") {
  const float numbers[4] = {};
  const Mask<float> a = causal<float>(), with_bias = bias<float>({numbers, Shape{1, 1, 1, 4}});
  CHECK(message_of([&] { (void)(a | with_bias); }) ==
        "Mask: the right side of | has a bias, it may only hide; join what adds to scores by & "
        "afterwards");
  CHECK(message_of([&] { (void)(alibi<float>({0.5F}) | a); }) ==
        "Mask: the left side of | has slopes, it may only hide; join what adds to scores by & "
        "afterwards");
  CHECK(message_of([&] { (void)!soft_cap<float>(2); }) ==
        "Mask: the mask behind ! has a soft cap, it may only hide; join what adds to scores by & "
        "afterwards");
}

TEST_CASE("tiles that a function hides are skipped, and end where blocks do") {
  const Geometry g{1, 2, 2, 2, 2048, 2048, 64, 64};
  const Mask<float> quarter =
      visible<float>([](auto, auto, auto i, auto j) { return (i / 128 + j / 128) % 4 == 0; });
  for (const Pass pass : {Pass::forward, Pass::backward}) {
    const Explanation e = explain(ScaledDot<float>{}, g, quarter, pass);
    CHECK(128 % e.key_tile == 0);
    CHECK(e.partial_tiles == 0);
    CHECK(e.skipped_tiles == 3 * e.full_tiles);
    CHECK(e.visible_flops * 4 == explain(ScaledDot<float>{}, g, {}, pass).visible_flops);
    CHECK(e.text().find("a BlockMask keeps") != std::string::npos);
    CHECK(explain(ScaledDot<float>{}, g, BlockMask<float>(quarter, g), pass)
              .text()
              .find("a BlockMask keeps") == std::string::npos);
  }
  // Lists of blocks that no power of two divides.
  BlockLists lists{192, 192, {0}, {}};
  for (Index q = 0; q < 11; ++q) {
    for (Index k = q % 4; k < 11; k += 4) lists.indices.push_back(k);
    lists.start.push_back(Index(lists.indices.size()));
  }
  CHECK(192 % explain(ScaledDot<float>{}, g, block_lists<float>(lists)).key_tile == 0);
  lists.query_block = lists.key_block = 160;
  lists.start = {0};
  lists.indices.clear();
  for (Index q = 0; q < 13; ++q) {
    for (Index k = q % 4; k < 13; k += 4) lists.indices.push_back(k);
    lists.start.push_back(Index(lists.indices.size()));
  }
  // Only if whole panels fill these blocks: tiles are as wide as some panels.
  if (160 % heed::kPanelLanes<float> != 0) return;
  const Explanation e = explain(ScaledDot<float>{}, g, block_lists<float>(lists));
  CHECK(e.partial_tiles == 0);
  CHECK(160 % e.key_tile == 0);
}

TEST_CASE("a mask of a layer that decodes moves with its queries") {
  const auto layer_mask =
      visible<float>([](auto, auto, auto i, auto j) { return (j <= i) & (i - j < 9); });
  const auto moved = [&](const Mask<float>& mask, Index by, const Geometry& g,
                         const heed_test::Shows& shows) {
    Mask<float> at = mask;
    for (auto& rule : at.rules) rule = rule->moved(by);
    check_pairs(at, g, shows);
  };
  const Geometry g{1, 1, 1, 1, 4, 34, 4, 4};
  const heed_test::Shows shows = [](Index, Index, Index i, Index j) {
    return j <= i + 30 && i + 30 - j < 9;
  };
  moved(layer_mask, 30, g, shows);
  moved(layer_mask | !Mask<float>{}, 30, g, shows);
  moved(BlockMask<float>(layer_mask, kG), 30, g, shows);
  moved(window<float>(8, 0) | !Mask<float>{}, 30, g, shows);
  moved(visible<float>([](auto, auto, auto i, auto j) { return (j <= i) & (i - j < 9); },
                       Align::bottom_right),
        30, g, shows);
  CHECK(
      message_of([&] {
        moved(block_lists<float>({16, 16, {0}, {}}), 30, g, shows);
      }) ==
      "block_lists: the lists are those of whole sequences, queries cannot stand 30 tokens behind "
      "the first one");
  nn::OpStage<ScaledDot<float>> stage({}, layer_mask);
  CHECK_FALSE(stage.is_causal());  // a function might see later keys
}
