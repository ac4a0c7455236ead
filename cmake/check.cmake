# SPDX-License-Identifier: Apache-2.0
# Builds everything and runs all tests, from any directory; the last line says `N passed, N failed`:
#   cmake -P cmake/check.cmake [-- CMAKE_ARGUMENT...]      e.g. -- -DHEED_SANITIZE=address,undefined
# For another machine, with -DCMAKE_TOOLCHAIN_FILE=cmake/aarch64.cmake, it builds the library's own tests in build/aarch64/,
# and runs those that need no program, Python, libtorch or MPI.
cmake_minimum_required(VERSION 3.22)
include("${CMAKE_CURRENT_LIST_DIR}/steps.cmake")

heed_forwarded_arguments(arguments)
set(programs ON)
set(chosen "")
if("${arguments}" MATCHES "CMAKE_TOOLCHAIN_FILE(:[A-Z]+)?=([^;]+)")
  cmake_path(GET CMAKE_MATCH_2 STEM machine)
  string(APPEND HEED_BUILD "/${machine}")
  set(programs OFF)
  set(chosen -L portable)
endif()
heed_configure(-DHEED_BUILD_TESTS=ON -DHEED_BUILD_BENCH=${programs} -DHEED_BUILD_EXAMPLES=${programs} ${arguments})

# A program that does not compile must not hide others: everything else is built, and its tests
# count as failed.
set(keep_going -k)
if(EXISTS "${HEED_BUILD}/build.ninja")
  set(keep_going -k 0)
endif()
heed_build(build_result HEED_TO_TERMINAL -- ${keep_going})

execute_process(
  COMMAND "${CMAKE_CTEST_COMMAND}" --test-dir "${HEED_BUILD}" --output-on-failure --no-tests=error
          --parallel ${HEED_JOBS} ${chosen}
  RESULT_VARIABLE test_result OUTPUT_VARIABLE output ECHO_OUTPUT_VARIABLE)

# ctest counts a skipped test as passed.
set(failed 0)
set(total 0)
if(output MATCHES "tests passed, ([0-9]+) tests failed out of ([0-9]+)")
  set(failed ${CMAKE_MATCH_1})
  set(total ${CMAKE_MATCH_2})
endif()
string(REGEX MATCHALL "\\(Skipped\\)" skipped "${output}")
list(LENGTH skipped skipped)
math(EXPR passed "${total} - ${failed} - ${skipped}")

# SEND_ERROR sets the exit code and still prints the summary last.
if(NOT build_result EQUAL 0)
  message(SEND_ERROR "the build failed; the reason stands above the tests")
elseif(passed EQUAL 0)
  message(SEND_ERROR "no test passed")
elseif(NOT test_result EQUAL 0 OR failed GREATER 0)
  message(SEND_ERROR "tests failed")
endif()
execute_process(COMMAND "${CMAKE_COMMAND}" -E echo "${passed} passed, ${failed} failed")
