// SPDX-License-Identifier: Apache-2.0
#pragma once

// Everything that a caller needs: forward(), backward(), masks, the cache of decoding, and every variant.

#include <heed/engine/backward_call.hpp>
#include <heed/engine/explain.hpp>
#include <heed/engine/forward.hpp>
#include <heed/engine/kv_cache.hpp>
#include <heed/ops/resonance.hpp>
#include <heed/variants.hpp>
