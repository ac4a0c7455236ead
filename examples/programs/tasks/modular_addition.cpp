// SPDX-License-Identifier: Apache-2.0
#include "modular_addition.hpp"

#include "draws.hpp"

#include <cmath>

namespace tasks {

Description<ModularAddition::Options> ModularAddition::describe() {
  using O = Options;
  return {"modular-addition",
          "Adds two numbers modulo a prime, after part of the table",
          "Power et al. 2022",
          "1 where the sum wraps round, else 0",
          {},
          {31, 0.7, 1},
          {{"modulus", &O::modulus, 2, 2048, "p"},
           {"share", &O::share, 0, 1, "share of the pairs that training sees"},
           {"split", &O::split, 0, 1e9, "seed of the split"}}};
}

ModularAddition::ModularAddition(const Options& options)
    : Task(checked_spec<ModularAddition>(options)), options_(options) {
  constexpr std::uint64_t kPairs = 220;
  const Index all = options.modulus * options.modulus;
  pairs_ = Draws(std::uint64_t(options.split), kPairs, 0).distinct(all, 0, all);
  training_ = Index(std::llround(options.share * double(all)));
  validation_ = (all - training_) / 2;
  heed::require(training_ >= 1 && validation_ >= 1, "--task modular-addition: share is ",
                options.share, " of ", all, " pairs, which leaves ", training_, " to train on and ",
                all - training_, " held out; it must be at least 1 and 2");
}

Sequence ModularAddition::sequence(const Place& place) const {
  const Index modulus = options_.modulus, tested = Index(pairs_.size()) - training_ - validation_;
  const auto in_order = [&](Index count) { return Index(place.index % std::uint64_t(count)); };
  const Index number = place.split == Split::training ? Draws(place).below(training_)
                       : place.split == Split::validation
                           ? training_ + in_order(validation_)
                           : training_ + validation_ + in_order(tested);
  const Index a = pairs_[std::size_t(number)] / modulus, b = pairs_[std::size_t(number)] % modulus;
  return {{a, modulus, b, modulus + 1}, {{3, (a + b) % modulus, a + b >= modulus ? 1 : 0, 0, 0}}};
}

}  // namespace tasks
