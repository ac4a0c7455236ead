// SPDX-License-Identifier: Apache-2.0
#pragma once

// Attention of one query in plain loops over doubles, without any of heed's code: each variant of
// the zoo is written with it a second time. tests/zoo/zoo_test.cpp makes the rows and compares.

#include <algorithm>
#include <cmath>
#include <cstddef>
#include <vector>

namespace zoo {

using Numbers = std::vector<double>;

// A query of one head and the keys that it sees, in their order.
struct PlainRow {
  std::ptrdiff_t head = 0, position = 0;  // head and position of the query
  double scale = 0;                       // 1 / sqrt(width of a query)
  Numbers query;
  std::vector<Numbers> keys, values;
  std::vector<std::ptrdiff_t> positions;  // positions of the keys
  std::ptrdiff_t all_keys = 0;            // visible or not
  Numbers own_value;                      // at the query's position; empty where there is none
  Numbers extra;                          // the op's extra input; empty without one
  Numbers query_inputs;             // numbers of the query's token; empty where the op reads none
  std::vector<Numbers> key_inputs;  // for all tokens of the keys, visible or not
  const PlainRow* heads = nullptr;  // the same query position in all heads, from head 0 on

  // The row with only those keys whose position is `visible`.
  template <class Visible>
  [[nodiscard]] PlainRow seeing(Visible&& visible) const {
    PlainRow row = *this;
    row.keys.clear();
    row.values.clear();
    row.positions.clear();
    for (std::size_t j = 0; j < keys.size(); ++j) {
      if (!visible(positions[j])) continue;
      row.keys.push_back(keys[j]);
      row.values.push_back(values[j]);
      row.positions.push_back(positions[j]);
    }
    return row;
  }

  // The row with the keys of only `count` blocks of `block` positions, those with the largest scores; scores are of the blocks
  // that the row has, in their order, and the first wins among equal ones.
  [[nodiscard]] PlainRow largest(std::size_t count, std::ptrdiff_t block,
                                 const Numbers& scores) const {
    std::vector<std::ptrdiff_t> blocks;
    for (const std::ptrdiff_t j : positions)
      if (blocks.empty() || blocks.back() != j / block) blocks.push_back(j / block);
    return seeing([&](std::ptrdiff_t j) {
      const auto own =
          std::size_t(std::find(blocks.begin(), blocks.end(), j / block) - blocks.begin());
      std::size_t above = 0;
      for (std::size_t other = 0; other < scores.size(); ++other)
        above += scores[other] > scores[own] || (scores[other] == scores[own] && other < own);
      return above < count;
    });
  }
};

[[nodiscard]] inline double dot(const Numbers& a, const Numbers& b) {
  double sum = 0;
  for (std::size_t c = 0; c < a.size(); ++c) sum += a[c] * b[c];
  return sum;
}
[[nodiscard]] inline double sum_of(const Numbers& x) {
  double sum = 0;
  for (const double number : x) sum += number;
  return sum;
}

// scale q . k of each key
[[nodiscard]] inline Numbers logits(const PlainRow& row) {
  Numbers scores;
  for (const Numbers& key : row.keys) scores.push_back(row.scale * dot(row.query, key));
  return scores;
}
// score(j) of each key
template <class Score>
[[nodiscard]] Numbers scores_by(const PlainRow& row, Score&& score) {
  Numbers scores;
  for (std::size_t j = 0; j < row.keys.size(); ++j) scores.push_back(score(j));
  return scores;
}

[[nodiscard]] inline Numbers softmax(Numbers scores) {
  if (scores.empty()) return scores;
  const double top = *std::max_element(scores.begin(), scores.end());
  for (double& s : scores) s = std::exp(s - top);
  const double sum = sum_of(scores);
  for (double& s : scores) s /= sum;
  return scores;
}

// sum_j weight_j value_j
[[nodiscard]] inline Numbers mixed(const PlainRow& row, const Numbers& weights) {
  Numbers out(row.own_value.size());
  for (std::size_t j = 0; j < weights.size(); ++j)
    for (std::size_t c = 0; c < out.size(); ++c) out[c] += weights[j] * row.values[j][c];
  return out;
}

}  // namespace zoo
