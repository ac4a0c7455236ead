# SPDX-License-Identifier: Apache-2.0
# A project with many warnings gets none from heed's headers: neither from all of them, which
# HEADERS includes, nor from main.cpp behind it. Folders of other libraries are SYSTEM. It is
# compiled with optimisation, since intrinsics are macros in g++ otherwise; ../plain has the
# warnings that need generated code.
include("${CMAKE_CURRENT_LIST_DIR}/../warnings.cmake")
list(TRANSFORM SYSTEM PREPEND -isystem)
foreach(compiler IN LISTS COMPILERS)
  execute_process(COMMAND "${compiler}" --version OUTPUT_VARIABLE version)
  if(version MATCHES "clang")
    set(instruction_sets "-mavx2 -mfma -mf16c")
  else()
    set(instruction_sets "-msse2" "-mavx2 -mfma -mf16c -mavx512f -mavx512bw -mavx512dq -mavx512vl -mavx512bf16 -fopenmp")
    list(APPEND warnings -Wuseless-cast)
  endif()
  if(NOT X86)
    set(instruction_sets "-O1")
  endif()
  foreach(flags IN LISTS instruction_sets)
    separate_arguments(flags UNIX_COMMAND "${flags}")
    execute_process(COMMAND "${compiler}" -std=c++20 -O1 -fsyntax-only ${flags} ${warnings} -Werror ${SYSTEM} "-I${INCLUDE}"
                            -include "${HEADERS}" "${CMAKE_CURRENT_LIST_DIR}/main.cpp" RESULT_VARIABLE failed)
    if(failed)
      message(SEND_ERROR "${compiler} ${flags}: warnings")
    endif()
  endforeach()
  list(REMOVE_ITEM warnings -Wuseless-cast)
endforeach()
