// SPDX-License-Identifier: Apache-2.0
#include "chomsky.hpp"

#include "draws.hpp"

namespace tasks {

namespace {

// Tests of up to 2, 4 and 8 times the length.
template <class Own>
[[nodiscard]] std::vector<Task::Test> longer(typename Own::Options options) {
  std::vector<Task::Test> tests;
  for (const char* name : {"2x", "4x", "8x"}) {
    options.least = options.len + 1;
    options.len *= 2;
    add_test<Own>(tests, name, options);
  }
  return tests;
}

template <class Options>
void require_order(const char* name, const Options& o) {
  heed::require(o.least <= o.len, "--task ", name, ": least is ", o.least,
                ", it must be at most len, ", o.len);
}

}  // namespace

Description<Parity::Options> Parity::describe() {
  using O = Options;
  return {"parity",
          "Tells whether a string has an odd number of ones",
          "Deletang et al. 2022",
          "bits of the string",
          {},
          {1, 20},
          {{"least", &O::least, 1, 65536, "fewest bits of a string"},
           {"len", &O::len, 1, 65536, "most bits of a string"}}};
}

Parity::Parity(const Options& options) : Task(checked_spec<Parity>(options)), options_(options) {
  require_order("parity", options);
}

Sequence Parity::sequence(const Place& place) const {
  Draws draws(place);
  const Index count = draws.between(options_.least, options_.len + 1);
  Sequence sequence;
  Index odd = 0;
  for (Index t = 0; t < count; ++t) {
    sequence.inputs.push_back(draws.below(2));
    odd ^= sequence.inputs.back();
  }
  sequence.inputs.push_back(2);
  sequence.answers.push_back({count, odd, count, 0, 0});
  return sequence;
}

std::vector<Task::Test> Parity::tests() const { return longer<Parity>(options_); }

Description<ModularSum::Options> ModularSum::describe() {
  using O = Options;
  return {"modular-sum",
          "Computes sums and products modulo a small number",
          "Deletang et al. 2022",
          "numbers and operators of the string",
          {},
          {1, 20, 5, 1},
          {{"least", &O::least, 1, 65536, "fewest numbers and operators of a string"},
           {"len", &O::len, 1, 65536, "most numbers and operators of a string"},
           {"modulus", &O::modulus, 2, 1024, "the modulus"},
           {"products", &O::products, 0, 1, "1: operators + - *; 0: + - alone"}}};
}

ModularSum::ModularSum(const Options& options)
    : Task(checked_spec<ModularSum>(options)), options_(options) {
  require_order("modular-sum", options);
}

Sequence ModularSum::sequence(const Place& place) const {
  const Index modulus = options_.modulus, minus = 1, times = 2, equals = modulus + 3;
  Draws draws(place);
  const Index drawn = draws.between(options_.least, options_.len + 1),
              count = drawn - 1 + drawn % 2;
  Sequence sequence;
  sequence.inputs.push_back(draws.below(modulus));
  // Invariant: the string so far has the value sum + term, both modulo the modulus; `term` is its last product with the
  // sign in front.
  Index sum = 0, term = sequence.inputs[0];
  while (Index(sequence.inputs.size()) < count) {
    const Index op = draws.below(options_.products == 1 ? 3 : 2), number = draws.below(modulus);
    if (op == times) {
      term = term * number % modulus;
    } else {
      sum = (sum + term) % modulus;
      term = op == minus ? (modulus - number) % modulus : number;
    }
    sequence.inputs.push_back(modulus + op);
    sequence.inputs.push_back(number);
  }
  sequence.inputs.push_back(equals);
  sequence.answers.push_back({count, (sum + term) % modulus, count, 0, 0});
  return sequence;
}

std::vector<Task::Test> ModularSum::tests() const { return longer<ModularSum>(options_); }

}  // namespace tasks
