// SPDX-License-Identifier: Apache-2.0

// Memories of prototypes and their exchange: counts, widths, pages of a cache.

#include "catch.hpp"
#include "message_of.hpp"

#include <heed/kv_cache.hpp>
#include <heed/ops/prototype/memory.hpp>

#include <cmath>
#include <vector>

using heed::ArtMemory;
using heed::Index;
using heed::PrototypeMemory;
using heed::TensorView;
using heed_test::message_of;

namespace {

ArtMemory<float> memory_of(Index dim, Index learned, Index capacity = 4) {
  heed::ArtOptions<float> options;
  options.capacity = capacity;
  options.dim = dim;
  options.vigilance = 1.0F;
  options.learning_rate = 0.5F;
  ArtMemory<float> memory(options);
  std::vector<float> rows;
  for (Index i = 0; i < learned * dim; ++i) rows.push_back(float(i + 1));
  memory.set_prototypes(rows, learned);
  return memory;
}
std::vector<float> numbers_of(const std::vector<ArtMemory<float>>& memories) {
  std::vector<float> all;
  for (const ArtMemory<float>& memory : memories)
    all.insert(all.end(), memory.prototypes().begin(), memory.prototypes().end());
  return all;
}

}  // namespace

TEST_CASE("Prototypes are given back to memories like those they were taken from, to no others") {
  std::vector<ArtMemory<float>> memories = {memory_of(3, 2), memory_of(3, 1)};
  PrototypeMemory<float> taken;
  taken.take(memories);
  taken.W[0] = 7;
  taken.give(memories);
  CHECK(numbers_of(memories) == std::vector<float>{7, 2, 3, 4, 5, 6, 1, 2, 3});

  const auto give = [&](std::vector<ArtMemory<float>> others) {
    const std::vector<float> before = numbers_of(others);
    const std::string said = message_of([&] { taken.give(others); });
    CHECK(numbers_of(others) == before);
    return said;
  };
  CHECK(give({memory_of(3, 0), memory_of(3, 0), memory_of(3, 0)}) ==
        "PrototypeMemory::give: there are 3 memories, W has 2 heads");
  CHECK(give({memory_of(3, 2)}) == "PrototypeMemory::give: there are 1 memories, W has 2 heads");
  CHECK(give({memory_of(3, 1), memory_of(5, 1)}) ==
        "PrototypeMemory::give: memory 1 has dim 5, W has 3");
  CHECK(give({memory_of(3, 1), memory_of(2, 1)}) ==
        "PrototypeMemory::give: memory 1 has dim 2, W has 3");
  CHECK(give({memory_of(3, 0, 1), memory_of(3, 0)}) ==
        "ArtMemory::set_prototypes: count 2 is outside [0, 1], the capacity");
  taken.W[Index(taken.W.size()) - 6] = NAN;  // in the second head; the first is unchanged, too
  CHECK(give(memories) ==
        "ArtMemory::set_prototypes: value 0 of prototype 0 is nan; it must be finite");
  taken.W[Index(taken.W.size()) - 6] = 1;
  taken.counts = {1};
  CHECK(give(memories) == "PrototypeMemory::give: counts has 1 values, W has 2 heads");
  taken.counts = {1, 3};
  CHECK(give(memories) ==
        "PrototypeMemory::give: counts holds 3 for head 1, it must lie in [0, 2], the "
        "prototypes that W has per head");
}

TEST_CASE("No memories, and memories without prototypes, are taken and given back") {
  PrototypeMemory<float> taken;
  std::vector<ArtMemory<float>> none, empty = {memory_of(3, 0), memory_of(3, 0)};
  taken.give(none);
  CHECK(message_of([&] { taken.give(empty); }) ==
        "PrototypeMemory::give: there are 2 memories, W has 0 heads");
  taken.take(none);
  taken.give(none);
  CHECK(taken.rows() == 0);
  taken.take(empty);
  taken.give(empty);
  CHECK(taken.count(1) == 0);
  CHECK(empty[1].count() == 0);
  const TensorView<const float> rows;
  CHECK(heed::learn_after_forward(none, rows).empty());
  CHECK(heed::learn_after_forward(empty, TensorView<const float>(nullptr, {1, 2, 0, 3}))[1] ==
        heed::ArtTally{});
}

TEST_CASE("Memories learn the pages of a cache as they learn the same keys in one piece") {
  constexpr Index page = heed::kPanelLanes<float>, len = 2 * page + 3, dim = 3;
  std::vector<float> keys(2 * 2 * len * dim);
  for (std::size_t i = 0; i < keys.size(); ++i) keys[i] = std::sin(float(i * i));
  const TensorView<const float> whole(keys.data(), {2, 2, len, dim});
  heed::KvCache<float> cache(2, 2, dim, dim, page);
  cache.append(whole, whole);
  const auto fresh = [] {
    return std::vector<ArtMemory<float>>{memory_of(dim, 0), memory_of(dim, 0)};
  };
  std::vector<ArtMemory<float>> from_pages = fresh(), from_whole = fresh();
  const auto tallies = heed::learn_after_forward(from_pages, cache.keys());
  CHECK(tallies == heed::learn_after_forward(from_whole, whole));
  CHECK(tallies[0].created + tallies[0].resonance + tallies[0].full == 2 * len);
  CHECK(numbers_of(from_pages) == numbers_of(from_whole));
  CHECK(message_of([&] {
          (void)heed::learn_after_forward(from_pages,
                                          TensorView<const float>(nullptr, {1, 2, 1, dim}));
        }) == "ArtMemory::learn: rows of shape (1,2,1,3) have a null pointer");
}
