// SPDX-License-Identifier: Apache-2.0
#pragma once

// Calls whose queries choose the keys that they read: a choice is a constant for derivatives, and joins the mask of its call.
//
//   layer.stage.choose = [](const auto& in, const auto& mask, const auto& options) {
//     return heed::block_lists<float>(heed::select_keys(in, mask, 64, options));     // measure/select.hpp
//   };

#include <heed/engine/call.hpp>

#include <functional>

namespace heed {
inline namespace HEED_ABI {

// The mask of the keys that the queries of a call choose, by what it reads and among those that its mask shows.
template <class Real>
using KeyChoice = std::function<Mask<Real>(const Inputs<Real>&, const Mask<Real>&, const Options&)>;

// The mask, and the keys chosen under it; the mask alone where nothing is chosen.
template <class Real>
[[nodiscard]] Mask<Real> with_chosen(const KeyChoice<Real>& choose, const Inputs<Real>& in,
                                     const Mask<Real>& mask, const Options& options) {
  return choose ? mask & choose(in, mask, options) : mask;
}

}  // namespace HEED_ABI
}  // namespace heed
