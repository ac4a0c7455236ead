# SPDX-License-Identifier: Apache-2.0
# Steps shared by the scripts check.cmake and compare.cmake, which run from any directory.
include("${CMAKE_CURRENT_LIST_DIR}/packages.cmake")
get_filename_component(HEED_SOURCE "${CMAKE_CURRENT_LIST_DIR}/.." ABSOLUTE)
set(HEED_BUILD "${HEED_SOURCE}/build")

# Words in front of a command. If CMake runs in a terminal (on Linux) the command gets that
# terminal, for its progress, and not CMake's pipe. HEED_TO_STDERR sends its output to standard
# error.
set(HEED_TO_TERMINAL sh -c "cmake=/proc/$PPID/fd
test -c $cmake/1 && test -w $cmake/1 && exec >>$cmake/1
test -c $cmake/2 && test -w $cmake/2 && exec 2>>$cmake/2
exec \"$@\"" sh)
set(HEED_TO_STDERR ${HEED_TO_TERMINAL} sh -c "exec \"$@\" >&2" sh)

# Sets `out` to the arguments after `--`: cmake -P SCRIPT -- ARGUMENT...
function(heed_forwarded_arguments out)
  set(arguments "")
  set(forwarded FALSE)
  math(EXPR last "${CMAKE_ARGC} - 1")
  foreach(i RANGE ${last})
    set(argument "${CMAKE_ARGV${i}}")
    if(forwarded)
      string(REPLACE ";" "\\;" argument "${argument}")
      list(APPEND arguments "${argument}")
    elseif(argument STREQUAL "--")
      set(forwarded TRUE)
    elseif(i GREATER 2)
      message(FATAL_ERROR "\"${argument}\" is not understood: arguments belong behind a \"--\"")
    endif()
  endforeach()
  set(${out} "${arguments}" PARENT_SCOPE)
endfunction()

# heed_configure(argument...): configures build/ for the fastest code on this machine, with Ninja where it is found. A
# build directory that was copied along with the tree starts afresh.
function(heed_configure)
  find_program(HEED_CXX NAMES c++ g++ clang++)
  find_program(HEED_BUILDER NAMES ninja ninja-build make gmake)
  set(missing "")
  if(NOT HEED_CXX AND NOT DEFINED ENV{CXX})
    set(missing "C++ compiler")
  elseif(NOT HEED_BUILDER AND NOT DEFINED ENV{CMAKE_GENERATOR})
    set(missing "ninja or make")
  endif()
  if(missing)
    message(FATAL_ERROR "no ${missing} was found. On Debian or Ubuntu this installs all:\n  ${HEED_APT_LINE}\n")
  endif()
  set(cache "${HEED_BUILD}/CMakeCache.txt")
  if(EXISTS "${cache}")
    file(STRINGS "${cache}" home REGEX "^CMAKE_HOME_DIRECTORY:")
    if(NOT home STREQUAL "CMAKE_HOME_DIRECTORY:INTERNAL=${HEED_SOURCE}")
      message(NOTICE "build/ was configured for another folder; starting afresh")
      file(REMOVE_RECURSE "${HEED_BUILD}")
    endif()
  endif()
  if(HEED_BUILDER MATCHES "ninja" AND NOT EXISTS "${cache}" AND NOT DEFINED ENV{CMAKE_GENERATOR})
    list(APPEND ARGN -G Ninja)
  endif()
  message(NOTICE "Configuring ${HEED_BUILD}")
  execute_process(
    COMMAND ${HEED_TO_STDERR} "${CMAKE_COMMAND}" --log-level=NOTICE -S "${HEED_SOURCE}" -B "${HEED_BUILD}"
            -DCMAKE_BUILD_TYPE=Release -DHEED_NATIVE=ON -DHEED_SANITIZE= ${ARGN}
    RESULT_VARIABLE result)
  if(NOT result EQUAL 0)
    message(FATAL_ERROR "configuring failed; the reason stands above")
  endif()
endfunction()

# HEED_JOBS: the number that the environment sets, else one job per processor, each with 1.8 GB of
# memory.
set(HEED_JOBS "$ENV{CMAKE_BUILD_PARALLEL_LEVEL}")
if(NOT HEED_JOBS)
  cmake_host_system_information(RESULT HEED_JOBS QUERY NUMBER_OF_LOGICAL_CORES)
  cmake_host_system_information(RESULT megabytes QUERY AVAILABLE_PHYSICAL_MEMORY)
  math(EXPR fitting "${megabytes} / 1800")
  if(fitting LESS HEED_JOBS)
    set(HEED_JOBS ${fitting})
  endif()
  if(HEED_JOBS LESS 1)
    set(HEED_JOBS 1)
  endif()
endif()

# heed_build(out WORDS argument...): builds; `out` is the exit code, WORDS one of the two kinds of words above.
function(heed_build out words)
  message(NOTICE "Building with ${HEED_JOBS} jobs")
  execute_process(COMMAND ${${words}} "${CMAKE_COMMAND}" --build "${HEED_BUILD}" --parallel ${HEED_JOBS} ${ARGN}
                  RESULT_VARIABLE result)
  set(${out} "${result}" PARENT_SCOPE)
endfunction()
