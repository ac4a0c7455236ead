// SPDX-License-Identifier: Apache-2.0
#pragma once

// Includes everything that a caller needs: forward(), backward(), parts of rows and their merging,
// masks, the cache of decoding, and every variant.

#include <heed/engine/door.hpp>
#include <heed/engine/doors.hpp>
#include <heed/engine/explain.hpp>
#include <heed/engine/packed_doors.hpp>
#include <heed/engine/partial.hpp>
#include <heed/kv_cache.hpp>
#include <heed/kv_pool.hpp>
#include <heed/measure/resonance.hpp>
#include <heed/variants.hpp>
