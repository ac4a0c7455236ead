// SPDX-License-Identifier: Apache-2.0

// Step 11 of 15. You learn to write a readout, which turns the mixed values of a row into its output. This one has a learnt
// factor for each column of the value:
//
//   out_c = factor_c mixed_c      dmixed_c = factor_c g_c      dfactor_c = sum over rows g_c mixed_c
//
// Rows of a panel's tile are columns and its lanes are queries (heed/plug/readout.hpp). Gradients of the mixed rows go on
// to the weights through delta = rowsum(dmixed o mixed).

#include <heed/check/op_check.hpp>

#include <cstdio>

template <class T>
struct ColumnFactors : heed::PlainReadout {
  static constexpr bool saves_mixed = true;  // panel.saved then holds the mixed rows
  heed::Param<T> factor;

  std::vector<heed::Index> factor_shape(const heed::Geometry& g) const { return {g.dim_v}; }
  static constexpr auto parameters =
      std::tuple{heed::tensor("factor", &ColumnFactors::factor, &ColumnFactors::factor_shape)};

  void forward(const heed::ReadoutPanel<T>& panel) const {
    for (heed::Index c = 0; c < panel.tile.rows; ++c)
      for (int v = 0; v < panel.vectors; ++v)
        panel.tile.store(c, v, panel.tile.load(c, v) * factor[c]);
  }
  void vjp(const heed::ReadoutPanel<T>& panel, ColumnFactors& grad) const {
    for (heed::Index c = 0; c < panel.tile.rows; ++c)
      for (int v = 0; v < panel.vectors; ++v) {
        const heed::Pack<T> g = panel.tile.load(c, v), mixed = panel.saved.load(c, v);
        grad.factor[c] += T(heed::sum_valid_lanes(g * mixed, v, panel.valid_lanes));
        panel.tile.store(c, v, g * factor[c]);
      }
    heed::lane_dot<T>(panel.tile, panel.saved, panel.vectors, panel.delta);
  }
  template <class S>
  void reference(heed::ReadoutContext<S>& all) const {  // the same in plain loops, over all rows
    for (std::size_t n = 0; n < all.out.size(); ++n)
      all.out[n] = all.out[n] * factor[heed::Index(n) % all.geometry.dim_v];
  }
};

int main() {
  heed::Attention<float, heed::DotScore<float>, heed::Softmax<float>, ColumnFactors<float>> op;
  op.readout.factor = heed::Param<float>({6}, {1.0F, 0.5F, -2.0F, 0.0F, 3.0F, 1.5F});
  const heed::OpReport report = heed::check_op(op);
  std::puts(report.summary().c_str());
  return report.passed() ? 0 : 1;
}
