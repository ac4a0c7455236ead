# SPDX-License-Identifier: Apache-2.0
# Holds heed to what it promises beyond the check, one promise by each lane, and writes the results into tests/TRUST.md:
#   cmake -P cmake/trust.cmake [LANE...]      without a lane all of them, the most valuable first; --list names them
# A lane builds and works below build/trust/LANE. One that was stopped goes on behind the last part that passed, as long as
# the commit is the same; a part that failed is repeated, and the exit code is 1 where one fails. Compilers are found by the
# names that Debian gives them; CXXFLAGS and LDFLAGS of the environment reach each build.
cmake_minimum_required(VERSION 3.22)
include("${CMAKE_CURRENT_LIST_DIR}/steps.cmake")
include("${CMAKE_CURRENT_LIST_DIR}/lanes.cmake")
set(page "${HEED_SOURCE}/tests/TRUST.md")
set(introduction "# What was held against its promise

`cmake -P cmake/trust.cmake` writes this page; nothing here is written by hand. `cmake -P cmake/trust.cmake LANE` runs one
lane, and goes on where it was stopped. Each result stands with its commit (`+`: with changes), the day, and the class of
the processor; a lane is open until it has ended once. The times are those of two processors. What a lane runs stands in
`cmake/trust.cmake`; `tests/README.md` says what the tests hold.
")

lane(check PROMISE "everything builds and all tests pass" NEEDS "an hour"
     TIMES 1 SAYS "[0-9]+ passed, [0-9]+ failed" RUN "${CMAKE_COMMAND}" -P cmake/check.cmake)

# All programs and tests below sanitizers. Packages that others compile (consumers, PyTorch, Python) have no sanitizer.
set(sanitized -DHEED_SANITIZE=address,undefined -DHEED_C_LEVELS=x86-64-v3 -DHEED_BUILD_TORCH=OFF)
lane(address PROMISE "AddressSanitizer and UBSan (g++, -march=native) report nothing" NEEDS "2 hours"
     OPTIONS ${sanitized} TESTS -E "^(consumer|headers|python|torch)")
lane(address-clang PROMISE "AddressSanitizer and UBSan (clang 14, no -march) report nothing" NEEDS "2 hours, clang and libomp-dev"
     OPTIONS ${sanitized} -DHEED_NATIVE=OFF -DCMAKE_CXX_COMPILER=clang++ -DCMAKE_C_COMPILER=clang
     TESTS -E "^(consumer|headers|python|torch)")

# valgrind sees numbers that were never written, which decide a branch or are printed; it knows no AVX-512. Widths of rows are
# 1 to 65, ragged tiles among them.
lane(valgrind PROMISE "valgrind finds nothing in 1,000 random calls" NEEDS "an hour, valgrind"
     OPTIONS -DHEED_NATIVE=OFF -DHEED_FLAGS=-march=x86-64-v3 -DHEED_OPENMP=OFF -DHEED_BUILD_C=OFF -DHEED_BUILD_BENCH=OFF -DHEED_BUILD_EXAMPLES=OFF
     TARGETS heed_fuzz_calls
     TIMES 10 RUN valgrind --quiet --error-exitcode=9 "{build}/bin/heed_fuzz_calls" --count 100 --seed {n}00001 --threads 1 --scratch 0)

# MemorySanitizer does not see what Debian's C++ library writes. Templates of that library are compiled here and count as code that
# leaves nothing unwritten; OpenMP's threads and programs that read and write files are left out.
lane(memory PROMISE "MemorySanitizer finds nothing in 20,000 random calls (the C++ library is left out)" NEEDS "an hour, clang-19"
     OPTIONS -DHEED_SANITIZE=memory -DCMAKE_CXX_COMPILER=clang++-19 -DHEED_OPENMP=OFF -DHEED_NATIVE=OFF -DHEED_BUILD_C=OFF
             -DHEED_BUILD_BENCH=OFF -DHEED_BUILD_EXAMPLES=OFF
             "-DHEED_FLAGS=-march=x86-64-v3 -D_GLIBCXX_EXTERN_TEMPLATE=0 -fsanitize-ignorelist=${HEED_SOURCE}/tests/fuzz/not_sanitized.txt"
     TARGETS heed_fuzz_calls TIMES 10 RUN "{build}/bin/heed_fuzz_calls" --count 2000 --seed {n}00001)

lane(coverage PROMISE "the portable tests and those of MPI run 98 % of the lines and 90 % of the branches of include/heed" NEEDS "an hour, clang and llvm"
     OPTIONS -DCMAKE_CXX_COMPILER=clang++ -DCMAKE_C_COMPILER=clang -DHEED_C_LEVELS=x86-64-v3 -DHEED_BUILD_TORCH=OFF -DHEED_BUILD_BENCH=OFF
             "-DCMAKE_CXX_FLAGS=-fprofile-instr-generate -fcoverage-mapping" -DHEED_FLAGS=-O1
     TARGETS heed_portable heed_c_library_test heed_c_program heed_ranks_test heed_mpi_ranks
     TIMES 1 SAYS "[0-9.]+ % of [0-9,]+ lines, [0-9.]+ % of [0-9,]+ branches" RUN python3 -B tests/coverage.py {build})

# Programs of one build: everything for this machine, as the check compiles it.
lane(calls PROMISE "1,000,000 random calls agree with plain loops" NEEDS "an hour"
     BUILD plain TARGETS heed_fuzz_calls TIMES 20 RUN "{build}/bin/heed_fuzz_calls" --count 50000 --seed {n}00001)
lane(determinism PROMISE "250 calls on 1, 2, 3, 4, 7 and 8 threads have the same bits, forward and backward, every variant"
     NEEDS "half an hour" BUILD plain TARGETS heed_determinism_test
     TIMES 1 RUN "{build}/bin/heed_determinism_test" "[repeats]")
lane(callers PROMISE "10,000 calls by eight threads that share const ops have the bits of one, and leave no memory behind"
     NEEDS "some minutes" BUILD plain TARGETS heed_determinism_test
     TIMES 1 RUN "{build}/bin/heed_determinism_test" "[callers]")
lane(accuracy PROMISE "out and gradients are as accurate on hard inputs as the headers of the variants say" NEEDS "a quarter of an hour"
     BUILD plain TARGETS heed_accuracy
     TIMES 1 SAYS "[0-9]+ of [0-9]+ bounds hold" RUN "{build}/bin/heed_accuracy" include/heed/ops)

lane(speed PROMISE "no variant takes 3 % longer than in bench/baseline/, nor than in 0.1.0" NEEDS "half an hour on a quiet machine"
     BUILD plain TARGETS heed_bench
     TIMES 1 SAYS "[0-9]+ of [0-9]+ ratios hold" RUN python3 -B bench/speed.py "{build}/bin/heed_bench" --since v0.1.0)

lane(compile PROMISE "files that call heed cost a compiler no more than tests/house.py allows" NEEDS "some minutes"
     BUILD plain TARGETS help TIMES 1 SAYS "[0-9]+ of [0-9]+ costs hold" RUN "${CMAKE_COMMAND}" --build {build} -t compile_cost)
lane(laboratory PROMISE "of 28 cells of the table in bench/RESULTS.md at most 3 are other where variants are trained again"
     NEEDS "an hour" BUILD plain TARGETS heed_compare
     TIMES 1 SAYS "[0-9]+ of [0-9]+ cells hold" RUN python3 -B bench/laboratory.py "{build}/bin/heed_compare" "{build}/laboratory")

# Threads by clang's own OpenMP, which tells the sanitizer where threads meet; without it each join is a false report.
set(archer ENVIRONMENT TSAN_OPTIONS=ignore_noninstrumented_modules=1:allocator_may_return_null=1 OMP_TOOL_LIBRARIES=libarcher.so)
set(threads -DHEED_SANITIZE=thread -DHEED_BUILD_C=OFF -DHEED_BUILD_BENCH=OFF -DHEED_BUILD_EXAMPLES=OFF
    -DCMAKE_CXX_COMPILER=clang++-19)
lane(race PROMISE "ThreadSanitizer sees a race that is planted in a loop on heed's threads" NEEDS "a minute, clang-19 and libomp-19-dev"
     ${archer} BUILD threads OPTIONS ${threads} TARGETS heed_planted_race
     TIMES 1 RUN sh -c "{build}/bin/heed_planted_race && ! {build}/bin/heed_planted_race race")
lane(threads PROMISE "ThreadSanitizer reports nothing" NEEDS "2 hours, clang-19 and libomp-19-dev" ${archer}
     BUILD threads OPTIONS ${threads} TARGETS heed_portable TESTS -L portable -E "^(headers|macros)")

# A sample of the tests, compiled in other ways.
macro(sample name promise needs)
  lane(${name} PROMISE "the sample of tests passes ${promise}" NEEDS "a quarter of an hour${needs}" TARGETS heed_sample
       OPTIONS -DHEED_SAMPLE=ON -DHEED_BUILD_C=OFF -DHEED_BUILD_BENCH=OFF -DHEED_BUILD_EXAMPLES=OFF -DHEED_NATIVE=OFF ${ARGN}
       TESTS -L sample)
endmacro()
foreach(level IN ITEMS 0 2 3)
  sample(O${level} "at -O${level} -march=native" "" -DHEED_NATIVE=ON -DHEED_FLAGS=-O${level})
endforeach()
sample(v1 "without any flag (SSE2)" "")
foreach(level IN ITEMS 2 3 4)
  sample(v${level} "for x86-64-v${level}" "" -DHEED_FLAGS=-march=x86-64-v${level})
endforeach()
sample(cxx23 "in C++23 by g++" "" -DCMAKE_CXX_STANDARD=23)
foreach(version IN ITEMS 14 16 19)
  sample(clang-${version} "by clang ${version} for x86-64-v3" ", clang-${version}" -DCMAKE_CXX_COMPILER=clang++-${version} -DHEED_FLAGS=-march=x86-64-v3)
endforeach()
sample(clang-cxx23 "in C++23 by clang 19 for x86-64-v4" ", clang-19" -DCMAKE_CXX_COMPILER=clang++-19 -DCMAKE_CXX_STANDARD=23 -DHEED_FLAGS=-march=x86-64-v4)

# Other machines, whose programs wine and qemu run, in the folders of cmake/check.cmake. `headers` and `macros` run nothing.
foreach(machine IN ITEMS windows aarch64)
  lane(${machine} PROMISE "the portable tests pass on ${machine}" NEEDS "two hours, the packages that cmake/${machine}.cmake names"
       BUILD ../${machine} TARGETS heed_portable TESTS -L portable -E "^(headers|macros)$"
       OPTIONS -DCMAKE_TOOLCHAIN_FILE=${HEED_SOURCE}/cmake/${machine}.cmake -DHEED_BUILD_C=OFF -DHEED_BUILD_BENCH=OFF -DHEED_BUILD_EXAMPLES=OFF)
endforeach()

# Bytes that somebody else wrote, made by libFuzzer out of the committed ones in tests/bytes/.
foreach(input IN ITEMS safetensors checkpoint vocabulary merges instructions memory dlpack c_call command_line)
  set(runs 250000)
  if(input STREQUAL "safetensors")
    set(runs 1000000)
  endif()
  lane(bytes-${input} PROMISE "libFuzzer finds nothing in 20 times ${runs} runs, or two hours, of ${input} (tests/bytes)" NEEDS "an hour, clang-19"
       BUILD bytes TARGETS heed_fuzz_bytes OPTIONS -DHEED_SANITIZE=address,undefined,fuzzer-no-link -DCMAKE_CXX_COMPILER=clang++-19 -DCMAKE_C_COMPILER=clang-19
               -DHEED_NATIVE=OFF -DHEED_C_LEVELS=x86-64-v3 -DHEED_BUILD_TORCH=OFF
       ENVIRONMENT HEED_INPUT=${input} LSAN_OPTIONS=suppressions={build}/leaks.txt
       TIMES 20 RUN sh -c "mkdir -p {build}/${input} && {build}/bin/heed_fuzz_bytes -runs=${runs} -max_total_time=360 -seed={n}1 -timeout=10 -rss_limit_mb=1024 {build}/${input} tests/bytes/${input}")
endforeach()

lane(archive PROMISE "the source archive of a commit has the same bytes from two folders" NEEDS "two minutes, doxygen"
     TIMES 1 RUN sh -c "rm -rf {build}
for n in 1 2
do
  git clone -q . {build}/tree_$n &&
  cmake -S {build}/tree_$n -B {build}/build_$n -G Ninja -DHEED_BUILD_TESTS=OFF -DHEED_BUILD_EXAMPLES=OFF -DHEED_BUILD_BENCH=OFF &&
  cmake --build {build}/build_$n -t dist || exit 1
done
cmp {build}/build_1/dist/*.gz {build}/build_2/dist/*.gz")
foreach(seed RANGE 1 4)
  lane(mutants-${seed} PROMISE "of 75 mutants of engine, simd, mask and plug the tests notice 90 % of those that change a result (tests/mutants.py, seed ${seed} of 4)" NEEDS "2 hours"
       TIMES 1 SAYS "[0-9]+ of [0-9]+ mutants noticed, [0-9]+ change no result" RUN python3 -B tests/mutants.py run 75 ${seed})
endforeach()
foreach(number RANGE 1 8)
  math(EXPR part "${number} - 1")
  lane(faults-${number} PROMISE "each fault of part ${number} of 8 of those in tests/FAULTS.md that carry their change fails its test" NEEDS "2 hours"
       TIMES 1 SAYS "[0-9]+ faults noticed, [0-9]+ not" RUN sh -c "python3 -B tests/faults.py replay $(python3 -B tests/faults.py share ${part} 8)")
endforeach()

# What each row says of where it was measured.
find_program(GIT git REQUIRED)
execute_process(COMMAND "${GIT}" -C "${HEED_SOURCE}" rev-parse --short HEAD OUTPUT_VARIABLE commit
                OUTPUT_STRIP_TRAILING_WHITESPACE COMMAND_ERROR_IS_FATAL ANY)
execute_process(COMMAND "${GIT}" -C "${HEED_SOURCE}" status --porcelain -- . ":!tests/TRUST.md" OUTPUT_VARIABLE changes)
if(changes)
  string(APPEND commit "+")
endif()
string(TIMESTAMP today "%Y-%m-%d" UTC)
set(cpuinfo "")
if(EXISTS /proc/cpuinfo)
  file(READ /proc/cpuinfo cpuinfo LIMIT 8192)
endif()
cmake_host_system_information(RESULT machine QUERY PROCESSOR_DESCRIPTION)
if(cpuinfo MATCHES "AuthenticAMD[^:]*: 26\n")
  set(machine "Zen 5")
elseif(cpuinfo MATCHES "AuthenticAMD[^:]*: 25\n")
  set(machine "Zen 3")
  if(cpuinfo MATCHES " avx512f ")
    set(machine "Zen 4")
  endif()
elseif(cpuinfo MATCHES "GenuineIntel.*: 6\nmodel[^:]*: 207\n")
  set(machine "Emerald Rapids")
elseif(cpuinfo MATCHES "GenuineIntel.*: 6\nmodel[^:]*: 106\n")
  set(machine "Ice Lake")
endif()

set(lanes "")
math(EXPR last "${CMAKE_ARGC} - 1")
foreach(i RANGE ${last})
  if(i GREATER 2 AND NOT CMAKE_ARGV${i} STREQUAL "--")
    list(APPEND lanes "${CMAKE_ARGV${i}}")
  endif()
endforeach()
if(lanes STREQUAL "--list")
  foreach(name IN LISTS HEED_LANES)
    message(NOTICE "${name}: ${${name}_PROMISE} (${${name}_NEEDS})")
  endforeach()
  return()
endif()
foreach(name IN LISTS lanes)
  if(NOT name IN_LIST HEED_LANES)
    list(JOIN HEED_LANES ", " known)
    message(FATAL_ERROR "there is no lane \"${name}\"; the lanes are ${known}")
  endif()
endforeach()
if(NOT lanes)
  set(lanes ${HEED_LANES})
endif()
foreach(lane IN LISTS lanes)
  run_lane()
  if(said)
    set(row_${lane} "| `${lane}` | ${${lane}_PROMISE} | ${said} | ${commit} | ${today} | ${machine} |")
    message(NOTICE "== ${lane}: ${said}")
    write_page()
  else()
    message(NOTICE "== ${lane}: it did not begin, and needs ${${lane}_NEEDS}")
  endif()
endforeach()
get_property(failed GLOBAL PROPERTY HEED_FAILED)
if(failed)
  list(REMOVE_DUPLICATES failed)
  list(JOIN failed ", " failed)
  message(FATAL_ERROR "lanes that fail: ${failed}")
endif()
