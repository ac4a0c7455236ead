// SPDX-License-Identifier: Apache-2.0
#pragma once

// forward() and backward() of any op without the code of the engine, which knows no op, for programs that link heed::engine (or
// heed::compiled): a file compiles the formulas of its own ops alone. compiled.hpp brings it.
//
// The source files that define these functions are made from this header (cmake/compiled.cmake), so each promise starts with
// `extern template`. mpi/compiled_ranks.hpp has those of calls over several processes.

#include <heed/engine/op_door.hpp>
#include <heed/mask/bound_mask.hpp>
#include <heed/simd/precision.hpp>
#include <heed/simd/storage.hpp>

namespace heed {
inline namespace HEED_ABI {

extern template struct detail::Driver<float>;
extern template struct detail::Driver<double>;
extern template struct Mask<float>;
extern template struct Mask<double>;
extern template class BoundMask<float>;
extern template class BoundMask<double>;
extern template void detail::panel_product<float>(Store, Index, Index, int,
                                                  const SegmentedBroadcast<float>&, const float*,
                                                  Index, float*, Index, float*, const float*);
extern template void detail::panel_product<double>(Store, Index, Index, int,
                                                   const SegmentedBroadcast<double>&, const double*,
                                                   Index, double*, Index, double*, const double*);
extern template void detail::panel_product<BfloatPair>(Store, Index, Index, int,
                                                       const SegmentedBroadcast<BfloatPair>&,
                                                       const BfloatPair*, Index, float*, Index,
                                                       float*, const float*);
extern template struct detail::StorageOf<float, StoredRows<float>>;
extern template struct detail::StorageOf<double, StoredRows<double>>;
extern template struct detail::StorageOf<float, StoredRows<bfloat16>>;
extern template struct detail::StorageOf<double, StoredRows<bfloat16>>;
extern template struct detail::StorageOf<float, StoredRows<half>>;
extern template struct detail::StorageOf<double, StoredRows<half>>;
extern template struct detail::StorageOf<float, ScaledRows>;
extern template struct detail::StorageOf<double, ScaledRows>;

}  // namespace HEED_ABI
}  // namespace heed
