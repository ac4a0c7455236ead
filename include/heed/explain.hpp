// SPDX-License-Identifier: Apache-2.0
#pragma once

// Brings explain(), which says what a call will do: its tiles, workers, scratch and flops.

#include <heed/engine/explain.hpp>
