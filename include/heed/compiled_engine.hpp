// SPDX-License-Identifier: Apache-2.0
#pragma once

// forward() and backward() of any op (engine/doors.hpp) without the part of their code that does not depend on the op, for
// programs that link heed::compiled and compile ops of their own: products, masks, plans and checks are two fifths of an
// op's code, and are compiled once, in the library.
//
// The source file that defines these functions is made from this header (cmake/compiled.cmake), so
// each promise starts with `extern template`.

#include <heed/engine/doors.hpp>
#include <heed/engine/packed.hpp>
#include <heed/mpi/any_communicator.hpp>
#include <heed/mpi/rank_call.hpp>

namespace heed {
inline namespace HEED_ABI {

extern template struct Mask<float>;
extern template class BoundMask<float>;
extern template class TileMask<float>;
extern template class TileOfRows<float>;
extern template class WidenedTensors<float>;
extern template Plan make_plan(const Geometry&, const BoundMask<float>&, const Options&, Index,
                               Index, bool);
extern template Mask<float> detail::fold_heads(const Mask<float>&, const BoundMask<float>&,
                                               const Geometry&);
extern template void detail::check_gradients(const Gradients<float>&, const Inputs<float>&,
                                             const Mask<float>&, const StoredView<const float>&,
                                             const OutputGradients<float>&, const std::string&);
extern template void detail::set_zero(std::initializer_list<TensorView<float>>, int);
extern template class detail::PackedCalls<float>;
extern template class mpi::detail::RankSide<float>;
extern template class mpi::detail::GatherSide<float, mpi::AnyCommunicator>;

extern template void pack_lanes(const float*, Index, Index, Index, float*, Index, float);
extern template void unpack_lanes(const float*, Index, Index, Index, float*, Index);
extern template void add_unpacked_lanes(const float*, Index, Index, Index, float*, Index);
extern template bool all_finite(const Rows<float>&);
extern template Rows<float> finite_copy(const Rows<float>&, float*, Index);

extern template void detail::panel_product(Store, Index, Index, int,
                                           const SegmentedBroadcast<float>&, const float*, Index,
                                           float*, Index, float*, const float*);
extern template void detail::add_product(Index, Index, Index, const SegmentedBroadcast<float>&,
                                         const float*, Index, float*, Index);
extern template void row_dots(const StoredRows<float>&, Index, Index, const DotQuery<float>*,
                              Index);
extern template void row_mix(const StoredRows<float>&, Index, Index, const MixQuery<float>*, Index,
                             Index, Index);
extern template void row_dots(const StoredRows<bfloat16>&, Index, Index, const DotQuery<float>*,
                              Index);
extern template void row_mix(const StoredRows<bfloat16>&, Index, Index, const MixQuery<float>*,
                             Index, Index, Index);
extern template void row_dots(const StoredRows<half>&, Index, Index, const DotQuery<float>*, Index);
extern template void row_mix(const StoredRows<half>&, Index, Index, const MixQuery<float>*, Index,
                             Index, Index);
extern template void row_dots(const ScaledRows&, Index, Index, const DotQuery<float>*, Index);
extern template void row_mix(const ScaledRows&, Index, Index, const MixQuery<float>*, Index, Index,
                             Index);
extern template void narrow_dots(const float*, Index, Index, Index, const float*, Index, float*,
                                 Index, float*);
extern template void narrow_mix(const float*, Index, Index, Index, const float*, Index, float*,
                                Index);
extern template void add_lane_product(const Rows<float>&, const LaneTile<float>&, int, Index,
                                      const LaneTile<float>&);
extern template void add_lane_product_guarded(const Rows<float>&, const LaneTile<float>&,
                                              const LaneTile<float>&, int, Index,
                                              const LaneTile<float>&, float*);
extern template void add_row_product(const LaneTile<float>&, const Rows<float>&, float*, Index);
extern template void add_row_product_guarded(const LaneTile<float>&, const LaneTile<float>&,
                                             const Rows<float>&, const Rows<float>&, float*, Index);

extern template struct Mask<double>;
extern template class BoundMask<double>;
extern template class TileMask<double>;
extern template class TileOfRows<double>;
extern template class WidenedTensors<double>;
extern template Plan make_plan(const Geometry&, const BoundMask<double>&, const Options&, Index,
                               Index, bool);
extern template Mask<double> detail::fold_heads(const Mask<double>&, const BoundMask<double>&,
                                                const Geometry&);
extern template void detail::check_gradients(const Gradients<double>&, const Inputs<double>&,
                                             const Mask<double>&, const StoredView<const double>&,
                                             const OutputGradients<double>&, const std::string&);
extern template void detail::set_zero(std::initializer_list<TensorView<double>>, int);
extern template class detail::PackedCalls<double>;
extern template class mpi::detail::RankSide<double>;
extern template class mpi::detail::GatherSide<double, mpi::AnyCommunicator>;

extern template void pack_lanes(const double*, Index, Index, Index, double*, Index, double);
extern template void unpack_lanes(const double*, Index, Index, Index, double*, Index);
extern template void add_unpacked_lanes(const double*, Index, Index, Index, double*, Index);
extern template bool all_finite(const Rows<double>&);
extern template Rows<double> finite_copy(const Rows<double>&, double*, Index);

extern template void detail::panel_product(Store, Index, Index, int,
                                           const SegmentedBroadcast<double>&, const double*, Index,
                                           double*, Index, double*, const double*);
extern template void detail::add_product(Index, Index, Index, const SegmentedBroadcast<double>&,
                                         const double*, Index, double*, Index);
extern template void row_dots(const StoredRows<double>&, Index, Index, const DotQuery<double>*,
                              Index);
extern template void row_mix(const StoredRows<double>&, Index, Index, const MixQuery<double>*,
                             Index, Index, Index);
extern template void row_dots(const StoredRows<bfloat16>&, Index, Index, const DotQuery<double>*,
                              Index);
extern template void row_mix(const StoredRows<bfloat16>&, Index, Index, const MixQuery<double>*,
                             Index, Index, Index);
extern template void row_dots(const StoredRows<half>&, Index, Index, const DotQuery<double>*,
                              Index);
extern template void row_mix(const StoredRows<half>&, Index, Index, const MixQuery<double>*, Index,
                             Index, Index);
extern template void row_dots(const ScaledRows&, Index, Index, const DotQuery<double>*, Index);
extern template void row_mix(const ScaledRows&, Index, Index, const MixQuery<double>*, Index, Index,
                             Index);
extern template void narrow_dots(const double*, Index, Index, Index, const double*, Index, double*,
                                 Index, double*);
extern template void narrow_mix(const double*, Index, Index, Index, const double*, Index, double*,
                                Index);
extern template void add_lane_product(const Rows<double>&, const LaneTile<double>&, int, Index,
                                      const LaneTile<double>&);
extern template void add_lane_product_guarded(const Rows<double>&, const LaneTile<double>&,
                                              const LaneTile<double>&, int, Index,
                                              const LaneTile<double>&, double*);
extern template void add_row_product(const LaneTile<double>&, const Rows<double>&, double*, Index);
extern template void add_row_product_guarded(const LaneTile<double>&, const LaneTile<double>&,
                                             const Rows<double>&, const Rows<double>&, double*,
                                             Index);

}  // namespace HEED_ABI
}  // namespace heed
