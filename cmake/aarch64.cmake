# SPDX-License-Identifier: Apache-2.0
# Compiles for 64-bit Arm on another machine, and runs the programs in qemu (Debian: g++-aarch64-linux-gnu, qemu-user):
#   cmake -P cmake/check.cmake -- -DCMAKE_TOOLCHAIN_FILE=cmake/aarch64.cmake
# -DCMAKE_CXX_COMPILER=clang++ takes clang, with the libraries of Debian's g++.
set(CMAKE_SYSTEM_NAME Linux)
set(CMAKE_SYSTEM_PROCESSOR aarch64)
foreach(language IN ITEMS C CXX)
  set(CMAKE_${language}_COMPILER_TARGET aarch64-linux-gnu)
endforeach()
if(NOT CMAKE_CXX_COMPILER)
  set(CMAKE_CXX_COMPILER aarch64-linux-gnu-g++)
endif()
if(NOT CMAKE_C_COMPILER)
  set(CMAKE_C_COMPILER aarch64-linux-gnu-gcc)
endif()
# All instructions that qemu knows, bfloat16 among them.
set(CMAKE_CROSSCOMPILING_EMULATOR qemu-aarch64 -cpu max -L /usr/aarch64-linux-gnu)
