# SPDX-License-Identifier: Apache-2.0
# Steps shared by the scripts check.cmake and compare.cmake, which run from any directory.
include("${CMAKE_CURRENT_LIST_DIR}/packages.cmake")
get_filename_component(HEED_SOURCE "${CMAKE_CURRENT_LIST_DIR}/.." ABSOLUTE)
set(HEED_BUILD "${HEED_SOURCE}/build")
# In front of a command: what it prints goes to standard error.
set(HEED_TO_STDERR sh -c "exec \"$@\" >&2" sh)

# Sets `out` to the arguments after `--`.
function(heed_forwarded_arguments out)
  set(arguments "")
  set(place "before -P")
  math(EXPR last "${CMAKE_ARGC} - 1")
  foreach(i RANGE ${last})
    set(argument "${CMAKE_ARGV${i}}")
    if(place STREQUAL "forwarded")
      string(REPLACE ";" "\\;" argument "${argument}")
      list(APPEND arguments "${argument}")
    elseif(argument STREQUAL "--")
      set(place "forwarded")
    elseif(argument STREQUAL "-P")
      set(place "script")
    elseif(place STREQUAL "script")
      set(place "behind the script")
    elseif(place STREQUAL "behind the script")
      message(FATAL_ERROR "\"${argument}\" is not understood: arguments belong behind a \"--\"")
    endif()
  endforeach()
  set(${out} "${arguments}" PARENT_SCOPE)
endfunction()

# Sets `out` to the value of a variable in build/CMakeCache.txt, or to nothing.
function(heed_cached out variable)
  set(value "")
  if(EXISTS "${HEED_BUILD}/CMakeCache.txt")
    file(STRINGS "${HEED_BUILD}/CMakeCache.txt" line REGEX "^${variable}:" LIMIT_COUNT 1)
    string(REGEX REPLACE "^[^=]*=" "" value "${line}")
  endif()
  set(${out} "${value}" PARENT_SCOPE)
endfunction()

# A build directory that was copied along with the tree starts afresh.
function(heed_forget_copied_build)
  heed_cached(home CMAKE_HOME_DIRECTORY)
  if(home AND NOT home STREQUAL HEED_SOURCE)
    message(NOTICE "build/ was configured for ${home}; starting afresh")
    file(REMOVE_RECURSE "${HEED_BUILD}")
  endif()
endfunction()

# Sets `out` to the generator's arguments: those of an existing build stay, else Ninja, else make.
function(heed_choose_generator out)
  set(arguments "")
  heed_cached(generator CMAKE_GENERATOR)
  if(NOT generator AND NOT DEFINED ENV{CMAKE_GENERATOR})
    find_program(HEED_NINJA NAMES ninja ninja-build)
    find_program(HEED_MAKE NAMES make gmake)
    if(HEED_NINJA)
      set(arguments -G Ninja)
    elseif(HEED_MAKE)
      set(arguments -G "Unix Makefiles")
    else()
      message(FATAL_ERROR "no ninja or make was found. On Debian or Ubuntu this installs all:\n"
                          "  ${HEED_APT_LINE}\n")
    endif()
  endif()
  set(${out} "${arguments}" PARENT_SCOPE)
endfunction()

function(heed_require_compiler)
  find_program(HEED_CXX NAMES c++ g++ clang++)
  if(NOT HEED_CXX AND NOT DEFINED ENV{CXX})
    message(FATAL_ERROR "no C++ compiler was found. On Debian or Ubuntu this installs all:\n"
                        "  ${HEED_APT_LINE}\n")
  endif()
endfunction()

# heed_configure(argument...): configures build/ for the fastest code on this machine.
function(heed_configure)
  heed_require_compiler()
  heed_forget_copied_build()
  heed_choose_generator(generator)
  message(NOTICE "Configuring ${HEED_BUILD}")
  execute_process(
    COMMAND ${HEED_TO_STDERR} "${CMAKE_COMMAND}" --log-level=NOTICE -S "${HEED_SOURCE}" -B "${HEED_BUILD}"
            ${generator} -DCMAKE_BUILD_TYPE=Release -DHEED_NATIVE=ON -DHEED_SANITIZE= ${ARGN}
    RESULT_VARIABLE result)
  if(NOT result EQUAL 0)
    message(FATAL_ERROR "configuring failed; the reason stands above")
  endif()
endfunction()

# Sets `out` to the number of jobs: one per processor, each with 1.5 GB of memory.
function(heed_job_count out)
  if(DEFINED ENV{CMAKE_BUILD_PARALLEL_LEVEL})
    set(jobs "$ENV{CMAKE_BUILD_PARALLEL_LEVEL}")
  else()
    cmake_host_system_information(RESULT jobs QUERY NUMBER_OF_LOGICAL_CORES)
    cmake_host_system_information(RESULT megabytes QUERY AVAILABLE_PHYSICAL_MEMORY)
    math(EXPR fitting "${megabytes} / 1500")
    if(fitting LESS jobs)
      set(jobs ${fitting})
    endif()
    if(jobs LESS 1)
      set(jobs 1)
    endif()
  endif()
  set(${out} ${jobs} PARENT_SCOPE)
endfunction()

# Sets `out` to arguments of execute_process that give a program the terminal itself, if there is a
# terminal (Linux), for its progress; otherwise a pipe lies between.
function(heed_terminal out)
  set(arguments "")
  set(options OUTPUT_FILE ERROR_FILE)
  set(descriptors 1 2)
  foreach(option descriptor IN ZIP_LISTS options descriptors)
    set(link "/proc/self/fd/${descriptor}")
    if(IS_SYMLINK "${link}")
      file(READ_SYMLINK "${link}" file)
      if(file MATCHES "^/dev/(pts/|tty)[0-9]+$" AND EXISTS "${file}")
        list(APPEND arguments ${option} "${file}")
      endif()
    endif()
  endforeach()
  set(${out} "${arguments}" PARENT_SCOPE)
endfunction()

# heed_build(out argument...): builds; `out` is the exit code. What the build prints goes to standard error
# where HEED_BUILD_QUIETLY is set: standard output is left to what runs next.
function(heed_build out)
  heed_job_count(jobs)
  message(NOTICE "Building with ${jobs} jobs")
  heed_terminal(terminal)
  set(launcher "")
  if(HEED_BUILD_QUIETLY)
    set(launcher ${HEED_TO_STDERR})
  endif()
  execute_process(COMMAND ${launcher} "${CMAKE_COMMAND}" --build "${HEED_BUILD}" --parallel ${jobs} ${ARGN}
                  RESULT_VARIABLE result ${terminal})
  set(${out} "${result}" PARENT_SCOPE)
endfunction()
