# SPDX-License-Identifier: Apache-2.0
# Checks that the whole tree is formatted as .clang-format says. Versions of clang-format differ;
# this is for version 14.
#   cmake -DSOURCE=the checkout [-DCLANG_FORMAT=program] -P format.cmake
if(NOT CLANG_FORMAT)
  message("skipped: clang-format 14 is not installed")
  return()
endif()
set(files "")
foreach(folder include tests bench examples)
  file(GLOB_RECURSE found "${SOURCE}/${folder}/*.hpp" "${SOURCE}/${folder}/*.cpp"
       "${SOURCE}/${folder}/*.h" "${SOURCE}/${folder}/*.c")
  list(APPEND files ${found})
endforeach()
execute_process(COMMAND "${CLANG_FORMAT}" --dry-run -Werror ${files} RESULT_VARIABLE result)
if(NOT result EQUAL 0)
  message(FATAL_ERROR "clang-format -i on the files named above formats them")
endif()
