// SPDX-License-Identifier: Apache-2.0
#pragma once

// Brings forward() and backward() of PackedInputs: sequences of unequal lengths, one behind the other, without padding.

#include <heed/engine/packed_doors.hpp>
