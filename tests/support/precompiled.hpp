// SPDX-License-Identifier: Apache-2.0
#pragma once

// What most tests include; tests/CMakeLists.txt compiles it once for all of them. Ops of a test's own share the code of
// the engine in heed::compiled.

#include "catch.hpp"

#include <heed/check/op_problem.hpp>
#include <heed/compiled.hpp>
#include <heed/compiled_engine.hpp>

#include <algorithm>
#include <array>
#include <cmath>
#include <functional>
#include <limits>
#include <memory>
#include <string>
#include <vector>
