// SPDX-License-Identifier: Apache-2.0

// Each task agrees with its header: plain programs that read only a prompt give all answers, and
// draws have the probabilities of the definition. Bounds are five standard deviations or more.

#include "tasks/task_list.hpp"

#include "catch.hpp"

#include <algorithm>
#include <cmath>
#include <functional>
#include <map>
#include <numeric>
#include <set>

using namespace tasks;

namespace {

using Tokens = std::vector<Index>;
// The answer to a prompt: all tokens up to the position that asks.
using Solver = std::function<Index(const Tokens&)>;

// The tokens with noise moved: each noise token takes the place of the next one.
[[nodiscard]] Tokens with_noise_moved(const Sequence& sequence) {
  Tokens tokens = sequence.inputs;
  for (std::size_t n = 0; n + 1 < sequence.noise.size(); ++n)
    std::swap(tokens[std::size_t(sequence.noise[n])], tokens[std::size_t(sequence.noise[n + 1])]);
  return tokens;
}

// The solver gives all answers, whatever the noise is.
void check_solves(const std::string& spec, const Solver& solve) {
  const auto task = make_task(spec);
  Index asked = 0, right = 0;
  for (const Split split : {Split::training, Split::validation, Split::test})
    for (std::uint64_t i = 0; i < 300; ++i) {
      const Sequence sequence = task->sequence({11, split, i});
      for (const Tokens& tokens : {sequence.inputs, with_noise_moved(sequence)})
        for (const Answer& answer : sequence.answers) {
          ++asked;
          right += solve({tokens.begin(), tokens.begin() + answer.position + 1}) == answer.token;
        }
    }
  INFO(spec);
  CHECK(asked >= 1800);
  CHECK(right == asked);
}

[[nodiscard]] std::vector<Sequence> sequences_of(const std::string& spec, std::uint64_t count,
                                                 Split split = Split::training) {
  const auto task = make_task(spec);
  std::vector<Sequence> all;
  for (std::uint64_t i = 0; i < count; ++i) all.push_back(task->sequence({17, split, i}));
  return all;
}

// Checks a counted share against its probability, within five standard deviations.
void check_share(double counted, double of, double probability) {
  CAPTURE(counted, of, probability);
  CHECK(std::abs(counted - of * probability) <=
        5 * std::sqrt(of * probability * (1 - probability)) + 1);
}

// The last earlier place of the last token.
[[nodiscard]] std::size_t place_before(const Tokens& prompt) {
  for (std::size_t t = prompt.size() - 1; t-- > 0;)
    if (prompt[t] == prompt.back()) return t;
  return prompt.size();
}

}  // namespace

TEST_CASE("mqar: the value that stands behind the key in the list") {
  for (const auto& [spec, pairs] :
       {std::pair{"mqar", 4}, {"mqar:len=128,pairs=8", 8}, {"mqar:published", 64}})
    check_solves(spec, [pairs = std::size_t(pairs)](const Tokens& prompt) {
      for (std::size_t i = 0; i < pairs; ++i)
        if (prompt[2 * i] == prompt.back()) return prompt[2 * i + 1];
      return Index(-1);
    });
}

TEST_CASE("mqar: keys, values and queries are where the definition has them") {
  for (const Sequence& s : sequences_of("mqar", 500)) {
    std::set<Index> keys, values, asked;
    for (std::size_t i = 0; i < 4; ++i) {
      keys.insert(s.inputs[2 * i]);
      values.insert(s.inputs[2 * i + 1]);
    }
    CHECK((keys.size() == 4 && *keys.begin() >= 1 && *keys.rbegin() < 32));
    CHECK((values.size() == 4 && *values.begin() >= 32 && *values.rbegin() < 64));
    REQUIRE(s.answers.size() == 4);
    for (const Answer& a : s.answers) {
      CHECK((a.position >= 8 && a.position % 2 == 0));
      asked.insert(s.inputs[std::size_t(a.position)]);
      CHECK(s.inputs[std::size_t(a.source)] == a.token);
      CHECK(a.difficulty == a.position - (a.source - 1));
    }
    CHECK(asked == keys);
    CHECK(s.noise.size() == 64 - 3 * 4);
  }
}

