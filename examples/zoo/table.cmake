# SPDX-License-Identifier: Apache-2.0
# Writes the table of README.md: cmake -DCOMPARE=build/bin/heed_compare -P examples/zoo/table.cmake, or in a configured
# build cmake --build build -t zoo_table. The machine should be quiet; it takes some minutes.
cmake_minimum_required(VERSION 3.22)
set(readme "${CMAKE_CURRENT_LIST_DIR}/README.md")
set(begin "<!-- table.cmake writes from here -->\n")
set(end "<!-- to here -->\n")

include("${CMAKE_CURRENT_LIST_DIR}/lines.cmake")

# heed_find_ratio(out name pass): the time over plain attention's in `csv`, with two digits behind the point; a dash where the
# program was built without the variant.
function(heed_find_ratio out name pass)
  # variant,dtype,"shape",causal,threads,pass,ms,gflops,peak_share,ratio_to_baseline,...
  set(${out} "–" PARENT_SCOPE)
  if(csv MATCHES "\nzoo:${name},float,\"[^\"]*\",[^,]*,[^,]*,${pass},[^,]*,[^,]*,[^,]*,([0-9]+)\\.?([0-9]*),")
    set(whole ${CMAKE_MATCH_1})
    string(SUBSTRING "${CMAKE_MATCH_2}000" 0 3 digits)
    math(EXPR hundredths "(${whole}${digits} + 5) / 10")
    math(EXPR whole "${hundredths} / 100")
    math(EXPR rest "${hundredths} % 100 + 100")
    string(SUBSTRING "${rest}" 1 2 rest)
    set(${out} "${whole}.${rest}" PARENT_SCOPE)
  endif()
endfunction()

set(command --variants zoo --dtype float --threads 1 --shape 1,4,1024,64 --csv -)
execute_process(COMMAND "${COMPARE}" ${command} OUTPUT_VARIABLE csv ERROR_VARIABLE page RESULT_VARIABLE result)
if(NOT result EQUAL 0)
  message(FATAL_ERROR "heed_compare ended with: ${result}\n${page}")
endif()
string(REGEX MATCH "machine +([^\n]*)" machine "${page}")
list(JOIN command " " command)
set(table "`heed_compare ${command}` on ${CMAKE_MATCH_1}:\n
| variant | lines | forward | backward |\n|---|---:|---:|---:|\n")
heed_zoo_files(files)
foreach(file IN LISTS files)
  heed_zoo_name(name "${file}")
  heed_count_lines(lines "${file}")
  cmake_path(GET file FILENAME link)
  set(row "| [`zoo:${name}`](${link}) | ${lines} |")
  foreach(pass forward backward)
    heed_find_ratio(ratio "${name}" ${pass})
    string(APPEND row " ${ratio} |")
  endforeach()
  string(APPEND table "${row}\n")
endforeach()

file(READ "${readme}" text)
string(FIND "${text}" "${begin}" from)
string(FIND "${text}" "${end}" to)
if(from LESS 0 OR to LESS from)
  message(FATAL_ERROR "README.md has no place for the table")
endif()
string(LENGTH "${begin}" length)
math(EXPR from "${from} + ${length}")
string(SUBSTRING "${text}" 0 ${from} head)
string(SUBSTRING "${text}" ${to} -1 tail)
file(WRITE "${readme}" "${head}${table}${tail}")
