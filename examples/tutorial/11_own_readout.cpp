// SPDX-License-Identifier: Apache-2.0

// Step 11 of 15. You learn to write a readout, which turns the mixed values of a row into its output. This one has a learnt
// factor for each column of the value, the same for all heads:
//
//   out_c = factor_c mixed_c
//
// A formula of the row is enough: heed derives both passes from it (heed/plug/readout_formula.hpp). A readout that no formula
// says, such as one with a learnt matrix, is written by hand (heed/plug/readout.hpp, heed/plug/linear_map.hpp).

#include <heed/check/op_check.hpp>
#include <heed/plug/readout_formula.hpp>

#include <cstdio>

template <class T>
struct ColumnFactors : heed::FormulaReadout {
  heed::Param<T> factor;
  std::vector<heed::Index> factor_shape(const heed::Geometry& g) const { return {1, g.dim_v}; }
  static constexpr auto parameters =
      std::tuple{heed::tensor("factor", &ColumnFactors::factor, &ColumnFactors::factor_shape)};

  auto forward(const auto& row) const { return row.learnt_row(factor) * row.mixed(); }
};

int main() {
  heed::Attention<float, heed::DotScore<float>, heed::Softmax<float>, ColumnFactors<float>> op;
  op.readout.factor = heed::Param<float>({1, 6}, {1.0F, 0.5F, -2.0F, 0.0F, 3.0F, 1.5F});
  const heed::OpReport report = heed::check_op(op);
  std::puts(report.summary().c_str());
  return report.passed() ? 0 : 1;
}