TEST_CASE("mqar: gaps follow the power law, and the second key takes what the first one left") {
  constexpr std::size_t slots = 28, count = 40000;
  std::vector<double> weights, first(slots), second(slots);
  for (std::size_t g = 0; g < slots; ++g) weights.push_back(std::pow(double(g + 1), 0.01 - 1));
  const double total = std::accumulate(weights.begin(), weights.end(), 0.0);
  std::vector<double> fillers(64);
  double filled = 0;
  for (const Sequence& s : sequences_of("mqar", count)) {
    std::set<Index> queries;
    for (const Answer& a : s.answers) {
      const auto slot = std::size_t((a.position - 8) / 2);
      if (a.source == 1) ++first[slot];
      if (a.source == 3) ++second[slot];
      queries.insert(a.position);
    }
    for (Index t = 8; t < 64; ++t)
      if (queries.count(t) == 0) {
        ++fillers[std::size_t(s.inputs[std::size_t(t)])];
        ++filled;
      }
  }
  for (std::size_t g = 0; g < slots; ++g) {
    check_share(first[g], count, weights[g] / total);
    double chance = 0;  // over the slots that the first key may have taken
    for (std::size_t taken = 0; taken < slots; ++taken)
      if (taken != g) chance += weights[taken] / total * weights[g] / (total - weights[taken]);
    check_share(second[g], count, chance);
  }
  for (const double seen : fillers) check_share(seen, filled, 1.0 / 64);
}

TEST_CASE("mqar-forgetting: the last value that the key was given") {
  for (const auto& [spec, pairs] :
       {std::pair{"mqar-forgetting", 6}, {"mqar-forgetting:published", 12}})
    check_solves(spec, [pairs = std::size_t(pairs)](const Tokens& prompt) {
      Index value = -1;
      for (std::size_t i = 0; i < pairs; ++i)
        if (prompt[2 * i] == prompt.back()) value = prompt[2 * i + 1];
      return value;
    });
}

TEST_CASE("mqar-forgetting: the drawn keys are rewritten once, by another value") {
  std::vector<double> rewritten(6);
  for (const Sequence& s : sequences_of("mqar-forgetting:pairs=6,updates=3", 3000)) {
    std::map<Index, Tokens> given;
    for (std::size_t i = 0; i < 9; ++i) given[s.inputs[2 * i]].push_back(s.inputs[2 * i + 1]);
    REQUIRE(given.size() == 6);
    for (std::size_t i = 0; i < 6; ++i) {
      const Tokens& values = given[s.inputs[2 * i]];
      rewritten[i] += values.size() == 2;
      REQUIRE(values.size() <= 2);
      if (values.size() == 2) CHECK(values[0] != values[1]);
    }
    for (const Answer& a : s.answers) {
      const Tokens& values = given[s.inputs[std::size_t(a.position)]];
      CHECK(a.difficulty == Index(values.size()) - 1);
      CHECK(a.token == values.back());
      CHECK(s.inputs[std::size_t(a.source)] == a.token);
      CHECK(a.source >= (values.size() == 2 ? 12 : 0));
    }
  }
  for (const double times : rewritten) check_share(times, 3000, 0.5);
}

TEST_CASE("noisy-recall: the value that followed the key") {
  for (const std::string spec :
       {"noisy-recall", "noisy-recall:published", "noisy-recall:noise=0.8"})
    check_solves(spec, [](const Tokens& prompt) { return prompt[place_before(prompt) + 1]; });
}

