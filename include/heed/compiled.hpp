// SPDX-License-Identifier: Apache-2.0
#pragma once

// forward() and backward() of heed's own variants without their code, for programs that link heed::compiled:
// including this costs a compiler no more than the variants' headers do. Ops of your own keep working beside
// it with <heed/attention.hpp>.
//
// Cost  a file that calls two variants, forward and backward: see `cmake --build build -t compile_cost`.

#include <heed/engine/door.hpp>
#include <heed/variants.hpp>

namespace heed {
inline namespace HEED_ABI {

// Each line becomes a source file of heed::compiled.
extern template struct detail::Door<ScaledDot<float>>;
extern template struct detail::Door<ScaledDot<double>>;
extern template struct detail::Door<Dar<float>>;
extern template struct detail::Door<Dar<double>>;
extern template struct detail::Door<Differential<float>>;
extern template struct detail::Door<Differential<double>>;
extern template struct detail::Door<DifferentialV1<float>>;
extern template struct detail::Door<DifferentialV1<double>>;
extern template struct detail::Door<DifferentialV2<float>>;
extern template struct detail::Door<DifferentialV2<double>>;
extern template struct detail::Door<IntentGated<float>>;
extern template struct detail::Door<IntentGated<double>>;
extern template struct detail::Door<IntentFromQ<float>>;
extern template struct detail::Door<IntentFromQ<double>>;
extern template struct detail::Door<IntentCalc<float>>;
extern template struct detail::Door<IntentCalc<double>>;
extern template struct detail::Door<ResonantOde<float>>;
extern template struct detail::Door<ResonantOde<double>>;
extern template struct detail::Door<Dialectical<float>>;
extern template struct detail::Door<Dialectical<double>>;
extern template struct detail::Door<Prototype<float>>;
extern template struct detail::Door<Prototype<double>>;

}  // namespace HEED_ABI
}  // namespace heed
