// SPDX-License-Identifier: Apache-2.0
#pragma once

// The places of a layer's rows: the sequence of each row, and its position there.

#include <heed/core/error.hpp>
#include <heed/nn/context.hpp>

#include <algorithm>
#include <vector>

namespace heed {
inline namespace HEED_ABI {
namespace nn {

// Rows are sequences of `len` tokens one below the other, or packed sequences of the lengths in Context::packed. Where
// sequences are spread over ranks (Context::spread), rows are the tokens of this rank, `len` of each sequence.
class TokenPlaces {
 public:
  template <class Real>
  TokenPlaces(const Context<Real>& c, Index rows, Index len) : longest_(len) {
    if (c.spread != nullptr) {
      require(c.spread->held() == len, "Context::spread has ", c.spread->held(),
              " tokens of a sequence on this rank, there are ", len);
      longest_ = c.spread->len();
      for (Index r = 0; r < rows; ++r)
        places_.push_back({r / len, c.spread->tokens[std::size_t(r % len)]});
    }
    if (c.packed == nullptr) return;
    const std::vector<Index>& at = *c.packed;
    require(!at.empty() && at[0] == 0 && std::is_sorted(at.begin(), at.end()),
            "Context::packed has ", at.size(), " numbers",
            at.empty() ? "" : "; they must rise from 0 on");
    require(at.back() == rows, "Context::packed ends with ", at.back(), ", there are ", rows,
            " rows");
    longest_ = 0;
    for (std::size_t n = 0; n + 1 < at.size(); ++n) {
      longest_ = std::max(longest_, at[n + 1] - at[n]);
      for (Index r = at[n]; r < at[n + 1]; ++r) places_.push_back({Index(n), r - at[n]});
    }
  }

  // Number of tokens of the longest sequence.
  [[nodiscard]] Index longest() const { return longest_; }
  [[nodiscard]] Index sequence(Index row) const {
    return places_.empty() ? row / longest_ : places_[std::size_t(row)].sequence;
  }
  [[nodiscard]] Index position(Index row) const {
    return places_.empty() ? row % longest_ : places_[std::size_t(row)].position;
  }

 private:
  struct Place {
    Index sequence, position;
  };
  Index longest_;
  std::vector<Place> places_;  // for packed and for spread rows
};

}  // namespace nn
}  // namespace HEED_ABI
}  // namespace heed
