# SPDX-License-Identifier: Apache-2.0
# Checks the commands of README, in blocks or inline: each script is in SOURCE, each
# build/bin/PROGRAM in BIN, each option in the program's help; `cmake -P cmake/NAME.cmake --
# OPTIONS` hands its options to heed_NAME. An option that stands alone is one of these programs'.
# The packages to install are those that the build needs. All commands that configure build/ by hand
# are one command, so that any of them may follow another; that of examples/torch has one option
# more.
cmake_minimum_required(VERSION 3.22)
include("${SOURCE}/cmake/packages.cmake")
include("${CMAKE_CURRENT_LIST_DIR}/blocks.cmake")
set(every_help "")

# heed_read_help(command...): sets `help` to the program's help text.
function(heed_read_help)
  list(POP_FRONT ARGN program)
  if(NOT EXISTS "${BIN}/${program}")
    message(FATAL_ERROR "README.md: \"${command}\" needs build/bin/${program}, which is not built")
  endif()
  execute_process(COMMAND "${BIN}/${program}" ${ARGN} --help RESULT_VARIABLE result
                  OUTPUT_VARIABLE help ERROR_VARIABLE help)
  if(NOT result EQUAL 0)
    message(FATAL_ERROR "README.md: \"${command}\": ${program} ${ARGN} --help ended with: ${result}")
  endif()
  set(help "${help}" PARENT_SCOPE)
endfunction()

# heed_require_options(text help): each --option in `text` stands in `help`.
function(heed_require_options text help)
  string(REGEX MATCHALL "--[a-z][a-z0-9-]*" options "${text}")
  foreach(option IN LISTS options)
    if(NOT help MATCHES "${option}([^a-z0-9-]|$)")
      message(FATAL_ERROR "README.md: \"${command}\": no help has the option ${option}")
    endif()
  endforeach()
endfunction()

# heed_check_script(script arguments): cmake -P `script` `arguments`.
function(heed_check_script script arguments)
  if(NOT EXISTS "${SOURCE}/${script}")
    message(FATAL_ERROR "README.md: \"${command}\": there is no ${script}")
  endif()
  heed_cut("${arguments} " " -- " before options)
  heed_require_options("${before}" "")
  if(options)
    cmake_path(GET script STEM name)
    heed_read_help("heed_${name}")
    heed_require_options("${options}" "${help}")
  endif()
  set(every_help "${every_help}${help}" PARENT_SCOPE)
endfunction()

# heed_check_program(program arguments): build/bin/`program` `arguments`, which may begin with a subcommand.
function(heed_check_program program arguments)
  set(subcommand "")
  if(arguments MATCHES "^ ([a-z]+)( |$)")
    set(subcommand "${CMAKE_MATCH_1}")
  endif()
  heed_read_help("${program}" ${subcommand})
  heed_require_options("${arguments}" "${help}")
  set(every_help "${every_help}${help}" PARENT_SCOPE)
endfunction()

file(READ "${README}" text)
string(REPLACE "\\\n" " " text "${text}")
set(rest "${text}")
while(rest MATCHES "(cmake -P |build/bin/)([^ `\n]+)([^`&|\n]*)")
  set(command "${CMAKE_MATCH_0}")
  heed_cut("${rest}" "${command}" none rest)
  if(CMAKE_MATCH_1 STREQUAL "build/bin/")
    heed_check_program("${CMAKE_MATCH_2}" "${CMAKE_MATCH_3}")
  else()
    heed_check_script("${CMAKE_MATCH_2}" "${CMAKE_MATCH_3}")
  endif()
endwhile()

set(rest "${text}")
while(rest MATCHES "`(--[a-z][^`]*)`")
  set(command "${CMAKE_MATCH_1}")
  heed_cut("${rest}" "${command}" none rest)
  heed_require_options("${command}" "${every_help}")
endwhile()

set(configuring "")
foreach(page IN ITEMS "${README}" "${SOURCE}/examples/torch/README.md")
  file(STRINGS "${page}" lines REGEX "cmake -S [.] -B build")
  string(REPLACE " -DHEED_BUILD_TORCH=ON" "" lines "${lines}")
  list(APPEND configuring ${lines})
endforeach()
list(REMOVE_DUPLICATES configuring)
list(LENGTH configuring count)
if(NOT count EQUAL 1)
  list(JOIN configuring "\n  " configuring)
  message(FATAL_ERROR "README.md and examples/torch/README.md configure build/ in ${count} ways:\n  ${configuring}")
endif()

set(rest "${text}")
list(JOIN HEED_PACKAGES " " packages)
while(rest MATCHES "apt-get install -y ([a-z0-9 +.-]*[a-z0-9+])")
  set(installed "${CMAKE_MATCH_1}")
  heed_cut("${rest}" "${installed}" none rest)
  if(NOT installed STREQUAL packages)
    message(FATAL_ERROR "README.md installs ${installed}; cmake/packages.cmake has ${packages}")
  endif()
endwhile()