TEST_CASE(
    "noisy-recall: every key that was shown asks, and pairs are noise as often as they should") {
  constexpr double pairs = 32;
  double noise = 0, keys_drawn = 0;
  std::vector<double> keys(8);
  for (const Sequence& s : sequences_of("noisy-recall", 4000)) {
    REQUIRE(s.inputs.size() == 63);
    CHECK(Index(s.noise.size()) ==
          std::count_if(s.inputs.begin(), s.inputs.end(), [](Index token) { return token >= 16; }));
    std::map<Index, Index> last;  // where the value of a key was last shown
    std::set<Index> asked;
    for (const Answer& a : s.answers) {
      asked.insert(a.position);
      CHECK(s.inputs[std::size_t(a.source)] == a.token);
      CHECK(a.difficulty == a.position - a.source);
    }
    for (std::size_t t = 0; t < s.inputs.size(); t += 2) {
      const Index key = s.inputs[t];
      CHECK(asked.count(Index(t)) == last.count(key));
      if (key >= 16) {
        ++noise;
        CHECK(s.inputs[t + 1] >= 16);
        continue;
      }
      REQUIRE(key < 8);
      if (t == 62) {
        CHECK(last.count(key) == 1);  // the probe was shown
        continue;
      }
      CHECK((s.inputs[t + 1] >= 8 && s.inputs[t + 1] < 16));
      if (last.count(key) == 1) CHECK(s.inputs[std::size_t(last[key])] == s.inputs[t + 1]);
      last[key] = Index(t + 1);
      ++keys[std::size_t(key)];
      ++keys_drawn;
    }
  }
  check_share(noise, 4000 * (pairs - 2), 0.2);  // neither the probe nor the pair that never is
  for (const double seen : keys) check_share(seen, keys_drawn, 1.0 / 8);
}

namespace {

// Runs of key tokens and of value tokens, which alternate; padding is left out.
[[nodiscard]] std::vector<Tokens> runs_of(const Tokens& prompt, Index first_value, Index padding) {
  std::vector<Tokens> runs;
  for (std::size_t t = 0; t < prompt.size(); ++t) {
    if (prompt[t] == padding) continue;
    const bool is_value = prompt[t] >= first_value;
    if (runs.empty() || (runs.back().back() >= first_value) != is_value) runs.emplace_back();
    runs.back().push_back(prompt[t]);
  }
  return runs;
}

}  // namespace

TEST_CASE("fuzzy-recall: token for token what followed the key") {
  for (const std::string spec : {"fuzzy-recall", "fuzzy-recall:published"})
    check_solves(spec, [](const Tokens& prompt) {
      std::vector<Tokens> runs = runs_of(prompt, 7, 15);
      std::size_t next = 0;  // how many tokens of the value were read
      if (runs.back()[0] >= 7) {
        next = runs.back().size();
        runs.pop_back();
      }
      for (std::size_t k = 0; k + 1 < runs.size(); k += 2)
        if (runs[k] == runs.back() && k + 1 < runs.size() && next < runs[k + 1].size())
          return runs[k + 1][next];
      return Index(-1);
    });
}

TEST_CASE("fuzzy-recall: sizes are drawn evenly, and what is tested has the largest keys") {
  for (const Split split : {Split::training, Split::validation}) {
    std::vector<double> key_sizes(4), value_sizes(4);
    double pairs = 0;
    for (const Sequence& s : sequences_of("fuzzy-recall:published", 3000, split)) {
      REQUIRE(s.inputs.size() == 128);
      REQUIRE_FALSE(s.answers.empty());
      Tokens whole = s.inputs;
      whole.push_back(s.answers.back().token);
      const std::vector<Tokens> runs = runs_of(whole, 7, 15);
      REQUIRE(runs.size() % 2 == 0);
      const Tokens &probe = runs[runs.size() - 2], &value = runs.back();
      bool shown = false;
      for (std::size_t k = 0; k + 2 < runs.size(); k += 2) {
        shown = shown || (runs[k] == probe && runs[k + 1] == value);
        ++pairs;
        ++key_sizes[runs[k].size()];
        ++value_sizes[runs[k + 1].size()];
        CHECK(std::set<Index>(runs[k].begin(), runs[k].end()).size() == runs[k].size());
      }
      CHECK(shown);
      for (const Answer& a : s.answers) {
        CHECK(s.inputs[std::size_t(a.source)] == a.token);
        CHECK(a.difficulty == a.position - a.source);
      }
    }
    // Long sequences have fewer large pairs, and a repeated key has the size of its old value: a rough bound.
    for (std::size_t size = 1; size <= 3; ++size) {
      if (split == Split::training) CHECK(std::abs(key_sizes[size] / pairs - 1.0 / 3) < 0.02);
      CHECK(std::abs(value_sizes[size] / pairs - 1.0 / 3) < 0.02);
    }
    if (split == Split::validation) CHECK(key_sizes[3] == pairs);
  }
}

