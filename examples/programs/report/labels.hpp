// SPDX-License-Identifier: Apache-2.0
#pragma once

// Places names beside the ends of lines: as near to them as possible without covering each other.

#include <string>
#include <vector>

namespace heed_report {

// Places of labels at one side of a plot, for the places that they wish for: each at least `gap` from the others, all
// within [top, bottom], in the order of the wishes (equal wishes in the order of the labels), and the sum of the squared
// distances from the wishes as small as it can be. (count - 1) gap must not exceed bottom - top.
[[nodiscard]] std::vector<double> spread_out(const std::vector<double>& wishes, double gap,
                                             double top, double bottom);

// The text, cut with an ellipsis if it is wider than `width`.
[[nodiscard]] std::string fitted(const std::string& text, double width);

}  // namespace heed_report
