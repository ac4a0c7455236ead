// SPDX-License-Identifier: Apache-2.0
#pragma once

// Options and results of the ART memory; symbols as in art_memory.hpp.

#include <heed/core/error.hpp>

#include <cmath>
#include <limits>

namespace heed {
inline namespace HEED_ABI {

enum class ArtMatching { cosine, fuzzy };

enum class ArtOutcome { resonance = 0, created = 1, full = 2 };

// Capacity, dim, vigilance and learning rate have no default: left out, construction throws.
template <class Real>
struct ArtOptions {
  Index capacity = 0;  // >= 1
  Index dim = 0;       // >= 1; after complement coding
  ArtMatching matching = ArtMatching::cosine;
  Real vigilance = std::numeric_limits<Real>::quiet_NaN();      // cosine [-1,1], fuzzy [0,1]
  Real learning_rate = std::numeric_limits<Real>::quiet_NaN();  // eta in [0,1]
  Real choice_alpha = Real(1e-3);                               // > 0, fuzzy only
  Real eps = Real(1e-8);                                        // > 0, cosine only
  bool operator==(const ArtOptions&) const = default;
};

// The event of one learned row.
template <class Real>
struct ArtEvent {
  Index index = -1;  // the prototype that resonated or was created; -1: memory full
  ArtOutcome outcome = ArtOutcome::full;
  Real match = 0;      // match of the resonating or else the first prototype; 0: empty memory
  Index searched = 0;  // tested against the vigilance; 1: the first choice resonated
  bool operator==(const ArtEvent&) const = default;
};

// The end of a search that learns nothing.
template <class Real>
struct ArtFound {
  Index index = -1;    // the prototype that resonates; -1: none
  Real match = 0;      // as in ArtEvent
  Index searched = 0;  // as in ArtEvent
  bool operator==(const ArtFound&) const = default;
};

// The first candidate of a search, whatever the vigilance.
template <class Real>
struct ArtWinner {
  Index index = -1;  // -1: empty memory
  Real choice = 0;   // cosine, or fuzzy choice
  Real match = 0;    // compared with the vigilance; equals choice under cosine
  bool operator==(const ArtWinner&) const = default;
};

// Numbers of rows of a view that ended in each outcome.
struct ArtTally {
  Index resonance = 0, created = 0, full = 0;
  bool operator==(const ArtTally&) const = default;
};

namespace detail {

// Returns its argument; throws std::invalid_argument for a field out of range.
template <class Real>
[[nodiscard]] const ArtOptions<Real>& checked_art_options(const ArtOptions<Real>& o) {
  const bool fuzzy = o.matching == ArtMatching::fuzzy;
  require(fuzzy || o.matching == ArtMatching::cosine, "ArtMemory: matching ", int(o.matching),
          " is neither cosine nor fuzzy");
  require(o.capacity >= 1, "ArtMemory: capacity ", o.capacity, "; it must be at least 1");
  require(o.dim >= 1 && o.dim <= std::numeric_limits<Index>::max() - 2, "ArtMemory: dim ", o.dim,
          "; it must be at least 1 and fit an index");
  require(o.vigilance >= Real(fuzzy ? 0 : -1) && o.vigilance <= 1, "ArtMemory: vigilance ",
          o.vigilance, "; it must lie in ", fuzzy ? "[0, 1] (fuzzy)" : "[-1, 1] (cosine)");
  require(o.learning_rate >= 0 && o.learning_rate <= 1, "ArtMemory: learning_rate ",
          o.learning_rate, "; it must lie in [0, 1]");
  require(o.choice_alpha > 0 && std::isfinite(o.choice_alpha), "ArtMemory: choice_alpha ",
          o.choice_alpha, "; it must be positive and finite");
  require(o.eps > 0 && std::isfinite(o.eps), "ArtMemory: eps ", o.eps,
          "; it must be positive and finite");
  return o;
}

}  // namespace detail

}  // namespace HEED_ABI
}  // namespace heed