TEST_CASE("selective-copy: the tokens between the blanks, in their order") {
  for (const auto& [spec, copies] :
       {std::pair{"selective-copy", 8}, {"selective-copy:published", 16}})
    check_solves(spec, [copies = copies](const Tokens& prompt) {
      const auto copy = std::find(prompt.begin(), prompt.end(), Index(15));
      Tokens seen;
      std::copy_if(prompt.begin(), copy, std::back_inserter(seen), [](Index t) { return t != 14; });
      const auto blanks = prompt.end() - copy - 2;  // blanks that were answered before
      return Index(seen.size()) == copies ? seen[std::size_t(blanks)] : Index(-1);
    });
}

TEST_CASE("selective-copy: blanks stand in front of each token as often") {
  std::vector<double> in_front(8);
  double blanks = 0;
  for (const Sequence& s : sequences_of("selective-copy", 3000)) {
    REQUIRE(s.inputs.size() == 64);
    std::size_t token = 0;
    for (std::size_t t = 0; t < 55; ++t) {
      if (s.inputs[t] == 14) {
        REQUIRE(token < 8);
        ++in_front[token];
        ++blanks;
      } else {
        ++token;
      }
    }
    CHECK(token == 8);
    CHECK(s.inputs[55] == 15);
    for (const Answer& a : s.answers) CHECK(s.inputs[std::size_t(a.source)] == a.token);
    for (const Index t : s.noise) CHECK(s.inputs[std::size_t(t)] == 14);
    CHECK(s.noise.size() == 47);
  }
  CHECK(blanks == 3000 * 47);
  for (const double seen : in_front) check_share(seen, blanks, 1.0 / 8);
}

TEST_CASE("compress: the token at the place that is read") {
  for (const auto& [spec, len] : {std::pair{"compress", 8}, {"compress:published", 32}}) {
    check_solves(spec, [len = std::size_t(len)](const Tokens& prompt) {
      return prompt[len - 1] == 15 && prompt.back() == 16 ? prompt[prompt.size() - 1 - len]
                                                          : Index(-1);
    });
    CHECK(make_task(spec)->bottleneck() == Index(len - 1));
    for (const Sequence& s : sequences_of(spec, 50))
      for (const Answer& a : s.answers) {
        CHECK(a.position > Index(len - 1));
        CHECK(a.source == Index(len - 1));
      }
  }
  CHECK_FALSE(make_task("mqar")->bottleneck().has_value());
}

TEST_CASE("memorise: what training showed answers the tests, and seeds do not change it") {
  for (const std::string spec : {"memorise", "memorise:published"}) {
    std::map<Index, Index> table;
    for (const Sequence& s : sequences_of(spec, 400))
      for (const Answer& a : s.answers) table[s.inputs[std::size_t(a.position - 1)]] = a.token;
    check_solves(spec, [&](const Tokens& prompt) { return table.at(prompt[prompt.size() - 2]); });
    const Index ask = make_task(spec)->vocabulary() - 1;
    CHECK(Index(table.size()) == ask / 2);
    std::set<Index> values;
    for (const auto& [key, value] : table) {
      CHECK((key < ask / 2 && value >= ask / 2 && value < ask));
      values.insert(value);
    }
    CHECK(values.size() == table.size());
  }
  CHECK(sequences_of("memorise:map=1", 1)[0].answers !=
        sequences_of("memorise:map=2", 1)[0].answers);
}

TEST_CASE("induction: what followed the special token") {
  for (const std::string spec : {"induction", "induction:len=256,vocabulary=16"}) {
    const Index special = make_task(spec)->vocabulary() - 1;
    check_solves(spec, [](const Tokens& prompt) {
      return *(std::find(prompt.begin(), prompt.end(), prompt.back()) + 1);
    });
    for (const Sequence& s : sequences_of(spec, 200)) {
      CHECK(std::count(s.inputs.begin(), s.inputs.end(), special) == 2);
      CHECK(std::count(s.inputs.begin(), s.inputs.end(), special - 1) == 0);
    }
  }
  std::vector<double> places(30);
  for (const Sequence& s : sequences_of("induction", 20000))
    ++places[std::size_t(s.answers[0].source - 1)];
  for (std::size_t p = 0; p < 30; ++p) check_share(places[p], 20000, p < 28 ? 1.0 / 28 : 0);
}

