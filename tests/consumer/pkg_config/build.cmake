# SPDX-License-Identifier: Apache-2.0
# Compiles ../main.cpp into PROGRAM with the flags that PKG_CONFIG gives for heed in PC_DIR, and
# runs it.
set(ENV{PKG_CONFIG_PATH} "${PC_DIR}")
foreach(kind cflags libs)
  execute_process(COMMAND "${PKG_CONFIG}" --${kind} heed OUTPUT_VARIABLE ${kind}
                  OUTPUT_STRIP_TRAILING_WHITESPACE COMMAND_ERROR_IS_FATAL ANY)
  separate_arguments(${kind} UNIX_COMMAND "${${kind}}")
endforeach()
execute_process(COMMAND "${CXX}" -std=gnu++20 ${cflags} "${CMAKE_CURRENT_LIST_DIR}/../main.cpp"
                        -o "${PROGRAM}" ${libs} COMMAND_ERROR_IS_FATAL ANY)
execute_process(COMMAND "${PROGRAM}" COMMAND_ERROR_IS_FATAL ANY)
