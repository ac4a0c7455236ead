// SPDX-License-Identifier: Apache-2.0
#pragma once

// Brings jvp() and hvp(): tangents of a call's results along a direction, and how its gradients move along it.

#include <heed/engine/hvp.hpp>
#include <heed/engine/jvp.hpp>