TEST_CASE("flip-flop: the bit of the last write") {
  for (const std::string spec :
       {"flip-flop", "flip-flop:published", "flip-flop:p_ignore=0.98", "flip-flop:p_ignore=0.1"})
    check_solves(spec, [](const Tokens& prompt) {
      Index memory = -1;
      for (std::size_t t = 0; t + 1 < prompt.size(); t += 2)
        if (prompt[t] == 0) memory = prompt[t + 1];
      return prompt.back() == 1 ? memory : Index(-1);
    });
}

TEST_CASE("flip-flop: instructions and bits have their probabilities, in training and in tests") {
  const auto count = [](const Task& task, double p_ignore) {
    INFO(task.spec());
    double instructions = 0, bits = 0, ones = 0;
    std::vector<double> seen(3);
    for (std::uint64_t i = 0; i < 2000; ++i) {
      const Sequence s = task.sequence({17, Split::test, i});
      REQUIRE(s.inputs.size() == 127);
      CHECK((s.inputs.front() == 0 && s.inputs.back() == 1));
      std::size_t reads = 0;
      for (std::size_t t = 0; t < s.inputs.size(); t += 2) {
        reads += s.inputs[t] == 1;
        if (t + 1 < s.inputs.size() && s.inputs[t] != 1) {
          ++bits;
          ones += s.inputs[t + 1] == 4;
        }
        if (t == 0 || t + 1 == s.inputs.size()) continue;
        ++seen[std::size_t(s.inputs[t])];
        ++instructions;
      }
      CHECK(s.answers.size() == reads);  // each read asks, and nothing else does
      for (const Answer& a : s.answers) {
        CHECK(s.inputs[std::size_t(a.source)] == a.token);
        CHECK(s.inputs[std::size_t(a.source - 1)] == 0);
        CHECK(2 * a.difficulty == a.position - (a.source - 1));
      }
    }
    check_share(seen[2], instructions, p_ignore);
    check_share(seen[0], instructions, (1 - p_ignore) / 2);
    check_share(seen[1], instructions, (1 - p_ignore) / 2);
    check_share(ones, bits, 0.5);
  };
  const auto task = make_task("flip-flop");
  const auto tests = task->tests();
  REQUIRE(tests.size() == 2);
  count(*task, 0.8);
  count(*tests[0].task, 0.98);
  count(*tests[1].task, 0.1);
}

TEST_CASE("needles: the number that stands behind the city") {
  for (const std::string spec :
       {"needles", "needles:needles=1,asked=1", "needles:len=28,needles=6"})
    check_solves(spec, [](const Tokens& prompt) {
      return *(std::find(prompt.begin(), prompt.end(), prompt.back()) + 1);
    });
}

TEST_CASE("needles: cities stand in needles alone, and one asked needle at each of five depths") {
  constexpr Index cities = 16, numbers = 32, hay = 124, last = hay - 2;
  std::vector<double> depths(5), order(2);
  double hay_numbers = 0, hay_tokens = 0;
  for (const Sequence& s : sequences_of("needles:len=128,needles=6,numbers=32,words=32", 4000)) {
    REQUIRE(s.inputs.size() == 128);
    CHECK(s.inputs[std::size_t(hay)] == 80);  // ASK
    std::map<Index, Index> number_of;
    std::set<Index> used;
    for (Index t = 0; t < hay; ++t) {
      const Index token = s.inputs[std::size_t(t)];
      CHECK(token < 80);
      if (token < cities) {
        CHECK(number_of.count(token) == 0);
        number_of[token] = s.inputs[std::size_t(t + 1)];
        used.insert(s.inputs[std::size_t(t + 1)]);
        ++t;
      } else {
        ++hay_tokens;
        hay_numbers += token < cities + numbers;
      }
    }
    CHECK(number_of.size() == 6);
    CHECK(used.size() == 6);
    REQUIRE(s.answers.size() == 2);
    CHECK(s.answers[0].source != s.answers[1].source);
    CHECK(Index(s.noise.size()) == hay - 2 * 6);
    bool exact = false;
    for (std::size_t n = 0; n < 2; ++n) {
      const Answer& a = s.answers[n];
      CHECK(s.inputs[std::size_t(a.source)] == a.token);
      CHECK(s.inputs[std::size_t(a.source - 1)] == s.inputs[std::size_t(a.position)]);
      CHECK(std::abs(double(a.difficulty) - 100.0 * double(a.source - 1) / double(last)) <= 13);
      CHECK(a.difficulty % 25 == 0);
      for (Index k = 0; k < 5; ++k)
        if (!exact && a.source - 1 == (25 * k * last + 50) / 100) {
          exact = true;
          ++depths[std::size_t(k)];
          ++order[n];
        }
    }
    CHECK(exact);
  }
  // A second needle may stand at one of the depths by chance, hence a bound beside the fifth.
  for (const double seen : depths) CHECK(std::abs(seen / 4000 - 0.2) < 0.04);
  CHECK(std::abs(order[0] / 4000 - 0.5) < 0.06);
  check_share(hay_numbers, hay_tokens, 0.5);
}

