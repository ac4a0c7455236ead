# SPDX-License-Identifier: Apache-2.0
# Flags and places of heed's own programs; nothing here reaches a consumer.
set(HEED_TEST_THREADS 2 CACHE STRING "OpenMP threads of each test when none are asked for")

set(CMAKE_RUNTIME_OUTPUT_DIRECTORY "${PROJECT_BINARY_DIR}/bin")

# g++ contracts a * b + c into one instruction only with its language extensions (-std=gnu++20, the
# default of CMake); without contraction the kernels lose up to a fifth.
add_library(heed_own INTERFACE)
target_link_libraries(heed_own INTERFACE heed::io $<$<BOOL:${HEED_NATIVE}>:heed::native>)
# g++ 12 warns of impossible overlaps in its own std::string (-Wrestrict, GCC bug 105651) and of undefined
# operands of the AVX-512 intrinsics that Eigen 3.4 calls (-Wmaybe-uninitialized).
set(HEED_WARNINGS -Wall -Wextra -Wpedantic -Wshadow -Wconversion
                  "$<$<CXX_COMPILER_ID:GNU>:-Wno-restrict;-Wno-maybe-uninitialized>")
target_compile_options(heed_own INTERFACE ${HEED_WARNINGS} ${HEED_COMPILER_MEMORY})
if(HEED_SANITIZE)
  target_compile_options(heed_own INTERFACE ${HEED_SANITIZED} -UNDEBUG -fno-omit-frame-pointer)
  target_compile_definitions(heed_own INTERFACE _GLIBCXX_ASSERTIONS HEED_SANITIZED)
  target_link_options(heed_own INTERFACE -fsanitize=${HEED_SANITIZE})
  if(HEED_SANITIZE STREQUAL "thread" AND CMAKE_CXX_COMPILER_ID MATCHES "Clang")
    # Tests replace operator new, which only the sanitizer's shared library lets them do.
    execute_process(COMMAND "${CMAKE_CXX_COMPILER}" "-print-file-name=libclang_rt.tsan-${CMAKE_SYSTEM_PROCESSOR}.so"
                    OUTPUT_VARIABLE runtime OUTPUT_STRIP_TRAILING_WHITESPACE COMMAND_ERROR_IS_FATAL ANY)
    cmake_path(GET runtime PARENT_PATH runtime)
    target_link_options(heed_own INTERFACE -shared-libsan "LINKER:-rpath,${runtime}")
  endif()
  # Tests request more memory than there is; clang's OpenMP keeps its memory for threads to the end.
  file(WRITE "${PROJECT_BINARY_DIR}/leaks.txt" "leak:libomp\n")
  # Tests that mpirun starts do not look for leaks: the memory that an MPI keeps to the end belongs
  # to parts that it has unloaded by then.
  set(HEED_SANITIZER_OPTIONS "ASAN_OPTIONS=allocator_may_return_null=1"
                             "LSAN_OPTIONS=suppressions=${PROJECT_BINARY_DIR}/leaks.txt")
  set(HEED_MPI_SANITIZER_OPTIONS "ASAN_OPTIONS=allocator_may_return_null=1:detect_leaks=0")
endif()
separate_arguments(flags UNIX_COMMAND "${HEED_FLAGS}")
target_compile_options(heed_own INTERFACE ${flags})
# Programs that name <heed/compiled.hpp> share the variants' code.
target_link_libraries(heed_engine PRIVATE $<BUILD_INTERFACE:heed_own>)
target_link_libraries(heed_compiled PRIVATE $<BUILD_INTERFACE:heed_own>)

# heed_add_program(name source...): a program in build/bin.
function(heed_add_program name)
  add_executable(${name} ${ARGN})
  target_link_libraries(${name} PRIVATE heed_own heed::compiled Eigen3::Eigen)
endfunction()

# heed_lend_engine(source out): sets `out` to a source file of the same program that takes the engine's code from heed::engine.
# The promise stands behind the program, so that it brings no header that the program forgot.
set(HEED_LEND_ENGINE "#include <heed/compiled_engine.hpp>\n#include <heed/mpi/compiled_ranks.hpp>\n")
function(heed_lend_engine source out)
  cmake_path(GET source STEM name)
  set(lent "${CMAKE_CURRENT_BINARY_DIR}/lent/${name}.cpp")
  set_property(DIRECTORY APPEND PROPERTY CMAKE_CONFIGURE_DEPENDS "${source}")
  file(READ "${source}" text)
  file(CONFIGURE OUTPUT "${lent}" @ONLY CONTENT "#line 1 \"${source}\"\n${text}\n${HEED_LEND_ENGINE}")
  set(${out} "${lent}" PARENT_SCOPE)
endfunction()

# heed_add_test(name command...): a ctest entry with HEED_TEST_THREADS threads. It counts as one processor, since most of its
# time goes to plain loops on one thread. Threads that wait sleep, so that another test has their processor.
function(heed_add_test name)
  add_test(NAME ${name} COMMAND ${ARGN})
  set_tests_properties(${name} PROPERTIES ENVIRONMENT "OMP_NUM_THREADS=${HEED_TEST_THREADS};OMP_WAIT_POLICY=passive;${HEED_SANITIZER_OPTIONS}")
endfunction()
