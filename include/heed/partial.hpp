// SPDX-License-Identifier: Apache-2.0
#pragma once

// Brings forward_partial() and merge(): answers to parts of the keys, and the answer to all of them.

#include <heed/engine/partial.hpp>
