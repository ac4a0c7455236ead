// SPDX-License-Identifier: Apache-2.0
#pragma once

// Brings KvCache, keys and values of growing sequences, and KvPool, those of many that come and go.

#include <heed/kv_cache.hpp>
#include <heed/kv_pool.hpp>