TEST_CASE("dyck: the kind of the innermost open bracket") {
  for (const auto& [spec, kinds] :
       {std::pair{"dyck", 4}, {"dyck:published", 8}, {"dyck:kinds=2,depth=6,least=65,len=128", 2}})
    check_solves(spec, [kinds = Index(kinds)](const Tokens& prompt) {
      Tokens open;
      for (const Index token : prompt) {
        if (token < kinds) {
          open.push_back(token);
        } else {
          if (open.empty() || open.back() != token - kinds) return Index(-1);
          open.pop_back();
        }
      }
      return open.empty() ? Index(-1) : kinds + open.back();
    });
}

TEST_CASE(
    "dyck: sequences are balanced, as deep and as long as they may be, and every close asks") {
  const auto check = [](const Task& task, Index depth, Index least, Index len) {
    INFO(task.spec());
    Index deepest = 0, longest = 0;
    for (std::uint64_t i = 0; i < 2000; ++i) {
      const Sequence s = task.sequence({17, Split::test, i});
      Tokens open;  // positions
      std::size_t answer = 0;
      for (std::size_t t = 0; t < s.inputs.size(); ++t) {
        if (s.inputs[t] < 4) {
          open.push_back(Index(t));
        } else {
          REQUIRE(answer < s.answers.size());
          const Answer& a = s.answers[answer++];
          CHECK(a.position == Index(t) - 1);
          CHECK(a.token == s.inputs[t]);
          CHECK(a.difficulty == Index(open.size()));
          CHECK(a.source == open.back());
          open.pop_back();
        }
        deepest = std::max(deepest, Index(open.size()));
        REQUIRE(Index(open.size()) <= depth);
      }
      CHECK(open.empty());
      CHECK(answer == s.answers.size());
      const Index size = Index(s.inputs.size());
      CHECK((size >= least && size <= len));
      longest = std::max(longest, size);
    }
    CHECK(deepest == depth);
    CHECK(longest >= len - 8);
  };
  const auto task = make_task("dyck");
  const auto tests = task->tests();
  REQUIRE(tests.size() == 2);
  check(*task, 4, 1, 64);
  check(*tests[0].task, 4, 65, 128);
  check(*tests[1].task, 6, 1, 64);
}

TEST_CASE("dyck: brackets open, close and end with probability one half") {
  // Depth 1: n pairs with probability 2^-n.
  double lengths[8] = {}, kinds[4] = {}, opened = 0;
  for (const Sequence& s : sequences_of("dyck:depth=1,len=512", 20000)) {
    const std::size_t pairs = s.inputs.size() / 2;
    if (pairs < 8) ++lengths[pairs];
    for (std::size_t t = 0; t < s.inputs.size(); t += 2, ++opened) ++kinds[s.inputs[t]];
  }
  for (int n = 1; n < 8; ++n) check_share(lengths[n], 20000, std::pow(0.5, n));
  for (const double seen : kinds) check_share(seen, opened, 0.25);
  // Depth 2: one pair alone with 1/4, two nested alone with 1/2 (opens) 1 (closes) 1/2 (closes) 1/2 (ends).
  double single = 0, nested = 0;
  for (const Sequence& s : sequences_of("dyck:depth=2,len=512", 20000)) {
    single += s.inputs.size() == 2;
    nested += s.inputs.size() == 4 && s.inputs[1] < 4;
  }
  check_share(single, 20000, 0.25);
  check_share(nested, 20000, 0.125);
}

