// SPDX-License-Identifier: Apache-2.0
#pragma once
#include <heed/core/scalar.hpp>
