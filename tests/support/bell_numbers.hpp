// SPDX-License-Identifier: Apache-2.0
#pragma once

// Numbers read by a score of squared distances that also has a table of distances: norms, a width, four entries.

#include <heed/plug/own_score.hpp>

#include <algorithm>
#include <cstdlib>
#include <tuple>
#include <vector>

namespace heed_test {

template <class T>
struct BellNumbers {
  using Features = heed::SquaredNorms;
  heed::Param<T> width = T(0.2);
  heed::Param<T> table = heed::Param<T>({1, 4}, {T(0.1), T(-0.3), T(0.2), T(0.4)});
  std::vector<heed::Index> shape(const heed::Geometry&) const { return {-1, 4}; }
  static constexpr auto parameters =
      std::tuple{heed::named("width", &BellNumbers::width),
                 heed::tensor("table", &BellNumbers::table, &BellNumbers::shape)};
  static constexpr auto positions = &BellNumbers::table;
  [[nodiscard]] heed::Index bucket(heed::Index distance) const {
    return std::min<heed::Index>(std::abs(distance), 3);
  }
};

}  // namespace heed_test
