# SPDX-License-Identifier: Apache-2.0
# Compiles ../main.cpp into PROGRAM with nothing but the include path and a strict project's warnings, and runs it.
include("${CMAKE_CURRENT_LIST_DIR}/../warnings.cmake")
execute_process(COMMAND "${CXX}" -std=c++20 -O3 ${warnings} -Werror "-I${INCLUDE}" "${CMAKE_CURRENT_LIST_DIR}/../main.cpp" -o
                        "${PROGRAM}" COMMAND_ERROR_IS_FATAL ANY)
execute_process(COMMAND "${PROGRAM}" COMMAND_ERROR_IS_FATAL ANY)
