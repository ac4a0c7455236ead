// SPDX-License-Identifier: Apache-2.0
#pragma once

// Arguments and results of measure_weights() (measure/weights.hpp).

#include <heed/mask/mask.hpp>

#include <span>
#include <vector>

namespace heed {
inline namespace HEED_ABI {

// A key, counted from 0, and the weight that a query gives it. A key of -1 is none.
struct WeightLink {
  Index key = -1;
  double weight = 0;
};

// Keys whose weights are added up: `ranges` has one list of ranges [begin, end) for all queries, or one for each sequence
// (batch), or one for each query (batch * len_q, the queries of a sequence side by side), which all heads share. A key
// that stands in several ranges of a list counts once.
struct KeySet {
  std::vector<std::vector<KeyRange>> ranges;
};

// The measures asked for.
struct WeightRequest {
  Index links = 1;  // number of largest weights of a row that are kept, at least 1
  std::vector<KeySet> sets = {};
};

// A row is query i of head h in sequence b and stands at row(b, h, i).
struct WeightMeasures {
  Index batch = 0, heads = 0, len_q = 0;
  Index links_per_row = 0;  // the number asked for, but at most the number of keys, and at least 1
  std::vector<double> entropy;    // [row], of |w| / sum |w|, in nats
  std::vector<double> total;      // [row], sum of w: 1 for a softmax
  std::vector<double> size;       // [row], sum of |w|
  std::vector<double> distance;   // [row], mean of |p - j|, weighted by |w|; in tokens
  std::vector<WeightLink> links;  // [row][links_per_row], the largest |w| first
  std::vector<std::vector<double>> mass, share;  // [set][row]: sum of w; sum of |w| over size

  [[nodiscard]] Index rows() const { return batch * heads * len_q; }
  [[nodiscard]] Index row(Index b, Index h, Index i) const { return (b * heads + h) * len_q + i; }
  [[nodiscard]] std::span<const WeightLink> links_of(Index row) const {
    return {links.data() + row * links_per_row, std::size_t(links_per_row)};
  }
  // The mean of one of these numbers over the rows of a head that have a weight other than 0; NaN without such a row.
  [[nodiscard]] double mean(const std::vector<double>& numbers, Index head) const {
    double sum = 0, count = 0;
    for (Index b = 0; b < batch; ++b)
      for (Index i = 0; i < len_q; ++i) {
        const auto at = std::size_t(row(b, head, i));
        if (size[at] == 0) continue;
        sum += numbers[at];
        ++count;
      }
    return sum / count;
  }
};

}  // namespace HEED_ABI
}  // namespace heed
