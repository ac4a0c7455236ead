# SPDX-License-Identifier: Apache-2.0
# Compiles main.c into PROGRAM by CC with the flags that PKG_CONFIG gives for libheed in
# LIBRARY_DIR, and runs it; HAS_STATIC: again with libheed.a.
set(ENV{PKG_CONFIG_PATH} "${LIBRARY_DIR}/pkgconfig")
function(build_and_run program kind linking)
  foreach(what cflags libs)
    execute_process(COMMAND "${PKG_CONFIG}" ${kind} --${what} libheed OUTPUT_VARIABLE ${what}
                    OUTPUT_STRIP_TRAILING_WHITESPACE COMMAND_ERROR_IS_FATAL ANY)
    separate_arguments(${what} UNIX_COMMAND "${${what}}")
  endforeach()
  execute_process(COMMAND "${CC}" -std=c99 -Wall -Wextra -Wpedantic ${cflags} "${CMAKE_CURRENT_LIST_DIR}/main.c"
                          -o "${program}" ${libs} "${linking}" COMMAND_ERROR_IS_FATAL ANY)
  execute_process(COMMAND "${program}" "${VERSION}" COMMAND_ERROR_IS_FATAL ANY)
endfunction()

build_and_run("${PROGRAM}" "" "-Wl,-rpath,${LIBRARY_DIR}")
# Programs ask for the library by its name and first number of its version.
file(STRINGS "${PROGRAM}" names REGEX "^${SONAME}$")
if(NOT names)
  message(FATAL_ERROR "the program does not ask for ${SONAME}")
endif()
if(HAS_STATIC)
  build_and_run("${PROGRAM}_static" --static -static)
endif()
