// SPDX-License-Identifier: Apache-2.0
#pragma once

// forward() and backward() of any op without the code of the engine, which knows no op, for programs that link heed::engine (or
// heed::compiled): a file compiles the formulas of its own ops alone.
//
// The source file that defines these functions is made from this header (cmake/compiled.cmake), so
// each promise starts with `extern template`.

#include <heed/engine/op_door.hpp>
#include <heed/engine/packed.hpp>
#include <heed/mpi/any_communicator.hpp>
#include <heed/mpi/rank_call.hpp>

namespace heed {
inline namespace HEED_ABI {

extern template struct detail::Driver<float>;
extern template struct detail::Driver<double>;
extern template struct Mask<float>;
extern template struct Mask<double>;
extern template class BoundMask<float>;
extern template class BoundMask<double>;
extern template class detail::PackedCalls<float>;
extern template class detail::PackedCalls<double>;
extern template class mpi::detail::RankSide<float>;
extern template class mpi::detail::RankSide<double>;
extern template class mpi::detail::GatherSide<float, mpi::AnyCommunicator>;
extern template class mpi::detail::GatherSide<double, mpi::AnyCommunicator>;

}  // namespace HEED_ABI
}  // namespace heed
