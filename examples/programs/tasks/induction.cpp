// SPDX-License-Identifier: Apache-2.0
#include "induction.hpp"

#include "draws.hpp"

namespace tasks {

Description<Induction::Options> Induction::describe() {
  using O = Options;
  return {"induction",
          "Repeats what followed a special token",
          "Fu et al. 2023 (H3), after Olsson et al. 2022",
          "tokens between both special tokens",
          {},
          {},
          {{"len", &O::len, 3, 65536, "tokens in front of the last special one"},
           {"vocabulary", &O::vocabulary, 3, 1 << 20, "tokens, two of them special"}}};
}

Induction::Induction(const Options& options)
    : Task(checked_spec<Induction>(options)), options_(options) {}

Sequence Induction::sequence(const Place& place) const {
  const auto& [len, vocabulary] = options_;
  const Index special = vocabulary - 1;
  Draws draws(place);
  Sequence sequence;
  for (Index t = 0; t < len; ++t) sequence.inputs.push_back(draws.below(vocabulary - 2));
  const Index at = draws.below(len - 2);
  sequence.inputs[std::size_t(at)] = special;
  sequence.inputs.push_back(special);
  sequence.answers.push_back({len, sequence.inputs[std::size_t(at + 1)], len - at - 1, at + 1, 1});
  return sequence;
}

}  // namespace tasks
