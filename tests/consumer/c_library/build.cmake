# SPDX-License-Identifier: Apache-2.0
# Compiles main.c into PROGRAM by CC with what PKG_CONFIG says about libheed in LIBRARY_DIR, and runs it.
set(ENV{PKG_CONFIG_PATH} "${LIBRARY_DIR}/pkgconfig")
foreach(kind cflags libs)
  execute_process(COMMAND "${PKG_CONFIG}" --${kind} libheed OUTPUT_VARIABLE ${kind}
                  OUTPUT_STRIP_TRAILING_WHITESPACE COMMAND_ERROR_IS_FATAL ANY)
  separate_arguments(${kind} UNIX_COMMAND "${${kind}}")
endforeach()
execute_process(COMMAND "${CC}" -std=c99 -Wall -Wextra -Wpedantic ${cflags} "${CMAKE_CURRENT_LIST_DIR}/main.c"
                        -o "${PROGRAM}" ${libs} "-Wl,-rpath,${LIBRARY_DIR}" COMMAND_ERROR_IS_FATAL ANY)
execute_process(COMMAND "${PROGRAM}" "${VERSION}" COMMAND_ERROR_IS_FATAL ANY)
# Programs ask for the library by its name and first number of its version.
file(STRINGS "${PROGRAM}" names REGEX "^${SONAME}$")
if(NOT names)
  message(FATAL_ERROR "the program does not ask for ${SONAME}")
endif()
