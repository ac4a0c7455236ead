# SPDX-License-Identifier: Apache-2.0
# The part of the build that depends on the user's machine and compiler, for the source tree and the
# installed package.
#   HEED_CORE_TARGET  in: the target that carries the include path
#   HEED_OPENMP       in: AUTO (default), ON or OFF
#   heed::io          out, if nlohmann_json is found: heed, and the needs of headers that read or
#                     write safetensors
#   heed::native      out: -march=native, nothing when compiling for another machine; every translation unit that sees heed
#                     or Eigen, or none
#   HEED_USAGE_ERROR  out: the reason why the wishes cannot be met, or empty
set(HEED_USAGE_ERROR "")

# Packages found here are made visible if a parent of this directory links heed.
macro(heed_find_global package target)
  if(NOT TARGET ${target})
    find_package(${package} QUIET ${ARGN})
    if(TARGET ${target})
      set_target_properties(${target} PROPERTIES IMPORTED_GLOBAL TRUE)
    endif()
  endif()
endmacro()

if(NOT DEFINED HEED_OPENMP)
  set(HEED_OPENMP AUTO)
endif()
if(HEED_OPENMP)
  heed_find_global(OpenMP OpenMP::OpenMP_CXX COMPONENTS CXX)
  if(TARGET OpenMP::OpenMP_CXX)
    target_link_libraries(${HEED_CORE_TARGET} INTERFACE $<BUILD_INTERFACE:OpenMP::OpenMP_CXX>)
  elseif(NOT HEED_OPENMP STREQUAL "AUTO")
    set(HEED_USAGE_ERROR "heed: HEED_OPENMP is ${HEED_OPENMP}, but OpenMP was not found")
  endif()
endif()

heed_find_global(nlohmann_json nlohmann_json::nlohmann_json CONFIG)
if(TARGET nlohmann_json::nlohmann_json AND NOT TARGET heed::io)
  add_library(heed::io INTERFACE IMPORTED GLOBAL)
  target_link_libraries(heed::io INTERFACE heed::heed nlohmann_json::nlohmann_json)
endif()

if(NOT TARGET heed::native)
  include(CheckCXXCompilerFlag)
  check_cxx_compiler_flag(-march=native HEED_HAS_MARCH_NATIVE)
  add_library(heed::native INTERFACE IMPORTED GLOBAL)
  if(HEED_HAS_MARCH_NATIVE AND NOT CMAKE_CROSSCOMPILING)
    target_compile_options(heed::native INTERFACE -march=native)
  endif()
endif()
