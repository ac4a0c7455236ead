# SPDX-License-Identifier: Apache-2.0
# Flags that let a compiler change floating-point arithmetic: with each of them and each of
# COMPILERS, main.cpp gives right numbers, or heed's own sentence stops the compiler.
set(liberties "-ffast-math" "-Ofast" "-ffast-math -fno-finite-math-only" "-ffinite-math-only"
              "-funsafe-math-optimizations" "-fassociative-math -fno-signed-zeros -fno-trapping-math"
              "-ffast-math -DHEED_ALLOW_FINITE_MATH" "-freciprocal-math" "-ffp-contract=fast")
foreach(compiler IN LISTS COMPILERS)
  foreach(flags IN LISTS liberties)
    separate_arguments(arguments UNIX_COMMAND "${flags}")
    execute_process(COMMAND "${compiler}" -std=c++20 -O2 -Wfatal-errors ${arguments} "-I${INCLUDE}"
                            "${CMAKE_CURRENT_LIST_DIR}/main.cpp" -o "${PROGRAM}"
                    RESULT_VARIABLE failed ERROR_VARIABLE said)
    if(failed AND said MATCHES "heed relies on")
      message("${compiler} ${flags}: refused")
    elseif(failed)
      message(SEND_ERROR "${compiler} ${flags}: did not compile, and not for heed's reason:\n${said}")
    else()
      execute_process(COMMAND "${PROGRAM}" RESULT_VARIABLE wrong OUTPUT_VARIABLE said)
      if(wrong)
        message(SEND_ERROR "${compiler} ${flags}: wrong numbers:\n${said}")
      else()
        message("${compiler} ${flags}: right numbers")
      endif()
    endif()
  endforeach()
endforeach()
