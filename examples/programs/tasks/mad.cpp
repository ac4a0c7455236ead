// SPDX-License-Identifier: Apache-2.0
#include "mad.hpp"

#include "draws.hpp"

#include <algorithm>
#include <map>

namespace tasks {

namespace {

using Motif = std::vector<Index>;

// Tokens whose first half are keys and whose second half are values, the larger one if they are odd.
struct Halves {
  Index first_value, end;
};

void append(std::vector<Index>& tokens, const Motif& motif) {
  tokens.insert(tokens.end(), motif.begin(), motif.end());
}

}  // namespace

Description<NoisyRecall::Options> NoisyRecall::describe() {
  using O = Options;
  return {"noisy-recall",
          "Recalls the values of keys between which noise stands",
          "Poli et al. 2024 (MAD)",
          "tokens since the value was last shown",
          {},
          {64, 32, 16, 0.2},
          {{"len", &O::len, 4, 65536, "tokens of a sequence with the last answer"},
           {"vocabulary", &O::vocabulary, 4, 1 << 20, "tokens, with those of noise"},
           {"noise_vocabulary", &O::noise_vocabulary, 1, 1 << 20, "tokens of noise"},
           {"noise", &O::noise, 0, 0.99, "share of pairs that are noise"}}};
}

NoisyRecall::NoisyRecall(const Options& options)
    : Task(checked_spec<NoisyRecall>(options)), options_(options) {
  heed::require(options.len % 2 == 0, "--task noisy-recall: len is ", options.len,
                ", it must be even");
  heed::require(options.vocabulary - options.noise_vocabulary >= 2,
                "--task noisy-recall: noise_vocabulary is ", options.noise_vocabulary,
                " of a vocabulary of ", options.vocabulary,
                ", at least 2 tokens must be left, a key and a value");
}

Sequence NoisyRecall::sequence(const Place& place) const {
  Draws draws(place);
  const Index pairs = options_.len / 2,
              first_noise = options_.vocabulary - options_.noise_vocabulary;
  const Halves halves{first_noise / 2, first_noise};
  struct Shown {
    Index value, at;  // where the value was last shown
  };
  std::map<Index, Shown> shown;
  Sequence sequence;
  const auto show = [&](Index key) {
    const Index at = Index(sequence.inputs.size());
    const auto known = shown.find(key);
    Index value;
    if (known == shown.end()) {
      value = draws.between(halves.first_value, halves.end);
    } else {
      value = known->second.value;
      sequence.answers.push_back({at, value, at - known->second.at, known->second.at, 1});
    }
    append(sequence.inputs, {key, value});
    shown[key] = {value, at + 1};
  };
  const Index never_noise = draws.below(pairs - 1);
  for (Index i = 0; i < pairs - 1; ++i) {
    if (i != never_noise && draws.chance(options_.noise)) {
      for (int n = 0; n < 2; ++n) {
        sequence.noise.push_back(Index(sequence.inputs.size()));
        sequence.inputs.push_back(draws.between(first_noise, options_.vocabulary));
      }
    } else {
      show(draws.below(halves.first_value));
    }
  }
  auto probe = shown.begin();
  std::advance(probe, draws.below(Index(shown.size())));
  show(probe->first);
  sequence.inputs.pop_back();  // the last answer is not read
  return sequence;
}

Description<FuzzyRecall::Options> FuzzyRecall::describe() {
  using O = Options;
  return {"fuzzy-recall",
          "Recalls values of several tokens by keys of several tokens",
          "Poli et al. 2024 (MAD)",
          "tokens since the value was last shown",
          {},
          {64, 16, 2, 2},
          {{"len", &O::len, 8, 65536, "tokens of a sequence"},
           {"vocabulary", &O::vocabulary, 4, 1 << 20, "tokens, one of them padding"},
           {"key_tokens", &O::key_tokens, 1, 64, "most tokens of a key"},
           {"value_tokens", &O::value_tokens, 1, 64, "most tokens of a value"}}};
}

FuzzyRecall::FuzzyRecall(const Options& options)
    : Task(checked_spec<FuzzyRecall>(options)), options_(options) {
  const Index keys = (options.vocabulary - 1) / 2;
  heed::require(keys >= options.key_tokens, "--task fuzzy-recall: vocabulary is ",
                options.vocabulary, ", which has ", keys, " tokens for keys, but key_tokens is ",
                options.key_tokens);
  heed::require(options.vocabulary - 1 - keys >= options.value_tokens,
                "--task fuzzy-recall: vocabulary is ", options.vocabulary, ", which has ",
                options.vocabulary - 1 - keys, " tokens for values, but value_tokens is ",
                options.value_tokens);
  const Index largest = options.key_tokens + options.value_tokens;
  heed::require(options.len >= 3 * largest, "--task fuzzy-recall: len is ", options.len,
                ", three pairs of ", largest, " tokens need ", 3 * largest);
}

Sequence FuzzyRecall::sequence(const Place& place) const {
  Draws draws(place);
  const Index padding = options_.vocabulary - 1,
              largest = options_.key_tokens + options_.value_tokens;
  const Halves halves{padding / 2, padding};
  const auto new_key = [&] {
    const bool any = place.split == Split::training;
    return draws.distinct(any ? 1 + draws.below(options_.key_tokens) : options_.key_tokens, 0,
                          halves.first_value);
  };
  const auto new_value = [&] {
    return draws.distinct(1 + draws.below(options_.value_tokens), halves.first_value, halves.end);
  };
  const Motif probe = new_key(), probe_value = new_value();
  const Index probe_size = Index(probe.size() + probe_value.size());
  const Index room = options_.len - probe_size - largest;  // pairs begin in front of it
  const Index probe_at = draws.below(room);

  struct Shown {
    Motif value;
    Index at;  // where the value was last shown
  };
  std::map<Motif, Shown> shown;
  Sequence sequence;
  const auto show = [&](const Motif& key, const Motif& value) {
    append(sequence.inputs, key);
    const Index at = Index(sequence.inputs.size()) - 1;
    if (const auto known = shown.find(key); known != shown.end())
      for (Index i = 0; i < Index(value.size()); ++i)
        sequence.answers.push_back(
            {at + i, value[std::size_t(i)], at - known->second.at, known->second.at + i, 1});
    shown[key] = {value, at + 1};
    append(sequence.inputs, value);
  };
  // Invariant: the probe is shown, or a pair of any size leaves room for it.
  bool probe_shown = false;
  while (Index(sequence.inputs.size()) < room) {
    const Index size = Index(sequence.inputs.size());
    if (!probe_shown && (size >= probe_at || size + largest >= room)) {
      show(probe, probe_value);
      probe_shown = true;
      continue;
    }
    const Motif key = new_key(), value = new_value();
    const auto known = shown.find(key);
    probe_shown = probe_shown || key == probe;
    show(key, key == probe ? probe_value : known != shown.end() ? known->second.value : value);
  }
  show(probe, probe_value);
  sequence.inputs.pop_back();  // the last answer is not read

  const Index in_front = options_.len - Index(sequence.inputs.size());
  sequence.inputs.insert(sequence.inputs.begin(), std::size_t(in_front), padding);
  for (Answer& answer : sequence.answers) {
    answer.position += in_front;
    answer.source += in_front;
  }
  return sequence;
}

Description<SelectiveCopy::Options> SelectiveCopy::describe() {
  using O = Options;
  return {"selective-copy",
          "Copies the tokens between blanks in their order",
          "Poli et al. 2024 (MAD)",
          "which of the copied tokens, from 0",
          {},
          {64, 16, 8},
          {{"len", &O::len, 4, 65536, "tokens of a sequence"},
           {"vocabulary", &O::vocabulary, 3, 1 << 20, "tokens, two of them blank and copy"},
           {"copies", &O::copies, 1, 16384, "tokens to copy"}}};
}

SelectiveCopy::SelectiveCopy(const Options& options)
    : Task(checked_spec<SelectiveCopy>(options)), options_(options) {
  heed::require(options.len > 2 * options.copies + 1, "--task selective-copy: len is ", options.len,
                ", it must be more than ", 2 * options.copies + 1, " for ", options.copies,
                " copies");
}

Sequence SelectiveCopy::sequence(const Place& place) const {
  Draws draws(place);
  const Index copy = options_.vocabulary - 1, blank = options_.vocabulary - 2,
              copies = options_.copies, blanks = options_.len - 2 * copies - 1;
  Motif tokens;
  for (Index i = 0; i < copies; ++i) tokens.push_back(draws.below(blank));
  std::vector<Index> in_front(std::size_t(copies), 0);  // blanks in front of each token
  for (Index i = 0; i < blanks; ++i) ++in_front[std::size_t(draws.below(copies))];
  Sequence sequence;
  for (std::size_t i = 0; i < tokens.size(); ++i) {
    for (Index n = 0; n < in_front[i]; ++n) {
      sequence.noise.push_back(Index(sequence.inputs.size()));
      sequence.inputs.push_back(blank);
    }
    sequence.inputs.push_back(tokens[i]);
    sequence.answers.push_back({options_.len - copies + Index(i), tokens[i], Index(i),
                                Index(sequence.inputs.size()) - 1, 1});
  }
  sequence.inputs.push_back(copy);
  sequence.inputs.resize(std::size_t(options_.len), blank);
  return sequence;
}

Description<Compress::Options> Compress::describe() {
  using O = Options;
  return {"compress",
          "Passes a sequence through the state of one token",
          "Poli et al. 2024 (MAD)",
          "which of the tokens, from 0",
          {},
          {8, 16},
          {{"len", &O::len, 2, 32768, "tokens to compress, and the one that holds them"},
           {"vocabulary", &O::vocabulary, 2, 1 << 20, "tokens, with the one that holds them"}}};
}

Compress::Compress(const Options& options)
    : Task(checked_spec<Compress>(options)), options_(options) {}

Sequence Compress::sequence(const Place& place) const {
  Draws draws(place);
  const Index holder = options_.vocabulary - 1, read = options_.vocabulary, at = options_.len - 1;
  Sequence sequence;
  for (Index i = 0; i < at; ++i) {
    sequence.inputs.push_back(draws.below(holder));
    sequence.answers.push_back({at + 1 + i, sequence.inputs.back(), i, at, 1});
  }
  sequence.inputs.push_back(holder);
  sequence.inputs.resize(std::size_t(len()), read);
  return sequence;
}

Description<Memorise::Options> Memorise::describe() {
  using O = Options;
  return {"memorise",
          "Learns a map from keys to values by heart",
          "Poli et al. 2024 (MAD)",
          "",
          {},
          {32, 64, 12345},
          {{"len", &O::len, 2, 65536, "tokens of a sequence"},
           {"vocabulary", &O::vocabulary, 3, 1 << 20, "tokens: keys, values and the one that asks"},
           {"map", &O::map, 0, 1e9, "seed of the map"}}};
}

Memorise::Memorise(const Options& options)
    : Task(checked_spec<Memorise>(options)), options_(options) {
  heed::require(options.len % 2 == 0, "--task memorise: len is ", options.len, ", it must be even");
  constexpr std::uint64_t kMap = 210;
  const Index ask = options.vocabulary - 1, keys = ask / 2;
  values_ = Draws(std::uint64_t(options.map), kMap, 0).distinct(keys, keys, ask);
}

Sequence Memorise::sequence(const Place& place) const {
  Draws draws(place);
  Sequence sequence;
  for (Index t = 0; t < options_.len; t += 2) {
    const Index key = draws.below(Index(values_.size()));
    append(sequence.inputs, {key, options_.vocabulary - 1});
    sequence.answers.push_back({t + 1, values_[std::size_t(key)], 0, 0, 0});
  }
  return sequence;
}

}  // namespace tasks
