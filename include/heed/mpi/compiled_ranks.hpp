// SPDX-License-Identifier: Apache-2.0
#pragma once

// Calls over several processes without the code that knows no op, for programs that link heed::engine (or heed::compiled);
// beside heed/compiled_engine.hpp.
//
// The source files that define these classes are made from this header (cmake/compiled.cmake), so each promise starts with
// `extern template`.

#include <heed/mpi/rank_call.hpp>
#include <heed/mpi/ring.hpp>

namespace heed {
inline namespace HEED_ABI {

extern template class mpi::detail::RankSide<float>;
extern template class mpi::detail::RankSide<double>;
extern template class mpi::detail::GatherCall<float>;
extern template class mpi::detail::GatherCall<double>;
extern template class mpi::detail::RingCall<float>;
extern template class mpi::detail::RingCall<double>;

}  // namespace HEED_ABI
}  // namespace heed
