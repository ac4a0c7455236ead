// SPDX-License-Identifier: Apache-2.0
#pragma once

// Catch2, version 3 or 2.
#if __has_include(<catch2/catch_all.hpp>)
#include <catch2/catch_all.hpp>
using Catch::Approx;
#else
#include <catch2/catch.hpp>
#endif
