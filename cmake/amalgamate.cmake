# SPDX-License-Identifier: Apache-2.0
# Writes heed as a single header:
#   cmake -DINCLUDE=include "-DDOORS=heed/attention.hpp;heed/check/op_check.hpp" -DOUT=heed.hpp -P cmake/amalgamate.cmake
# Each of heed's headers appears once, where it is first included; other headers stay includes. Text is cut
# at the includes and never becomes a list, so that brackets and semicolons are safe.
cmake_minimum_required(VERSION 3.22)

set(seen "")
set(text "")

function(heed_emit header)
  if(header IN_LIST seen)
    return()
  endif()
  list(APPEND seen "${header}")
  if(NOT EXISTS "${INCLUDE}/${header}")
    message(FATAL_ERROR "amalgamate: there is no ${INCLUDE}/${header}")
  endif()
  file(READ "${INCLUDE}/${header}" rest)
  string(REPLACE "#pragma once\n" "" rest "${rest}")
  string(REPLACE "// SPDX-License-Identifier: Apache-2.0\n" "" rest "${rest}")
  string(APPEND text "\n// ---- ${header} ----\n")
  while(rest MATCHES "\n#include <(heed/[^>]*)>\n")
    set(next "${CMAKE_MATCH_1}")
    set(line "\n#include <${next}>\n")
    string(FIND "${rest}" "${line}" at)
    string(LENGTH "${line}" length)
    string(SUBSTRING "${rest}" 0 ${at} before)
    math(EXPR behind "${at} + ${length} - 1")
    string(SUBSTRING "${rest}" ${behind} -1 rest)
    string(APPEND text "${before}\n")
    heed_emit("${next}")
  endwhile()
  string(APPEND text "${rest}")
  set(seen "${seen}" PARENT_SCOPE)
  set(text "${text}" PARENT_SCOPE)
endfunction()

foreach(door IN LISTS DOORS)
  heed_emit("${door}")
endforeach()
list(JOIN DOORS ", " doors)
file(WRITE "${OUT}" "// SPDX-License-Identifier: Apache-2.0\n// heed as one header, generated from ${doors}.\n#pragma once\n${text}")
