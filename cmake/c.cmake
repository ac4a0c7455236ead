# SPDX-License-Identifier: Apache-2.0
# libheed: heed from C (include/heed/c.h), one shared library. On x86-64 it holds the code of three levels of the
# instruction set and chooses among them when it is first called; on other processors it holds one.
#   HEED_BUILD_C  in: AUTO (with the tests, where dlpack/dlpack.h is found), ON or OFF
#   heed_c        out: the target, also named heed::c, or none
if(HEED_BUILD_C STREQUAL "AUTO")
  set(build_c ${HEED_BUILD_TESTS})
else()
  set(build_c ${HEED_BUILD_C})
endif()
if(build_c AND NOT HEED_DLPACK_INCLUDE)
  if(HEED_BUILD_C STREQUAL "AUTO")
    message(STATUS "heed: dlpack/dlpack.h was not found, the C library libheed is left out")
    set(build_c OFF)
  else()
    message(FATAL_ERROR "heed: HEED_BUILD_C is ${HEED_BUILD_C}, but dlpack/dlpack.h was not found (Debian: libdlpack-dev)")
  endif()
endif()
if(NOT build_c)
  return()
endif()

# Function templates of the standard library have the same names at all levels, and of equal ones the linker keeps the
# first: objects are linked from the lowest level to the highest, so that code of one level never meets a function of a
# higher one. heed's own names differ by level (core/config.hpp). Link-time optimisation keeps no such order.
set(heed_c_levels native)
if(CMAKE_SYSTEM_PROCESSOR MATCHES "x86_64|AMD64")
  set(heed_c_levels x86-64-v2 x86-64-v3 x86-64-v4)
endif()

set(heed_c_folder "${CMAKE_CURRENT_BINARY_DIR}/heed_c")
set(declarations "")
set(instances "")
set(objects "")
foreach(level IN LISTS heed_c_levels)
  string(MAKE_C_IDENTIFIER "${level}" name)
  set(runs "runs_${name}")
  if(level STREQUAL "native")
    set(runs "runs_everywhere")
  endif()
  string(APPEND declarations "const heed_table& table_${name}();\n")
  string(APPEND instances "    {\"${level}\", &table_${name}, &${runs}},\n")
  # As heed::compiled, but at -O2 and without packed sequences: compile time counts three times here.
  heed_write_compiled("${heed_c_folder}" sources "")
  file(CONFIGURE OUTPUT "${heed_c_folder}/${name}.cpp" @ONLY CONTENT [[
#include <heed/c/instance.hpp>

namespace heed_c {
const heed_table& table_@name@();
const heed_table& table_@name@() { return heed::c::table<heed::c::BuiltInVariants>(); }
}
]])
  add_library(heed_c_${name} OBJECT ${sources} "${heed_c_folder}/${name}.cpp")
  target_link_libraries(heed_c_${name} PRIVATE heed)
  target_include_directories(heed_c_${name} SYSTEM PRIVATE "${HEED_DLPACK_INCLUDE}")
  target_compile_options(heed_c_${name} PRIVATE -O2 ${HEED_COMPILER_MEMORY})
  if(NOT level STREQUAL "native")
    target_compile_options(heed_c_${name} PRIVATE -march=${level})
  endif()
  list(APPEND objects $<TARGET_OBJECTS:heed_c_${name}>)
endforeach()

file(CONFIGURE OUTPUT "${heed_c_folder}/dispatch.cpp" @ONLY CONTENT [[
#include <heed/c/dispatch.hpp>

namespace heed_c {
@declarations@
const Library& library() {
  static constexpr Instance instances[] = {
@instances@  };
  static constexpr Library all{instances, int(sizeof instances / sizeof instances[0])};
  return all;
}
}
]])
add_library(heed_c SHARED "${heed_c_folder}/dispatch.cpp" ${objects})
add_library(heed::c ALIAS heed_c)
target_link_libraries(heed_c PRIVATE heed)
target_include_directories(heed_c SYSTEM PUBLIC "$<BUILD_INTERFACE:${HEED_DLPACK_INCLUDE}>")
target_include_directories(heed_c INTERFACE "$<BUILD_INTERFACE:${PROJECT_SOURCE_DIR}/include>"
                                            "$<INSTALL_INTERFACE:${CMAKE_INSTALL_INCLUDEDIR}>")
if(NOT heed_c_levels STREQUAL "native")
  target_compile_options(heed_c PRIVATE -march=x86-64)
endif()
file(WRITE "${heed_c_folder}/exports.map" "{\n  global: heed_*;\n  local: *;\n};\n")
target_link_options(heed_c PRIVATE "LINKER:--version-script=${heed_c_folder}/exports.map")
set_target_properties(heed_c PROPERTIES OUTPUT_NAME heed VERSION ${PROJECT_VERSION}
                                        SOVERSION ${PROJECT_VERSION_MAJOR})
set(libraries heed_c)
foreach(level IN LISTS heed_c_levels)
  string(MAKE_C_IDENTIFIER "${level}" name)
  list(APPEND libraries heed_c_${name})
endforeach()
set_target_properties(${libraries} PROPERTIES POSITION_INDEPENDENT_CODE ON CXX_VISIBILITY_PRESET hidden
                                              VISIBILITY_INLINES_HIDDEN ON INTERPROCEDURAL_OPTIMIZATION OFF)
if(HEED_SANITIZE)
  foreach(library IN LISTS libraries)
    target_compile_options(${library} PRIVATE -O1 -g1 -fsanitize=${HEED_SANITIZE} -fno-sanitize-recover=all)
  endforeach()
  target_link_options(heed_c PUBLIC -fsanitize=${HEED_SANITIZE})
endif()

# The library, its links and a pkg-config file, libheed.pc, for compilers of C; with the headers a component of its own.
if(HEED_INSTALL)
  set(heed_c_pc_dir "${CMAKE_INSTALL_LIBDIR}/pkgconfig")
  file(RELATIVE_PATH HEED_C_PC_UP "/prefix/${heed_c_pc_dir}" /prefix)
  string(REGEX REPLACE "/$" "" HEED_C_PC_UP "${HEED_C_PC_UP}")
  foreach(kind IN ITEMS LIBDIR INCLUDEDIR)
    set(HEED_C_PC_${kind} "\${prefix}")
    cmake_path(APPEND HEED_C_PC_${kind} "${CMAKE_INSTALL_${kind}}")
  endforeach()
  configure_file(cmake/libheed.pc.in libheed.pc @ONLY)
  install(TARGETS heed_c LIBRARY COMPONENT heed_c NAMELINK_COMPONENT heed_c)
  install(FILES "${PROJECT_BINARY_DIR}/libheed.pc" DESTINATION "${heed_c_pc_dir}" COMPONENT heed_c)
endif()