TEST_CASE("parity: the number of ones modulo two, in strings of any length") {
  for (const std::string spec : {"parity", "parity:published", "parity:least=81,len=160"})
    check_solves(spec, [](const Tokens& prompt) {
      return prompt.back() == 2 ? std::accumulate(prompt.begin(), prompt.end() - 1, Index(0)) % 2
                                : Index(-1);
    });
  std::vector<double> lengths(21);
  double ones = 0, bits = 0;
  for (const Sequence& s : sequences_of("parity", 20000)) {
    const std::size_t n = s.inputs.size() - 1;
    REQUIRE(n <= 20);
    ++lengths[n];
    bits += double(n);
    ones += double(std::count(s.inputs.begin(), s.inputs.end() - 1, Index(1)));
    CHECK(s.answers[0].difficulty == Index(n));
  }
  for (std::size_t n = 1; n <= 20; ++n) check_share(lengths[n], 20000, 1.0 / 20);
  check_share(ones, bits, 0.5);
  Index least = 21, most = 40;
  for (const Task::Test& test : make_task("parity")->tests()) {
    std::set<Index> seen;
    for (std::uint64_t i = 0; i < 4000; ++i)
      seen.insert(test.task->sequence({1, Split::test, i}).answers[0].difficulty);
    CHECK((*seen.begin() == least && *seen.rbegin() == most));
    CHECK(Index(seen.size()) == most - least + 1);
    least = most + 1;
    most *= 2;
  }
}

TEST_CASE("modular-sum: the value of the string, products first") {
  for (const auto& [spec, modulus] : {std::pair{"modular-sum", 5},
                                      {"modular-sum:published", 5},
                                      {"modular-sum:modulus=7,products=0", 7},
                                      {"modular-sum:least=41,len=80", 5}})
    check_solves(spec, [m = Index(modulus)](const Tokens& prompt) {
      // From the right: a product goes on to the left, a sum ends there.
      Index value = 0, product = 1;
      for (std::size_t t = prompt.size() - 1; t-- > 0;) {
        if (t % 2 == 0) product = product * prompt[t] % m;
        if (t % 2 == 0 || prompt[t] == m + 2) continue;
        value += prompt[t] == m + 1 ? m - product : product;
        product = 1;
      }
      return prompt.back() == m + 3 ? (value + product) % m : Index(-1);
    });
  std::vector<double> numbers(5), operators(3), lengths(21);
  double all = 0, ops = 0;
  for (const Sequence& s : sequences_of("modular-sum", 20000)) {
    const std::size_t n = s.inputs.size() - 1;
    REQUIRE((n % 2 == 1 && n <= 20));
    ++lengths[n];
    for (std::size_t t = 0; t < n; ++t) {
      if (t % 2 == 0) {
        ++numbers[std::size_t(s.inputs[t])];
        ++all;
      } else {
        ++operators[std::size_t(s.inputs[t] - 5)];
        ++ops;
      }
    }
  }
  for (const double seen : numbers) check_share(seen, all, 0.2);
  for (const double seen : operators) check_share(seen, ops, 1.0 / 3);
  // An even length loses one: 20 becomes 19, 2 becomes 1.
  for (std::size_t n = 1; n <= 19; n += 2) check_share(lengths[n], 20000, 0.1);
  for (const Sequence& s : sequences_of("modular-sum:products=0", 200))
    CHECK(std::count(s.inputs.begin(), s.inputs.end(), Index(7)) == 0);
}

