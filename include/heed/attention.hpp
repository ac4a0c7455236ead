// SPDX-License-Identifier: Apache-2.0
#pragma once

// Brings forward() and backward(), the masks, and every variant. Other doors stand beside it: decode.hpp, packed.hpp,
// partial.hpp, explain.hpp and curvature.hpp.

#include <heed/engine/door.hpp>
#include <heed/engine/doors.hpp>
#include <heed/variants.hpp>
