// SPDX-License-Identifier: Apache-2.0
#include "needles.hpp"

#include "draws.hpp"

#include <algorithm>
#include <cmath>

namespace tasks {

namespace {

// First position of a needle at `percent` of a hay whose last needle would begin at `last`.
[[nodiscard]] Index at_depth(Index percent, Index last) { return (percent * last + 50) / 100; }

// Places of `count` needles of two tokens in a hay, the first one at the given place, without overlap.
[[nodiscard]] std::vector<Index> needle_places(Index count, Index first, Index last, Draws& draws) {
  std::vector<Index> places{first};
  while (Index(places.size()) < count) {
    const Index place = draws.below(last + 1);
    const bool free = std::all_of(places.begin(), places.end(),
                                  [&](Index taken) { return std::abs(taken - place) >= 2; });
    if (free) places.push_back(place);
  }
  return places;
}

}  // namespace

Description<Needles::Options> Needles::describe() {
  using O = Options;
  return {"needles",
          "Finds the numbers of cities among numbers",
          "Ye et al. 2024 (Differential Transformer)",
          "depth of the needle in %, rounded to a quarter",
          {},
          {64, 2, 2, 16, 16, 16},
          {{"len", &O::len, 8, 65536, "tokens of a sequence"},
           {"needles", &O::needles, 1, 1024, "cities with a number (N)"},
           {"asked", &O::asked, 1, 1024, "cities that are asked for (R)"},
           {"cities", &O::cities, 1, 1 << 18, "tokens that are cities"},
           {"numbers", &O::numbers, 1, 1 << 18, "tokens that are numbers"},
           {"words", &O::words, 0, 1 << 18, "tokens of the hay beside numbers"}}};
}

Needles::Needles(const Options& options) : Task(checked_spec<Needles>(options)), options_(options) {
  heed::require(options.asked <= options.needles, "--task needles: asked is ", options.asked,
                ", it must be at most needles, ", options.needles);
  for (const auto& [name, count] :
       {std::pair{"cities", options.cities}, {"numbers", options.numbers}})
    heed::require(count >= options.needles, "--task needles: ", name, " is ", count,
                  ", it must be at least needles, ", options.needles);
  const Index least = 4 * options.needles + 2 * options.asked;
  heed::require(options.len >= least, "--task needles: len is ", options.len, ", ", options.needles,
                " needles of which ", options.asked, " are asked for need ", least);
}

Sequence Needles::sequence(const Place& place) const {
  const auto& [len, needles, asked, cities, numbers, words] = options_;
  Draws draws(place);
  const Index hay = len - 2 * asked, last = hay - 2, ask = vocabulary() - 1;
  const std::vector<Index> names = draws.distinct(needles, 0, cities),
                           values = draws.distinct(needles, cities, cities + numbers);
  const std::vector<Index> at =
      needle_places(needles, at_depth(25 * draws.below(5), last), last, draws);
  Sequence sequence;
  for (Index t = 0; t < hay; ++t) sequence.inputs.push_back(draws.between(cities, ask));
  for (std::size_t i = 0; i < at.size(); ++i) {
    sequence.inputs[std::size_t(at[i])] = names[i];
    sequence.inputs[std::size_t(at[i] + 1)] = values[i];
  }
  std::vector<Index> of_needles = at;
  for (const Index city : at) of_needles.push_back(city + 1);
  sequence.noise = positions_without(0, hay, std::move(of_needles));
  sequence.inputs.push_back(ask);
  // The needle at the chosen depth is the first one; it is asked for with the first ones behind it.
  for (const Index i : draws.distinct(asked, 0, asked)) {
    const Index source = at[std::size_t(i)] + 1, value = values[std::size_t(i)];
    const Index percent = last > 0 ? 25 * ((4 * (source - 1) + last / 2) / last) : 0;
    sequence.inputs.push_back(names[std::size_t(i)]);
    sequence.answers.push_back({Index(sequence.inputs.size()) - 1, value, percent, source, 1});
    sequence.inputs.push_back(value);
  }
  sequence.inputs.pop_back();  // the last answer is not read
  return sequence;
}

}  // namespace tasks
