# SPDX-License-Identifier: Apache-2.0
# From a block of a page to a translation unit. Text is cut at what stands in it and never becomes a
# list, so that brackets and semicolons are safe.

# heed_find_pages(out source [CONFIGURE_DEPENDS]): sets `out` to the pages of the tree `source`, by their paths in it.
function(heed_find_pages out source)
  file(GLOB_RECURSE pages ${ARGN} RELATIVE "${source}" "${source}/include/README.md" "${source}/examples/README.md"
       "${source}/cmake/README.md" "${source}/bench/README.md" "${source}/tests/README.md")
  set(${out} README.md ${pages} PARENT_SCOPE)
endfunction()

# heed_cut(text separator before behind): sets `before` and `behind` to what stands on either side of the
# first `separator`; without one, to the whole text and to nothing.
function(heed_cut text separator before behind)
  string(FIND "${text}" "${separator}" at)
  if(at LESS 0)
    set(${before} "${text}" PARENT_SCOPE)
    set(${behind} "" PARENT_SCOPE)
    return()
  endif()
  string(SUBSTRING "${text}" 0 ${at} first)
  string(LENGTH "${separator}" length)
  math(EXPR at "${at} + ${length}")
  string(SUBSTRING "${text}" ${at} -1 second)
  set(${before} "${first}" PARENT_SCOPE)
  set(${behind} "${second}" PARENT_SCOPE)
endfunction()

# heed_move_line(counter text): the variable `counter` grows by the line ends of `text`.
function(heed_move_line counter text)
  string(REGEX MATCHALL "\n" ends "${text}")
  list(LENGTH ends count)
  math(EXPR moved "${${counter}} + ${count}")
  set(${counter} ${moved} PARENT_SCOPE)
endfunction()

# heed_write_changed(file text): writes what differs, so that nothing else is compiled again.
function(heed_write_changed file text)
  set(old "")
  if(EXISTS "${file}")
    file(READ "${file}" old)
  endif()
  if(NOT EXISTS "${file}" OR NOT old STREQUAL text)
    file(WRITE "${file}" "${text}")
  endif()
endfunction()

# heed_split_includes(body): sets `includes` to the includes that open `body`, `code` to what follows, and
# `line` to where that begins. Body and code begin with a line end.
function(heed_split_includes body)
  set(includes "")
  while(body MATCHES "^\n(#include [^\n]*)?\n")
    string(APPEND includes "${CMAKE_MATCH_1}\n")
    heed_cut("${body}" "\n${CMAKE_MATCH_1}\n" none body)
    string(PREPEND body "\n")
  endwhile()
  heed_move_line(line "${includes}")
  set(includes "${includes}" PARENT_SCOPE)
  set(code "${body}" PARENT_SCOPE)
  set(line ${line} PARENT_SCOPE)
endfunction()

# heed_find_frame(code where): sets `frame` to the one file of `frames` whose first mark quotes the line
# that opens `code`; the file leaves `frames`.
function(heed_find_frame code where)
  set(found "")
  foreach(file IN LISTS frames)
    file(READ "${file}" text)
    if(NOT text MATCHES "\n *// README\\.md: ([^\n]+)\n")
      message(FATAL_ERROR "${file} has no line \"// README.md: \" with the first line of a block")
    endif()
    string(FIND "${code}" "\n${CMAKE_MATCH_1}" at)
    if(at EQUAL 0)
      list(APPEND found "${file}")
    endif()
  endforeach()
  list(LENGTH found count)
  if(NOT count EQUAL 1)
    string(REGEX MATCH "[^\n]+" first "${code}")
    message(FATAL_ERROR "${where}: ${count} files in tests/readme quote the first line of this block, "
                        "\"${first}\", it must be one that no other block uses")
  endif()
  list(REMOVE_ITEM frames "${found}")
  set(frames "${frames}" PARENT_SCOPE)
  set(frame "${found}" PARENT_SCOPE)
endfunction()

# heed_fill_frame(frame code line page): sets `unit` to the file `frame` with `code`, which begins in
# `line` of the file `page`. A mark takes the code from the line that it quotes up to that of the next mark.
function(heed_fill_frame frame code line page)
  file(READ "${frame}" rest)
  string(PREPEND rest "\n")
  set(frame_line 1)
  set(text "")
  set(origin "")
  while(rest MATCHES "\n( *// README\\.md: ([^\n]+))\n")
    set(mark "${CMAKE_MATCH_1}")
    set(quoted "${CMAKE_MATCH_2}")
    string(FIND "${code}" "\n${quoted}" at)
    if(at LESS 0)
      message(FATAL_ERROR "${frame} quotes \"${quoted}\", which its block does not have there")
    endif()
    heed_cut("${code}" "\n${quoted}" piece code)
    string(PREPEND code "\n${quoted}")
    heed_cut("${rest}" "\n${mark}\n" before rest)
    string(PREPEND rest "\n")
    string(APPEND text "${origin}${piece}\n#line ${frame_line} \"${frame}\"${before}\n")
    heed_move_line(line "${piece}")
    heed_move_line(frame_line "${before}\n")
    set(origin "#line ${line} \"${page}\"")
  endwhile()
  set(unit "${text}${origin}${code}\n#line ${frame_line} \"${frame}\"${rest}" PARENT_SCOPE)
endfunction()