namespace {

// The value of the list that begins at `at`, which moves behind it; `depth` becomes its nesting.
[[nodiscard]] Index evaluate(const Tokens& tokens, std::size_t& at, Index& depth) {
  if (tokens[at] < 10) return tokens[at++];
  const Index op = tokens[at++];
  std::vector<Index> values;
  Index deepest = 0;
  while (tokens[at] != 14) {
    Index below = 0;
    values.push_back(evaluate(tokens, at, below));
    deepest = std::max(deepest, below);
  }
  ++at;
  depth = deepest + 1;
  if (op == 10) return *std::min_element(values.begin(), values.end());
  if (op == 11) return *std::max_element(values.begin(), values.end());
  if (op == 13) {
    Index sum = 0;
    for (const Index v : values) sum = (sum + v) % 10;
    return sum;
  }
  // The median: as many are below as above, the mean of both middle ones without its half.
  double smaller = -1, larger = -1;
  for (const Index v : values) {
    const auto below = std::count_if(values.begin(), values.end(), [&](Index w) { return w < v; });
    const auto equal = std::count(values.begin(), values.end(), v);
    const auto count = std::ptrdiff_t(values.size());
    if (below <= (count - 1) / 2 && below + equal > (count - 1) / 2) smaller = double(v);
    if (below <= count / 2 && below + equal > count / 2) larger = double(v);
  }
  return Index(std::floor((smaller + larger) / 2));
}

}  // namespace

TEST_CASE("listops: the value of the list") {
  for (const std::string spec : {"listops", "listops:published"})
    check_solves(spec, [](const Tokens& prompt) {
      std::size_t at = 0;
      Index depth = 0;
      const Index value = evaluate(prompt, at, depth);
      return at + 1 == prompt.size() && prompt.back() == 15 ? value : Index(-1);
    });
}

TEST_CASE("listops: operators, arguments and nesting are drawn as they should be") {
  std::vector<double> ops(4), arguments(5);
  double lists = 0, nested = 0, first = 0;
  Index deepest = 0;
  for (const Sequence& s : sequences_of("listops:len=4096,lists=0.3", 5000)) {
    std::size_t at = 0;
    Index depth = 0;
    (void)evaluate(s.inputs, at, depth);
    CHECK(s.answers[0].difficulty == depth);
    deepest = std::max(deepest, depth);
    // Arguments of the outermost list, which are lists with probability 0.3.
    std::size_t open = 0, count = 0;
    for (std::size_t t = 0; t + 1 < s.inputs.size(); ++t) {
      const Index token = s.inputs[t];
      if (open == 1 && token != 14) {
        ++count;
        nested += token >= 10;
      }
      if (token >= 10 && token < 14) {
        ++ops[std::size_t(token - 10)];
        ++lists;
        ++open;
      }
      if (token == 14) --open;
    }
    first += double(count);
    ++arguments[count];
  }
  CHECK(deepest == 3);  // the lowest of four levels has digits
  for (const double seen : ops) check_share(seen, lists, 0.25);
  for (std::size_t n = 2; n <= 4; ++n) check_share(arguments[n], 5000, 1.0 / 3);
  check_share(nested, first, 0.3);
  for (const Sequence& s : sequences_of("listops", 2000)) CHECK(s.inputs.size() <= 49);
}

TEST_CASE("modular-addition: the sum, and a split of all pairs that never changes") {
  check_solves("modular-addition", [](const Tokens& p) { return (p[0] + p[2]) % 31; });
  check_solves("modular-addition:published", [](const Tokens& p) { return (p[0] + p[2]) % 97; });
  const auto pairs = [](Split split, std::uint64_t seed, std::uint64_t count) {
    const auto task = make_task("modular-addition");
    std::set<Index> seen;
    for (std::uint64_t i = 0; i < count; ++i) {
      const Sequence s = task->sequence({seed, split, i});
      CHECK((s.inputs.size() == 4 && s.inputs[1] == 31 && s.inputs[3] == 32));
      CHECK(s.answers[0].difficulty == (s.inputs[0] + s.inputs[2] >= 31 ? 1 : 0));
      seen.insert(31 * s.inputs[0] + s.inputs[2]);
    }
    return seen;
  };
  // 70 % of 961 pairs, and two halves of the rest.
  const std::set<Index> training = pairs(Split::training, 1, 20000),
                        validation = pairs(Split::validation, 1, 144),
                        tested = pairs(Split::test, 1, 144);
  CHECK(training.size() == 673);
  CHECK(validation.size() == 144);
  CHECK(tested.size() == 144);
  std::set<Index> all = training;
  all.insert(validation.begin(), validation.end());
  all.insert(tested.begin(), tested.end());
  CHECK(all.size() == 961);
  CHECK(pairs(Split::training, 2, 20000) == training);
  CHECK(pairs(Split::validation, 2, 144) == validation);
}
