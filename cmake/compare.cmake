# SPDX-License-Identifier: Apache-2.0
# Builds and runs the comparison of all variants, from any directory:
#   cmake -P cmake/compare.cmake [-- ARGUMENT...]      for the arguments: -- --help
# Standard output has the output of heed_compare, standard error everything else.
cmake_minimum_required(VERSION 3.22)
include("${CMAKE_CURRENT_LIST_DIR}/steps.cmake")

heed_forwarded_arguments(arguments)
set(parts -DHEED_BUILD_EXAMPLES=ON)
if(NOT EXISTS "${HEED_BUILD}/CMakeCache.txt")
  list(APPEND parts -DHEED_BUILD_TESTS=OFF -DHEED_BUILD_BENCH=OFF -DHEED_ZOO=OFF)
endif()
# The zoo takes longer to compile than everything else.
if("${arguments}" MATCHES "(^|[,;=])zoo")
  list(APPEND parts -DHEED_ZOO=ON)
endif()

heed_configure(${parts})
heed_build(result HEED_TO_STDERR --target heed_compare)
if(NOT result EQUAL 0)
  message(FATAL_ERROR "building heed_compare failed; the reason stands above")
endif()

# Runs in the caller's directory, so that relative paths keep their meaning.
execute_process(COMMAND ${HEED_TO_TERMINAL} "${HEED_BUILD}/bin/heed_compare" ${arguments} RESULT_VARIABLE result)
if(NOT result EQUAL 0)
  # Before CMake 3.29 a script cannot set the exit code, which is then 1; the reason is printed
  # above.
  if(CMAKE_VERSION VERSION_GREATER_EQUAL 3.29 AND result MATCHES "^[0-9]+$")
    cmake_language(EXIT ${result})
  endif()
  message(FATAL_ERROR "heed_compare ended with: ${result}")
endif()
