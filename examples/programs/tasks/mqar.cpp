// SPDX-License-Identifier: Apache-2.0
#include "mqar.hpp"

#include "draws.hpp"

#include <algorithm>
#include <cmath>

namespace tasks {

namespace {

// (g + 1)^(power - 1) for g in [0, slots), in units of 2^-32, as whole numbers, which are the same on every machine.
[[nodiscard]] std::vector<std::uint64_t> slot_weights(Index slots, double power) {
  std::vector<std::uint64_t> weights;
  for (Index g = 0; g < slots; ++g)
    weights.push_back(std::uint64_t(std::llround(0x1p32 * std::pow(double(g + 1), power - 1))));
  return weights;
}

struct Pair {
  Index key, value;
};

// Appends the second part for these keys, behind the pairs of the sequence; everything in it but
// the queries is noise. Returns the position of each key's query.
[[nodiscard]] std::vector<Index> append_queries(Sequence& sequence, const std::vector<Index>& keys,
                                                Index len, Index vocabulary, double power,
                                                Draws& draws) {
  const Index context = Index(sequence.inputs.size());
  std::vector<Index> at =
      draws.distinct_by_weight(Index(keys.size()), slot_weights((len - context) / 2, power));
  for (Index t = context; t < len; ++t) sequence.inputs.push_back(draws.below(vocabulary));
  for (std::size_t i = 0; i < keys.size(); ++i) {
    at[i] = context + 2 * at[i];
    sequence.inputs[std::size_t(at[i])] = keys[i];
  }
  sequence.noise = positions_without(context, len, at);
  return at;
}

void sort_answers(Sequence& sequence) {
  std::sort(sequence.answers.begin(), sequence.answers.end(),
            [](const Answer& a, const Answer& b) { return a.position < b.position; });
}

template <class Options>
void require_room(const char* name, const Options& o, Index pairs_in_list) {
  heed::require(o.len % 2 == 0, "--task ", name, ": len is ", o.len, ", it must be even");
  heed::require(2 * pairs_in_list + 2 * o.pairs <= o.len, "--task ", name, ": len is ", o.len,
                ", but ", pairs_in_list, " pairs and ", o.pairs, " queries need ",
                2 * pairs_in_list + 2 * o.pairs);
  heed::require(o.vocabulary / 2 - 1 >= o.pairs, "--task ", name, ": vocabulary is ", o.vocabulary,
                ", half of it has ", o.vocabulary / 2 - 1, " keys, but pairs is ", o.pairs);
}

}  // namespace

Description<Mqar::Options> Mqar::describe() {
  using O = Options;
  return {"mqar",
          "Recalls the values of several keys, asked for at power-law gaps",
          "Arora et al. 2023 (Zoology)",
          "tokens from the key to its query",
          {},
          {64, 4, 64, 0.01},
          {{"len", &O::len, 4, 65536, "tokens of a sequence"},
           {"pairs", &O::pairs, 1, 16384, "keys with their values"},
           {"vocabulary", &O::vocabulary, 4, 1 << 20, "tokens, half of them keys"},
           {"power", &O::power, 0, 2, "a: slot g has weight (g + 1)^(a - 1)"}}};
}

Mqar::Mqar(const Options& options) : Task(checked_spec<Mqar>(options)), options_(options) {
  require_room("mqar", options, options.pairs);
}

Sequence Mqar::sequence(const Place& place) const {
  const auto& [len, pairs, vocabulary, power] = options_;
  Draws draws(place);
  const std::vector<Index> keys = draws.distinct(pairs, 1, vocabulary / 2),
                           values = draws.distinct(pairs, vocabulary / 2, vocabulary);
  Sequence sequence;
  for (std::size_t i = 0; i < keys.size(); ++i) {
    sequence.inputs.push_back(keys[i]);
    sequence.inputs.push_back(values[i]);
  }
  const std::vector<Index> at = append_queries(sequence, keys, len, vocabulary, power, draws);
  for (std::size_t i = 0; i < keys.size(); ++i)
    sequence.answers.push_back({at[i], values[i], at[i] - 2 * Index(i), 2 * Index(i) + 1, 1});
  sort_answers(sequence);
  return sequence;
}

Description<MqarForgetting::Options> MqarForgetting::describe() {
  using O = Options;
  return {"mqar-forgetting",
          "The same where some keys are given a second value: the last one counts",
          "HazyResearch/zoology (forgetting MQAR)",
          "1 where the key was rewritten, else 0",
          {},
          {64, 4, 2, 64, 0.01},
          {{"len", &O::len, 4, 65536, "tokens of a sequence"},
           {"pairs", &O::pairs, 1, 16384, "keys"},
           {"updates", &O::updates, 0, 16384, "keys that are given a second value"},
           {"vocabulary", &O::vocabulary, 6, 1 << 20, "tokens, half of them keys"},
           {"power", &O::power, 0, 2, "a: slot g has weight (g + 1)^(a - 1)"}}};
}

MqarForgetting::MqarForgetting(const Options& options)
    : Task(checked_spec<MqarForgetting>(options)), options_(options) {
  heed::require(options.updates <= options.pairs, "--task mqar-forgetting: updates is ",
                options.updates, ", it must be at most pairs, ", options.pairs);
  require_room("mqar-forgetting", options, options.pairs + options.updates);
}

Sequence MqarForgetting::sequence(const Place& place) const {
  const auto& [len, pairs, updates, vocabulary, power] = options_;
  const Index first_value = vocabulary / 2;
  Draws draws(place);
  const std::vector<Index> keys = draws.distinct(pairs, 1, first_value);
  std::vector<Index> values = draws.distinct(pairs, first_value, vocabulary), sources;
  Sequence sequence;
  const auto write = [&](Index key, Index value) {
    sequence.inputs.push_back(key);
    sequence.inputs.push_back(value);
    return Index(sequence.inputs.size()) - 1;
  };
  for (std::size_t i = 0; i < keys.size(); ++i) sources.push_back(write(keys[i], values[i]));
  std::vector<Index> rewritten(keys.size(), 0);
  for (const Index i : draws.distinct(updates, 0, pairs)) {
    // Uniform over the values but the old one: those from it on move down by one.
    Index value = draws.between(first_value, vocabulary - 1);
    if (value >= values[std::size_t(i)]) ++value;
    values[std::size_t(i)] = value;
    sources[std::size_t(i)] = write(keys[std::size_t(i)], value);
    rewritten[std::size_t(i)] = 1;
  }
  const std::vector<Index> at = append_queries(sequence, keys, len, vocabulary, power, draws);
  for (std::size_t i = 0; i < keys.size(); ++i)
    sequence.answers.push_back({at[i], values[i], rewritten[i], sources[i], 1});
  sort_answers(sequence);
  return sequence;
}

}  // namespace tasks
