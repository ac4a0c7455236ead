// SPDX-License-Identifier: Apache-2.0
#pragma once

// Headers that most tests include; tests/CMakeLists.txt compiles them once for all tests. Own ops
// of a test use the engine's code in heed::compiled.

#include "catch.hpp"

#include <heed/check/op_problem.hpp>
#include <heed/compiled.hpp>
#include <heed/mpi/compiled_ranks.hpp>

#include <algorithm>
#include <array>
#include <cmath>
#include <functional>
#include <limits>
#include <memory>
#include <string>
#include <vector>
