# SPDX-License-Identifier: Apache-2.0
# Compiles for Windows on x86-64 on another machine, and runs the programs in Wine (Debian: g++-mingw-w64-x86-64-posix, wine64):
#   cmake -P cmake/check.cmake -- -DCMAKE_TOOLCHAIN_FILE=cmake/windows.cmake
# -DCMAKE_CXX_COMPILER=clang++-19 takes clang, with the libraries of Debian's g++; it compiles for AVX, too, which the
# environment's CXXFLAGS=-march=x86-64-v3 asks for.
set(CMAKE_SYSTEM_NAME Windows)
set(CMAKE_SYSTEM_PROCESSOR x86_64)
foreach(language IN ITEMS C CXX)
  set(CMAKE_${language}_COMPILER_TARGET x86_64-w64-windows-gnu)
  # Packages of headers alone are this machine's. The folder has its C library as well, so that it is searched last.
  set(CMAKE_${language}_FLAGS_INIT "-pthread -idirafter /usr/include")
  list(APPEND CMAKE_${language}_IMPLICIT_INCLUDE_DIRECTORIES /usr/include)
endforeach()
set(CMAKE_PROJECT_INCLUDE "${CMAKE_CURRENT_LIST_FILE}")  # once more behind project(), which finds such folders
if(NOT CMAKE_CXX_COMPILER)
  set(CMAKE_CXX_COMPILER x86_64-w64-mingw32-g++-posix)
endif()
if(NOT CMAKE_C_COMPILER)
  set(CMAKE_C_COMPILER x86_64-w64-mingw32-gcc-posix)
endif()
set(CMAKE_EXE_LINKER_FLAGS_INIT -static)
set(CMAKE_PREFIX_PATH /usr)
# Programs stand alone, g++'s OpenMP included.
execute_process(COMMAND x86_64-w64-mingw32-g++-posix -print-file-name=libgomp.a OUTPUT_VARIABLE heed_gomp
                OUTPUT_STRIP_TRAILING_WHITESPACE)
set(OpenMP_gomp_LIBRARY "${heed_gomp}" CACHE FILEPATH "")
# Wine's first start makes its folder, which two programs at once do wrong.
if(NOT EXISTS "$ENV{HOME}/.wine" AND NOT DEFINED ENV{WINEPREFIX})
  execute_process(COMMAND "${CMAKE_COMMAND}" -E env WINEDEBUG=-all wine wineboot --init OUTPUT_QUIET ERROR_QUIET)
endif()
set(CMAKE_CROSSCOMPILING_EMULATOR "${CMAKE_COMMAND}" -E env WINEDEBUG=-all wine)
