# SPDX-License-Identifier: Apache-2.0
# libheed: heed from C (include/heed/c.h), as a shared and a static library. On x86-64 it holds the code of three levels of
# the instruction set, on 64-bit Arm of two, and chooses among them when it is first called; on other processors it holds one.
#   HEED_BUILD_C   in: AUTO (with the tests, where dlpack/dlpack.h is found), ON or OFF
#   HEED_C_LEVELS  in: the levels, from the lowest to the highest; empty for all
#   heed_c         out: the shared library, also named heed::c, or none
#   heed_c_static  out: the static library, also named heed::c_static; none where binutils cannot make it
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
if(build_c AND WIN32)
  message(STATUS "heed: the C library libheed is not made for Windows")
  set(build_c OFF)
endif()
if(NOT build_c)
  return()
endif()

# Function templates of the standard library have the same names at all levels, and the linker keeps
# the first of equal ones: objects are linked from the lowest level to the highest, so that code of
# one level never meets a function of a higher one. heed's own names differ by level
# (core/config.hpp). Link-time optimisation keeps no such order.
set(heed_c_levels native)
if(CMAKE_SYSTEM_PROCESSOR MATCHES "x86_64|AMD64")
  set(heed_c_levels x86-64-v2 x86-64-v3 x86-64-v4)
elseif(CMAKE_SYSTEM_PROCESSOR MATCHES "aarch64|arm64")
  set(heed_c_levels armv8-a armv8.2-a+bf16)
endif()
set(HEED_C_LEVELS "" CACHE STRING "The instruction sets of libheed, from the lowest to the highest; empty for all that heed has")
if(HEED_C_LEVELS)
  set(heed_c_levels ${HEED_C_LEVELS})
endif()

# A level that needs no flags has the code of heed::compiled, unless this machine's flags have gone into that.
set(heed_c_flags "")
if(HEED_NATIVE)
  get_target_property(heed_c_flags heed::native INTERFACE_COMPILE_OPTIONS)
endif()

set(heed_c_folder "${CMAKE_CURRENT_BINARY_DIR}/heed_c")
set(declarations "")
set(instances "")
set(objects $<TARGET_OBJECTS:heed_c_dispatch>)
foreach(level IN LISTS heed_c_levels)
  string(MAKE_C_IDENTIFIER "${level}" name)
  set(runs "runs_${name}")
  set(flags "-march=${level}")
  if(level MATCHES "^(native|armv8-a)$")
    set(runs "runs_everywhere")
    set(flags "")
  endif()
  string(APPEND declarations "const heed_table& table_${name}();\n")
  string(APPEND instances "    {\"${level}\", &table_${name}, &${runs}},\n")
  # Compiled as heed::compiled is, but at -O2: compile time counts three times here.
  set(ops "")
  set(engine "")
  if(NOT flags AND NOT heed_c_flags)
    list(APPEND objects $<TARGET_OBJECTS:heed_engine> $<TARGET_OBJECTS:heed_compiled>)
  else()
    heed_write_compiled("${heed_c_folder}" ops)
    heed_write_engine("${heed_c_folder}" engine)
  endif()
  file(CONFIGURE OUTPUT "${heed_c_folder}/${name}.cpp" @ONLY CONTENT [[
#include <heed/c/instance.hpp>
#include <heed/compiled.hpp>

namespace heed_c {
const heed_table& table_@name@();
const heed_table& table_@name@() { return heed::c::table<heed::c::BuiltInVariants>(); }
}
]])
  add_library(heed_c_${name} OBJECT ${ops} ${engine} "${heed_c_folder}/${name}.cpp")
  target_link_libraries(heed_c_${name} PRIVATE heed)
  target_include_directories(heed_c_${name} SYSTEM PRIVATE "${HEED_DLPACK_INCLUDE}")
  target_compile_options(heed_c_${name} PRIVATE -O2 ${HEED_COMPILER_MEMORY})
  if(flags)
    target_compile_options(heed_c_${name} PRIVATE ${flags})
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
add_library(heed_c_dispatch OBJECT "${heed_c_folder}/dispatch.cpp")
target_link_libraries(heed_c_dispatch PRIVATE heed)
target_include_directories(heed_c_dispatch SYSTEM PRIVATE "${HEED_DLPACK_INCLUDE}")
if(CMAKE_SYSTEM_PROCESSOR MATCHES "x86_64|AMD64")
  target_compile_options(heed_c_dispatch PRIVATE -march=x86-64)
endif()
add_library(heed_c SHARED ${objects})
target_link_libraries(heed_c PRIVATE heed)
file(WRITE "${heed_c_folder}/exports.map" "{\n  global: heed_*;\n  local: *;\n};\n")
target_link_options(heed_c PRIVATE "LINKER:--version-script=${heed_c_folder}/exports.map")
set_target_properties(heed_c PROPERTIES VERSION ${PROJECT_VERSION} SOVERSION ${PROJECT_VERSION_MAJOR})
set(heed_c_libraries heed_c)

# The archive holds one object, made of those above in the same order, in which all names but those
# of c.h are local, so that other code in a program can neither use nor replace a level's functions.
# The libraries that C++ needs at run time are named, so that the linker of a C compiler suffices.
# Debian's OpenMP of clang lies in a folder that only clang's own -fopenmp knows.
set(heed_c_runtime_folders "")
set(heed_c_runtime ${CMAKE_CXX_IMPLICIT_LINK_LIBRARIES})
list(FILTER heed_c_runtime INCLUDE REGEX "^(stdc\\+\\+|c\\+\\+|c\\+\\+abi|m)$")
if(HEED_OPENMP AND TARGET OpenMP::OpenMP_CXX)
  list(APPEND heed_c_runtime ${OpenMP_CXX_LIB_NAMES})
  foreach(name IN LISTS OpenMP_CXX_LIB_NAMES)
    cmake_path(GET OpenMP_${name}_LIBRARY PARENT_PATH folder)
    if(folder AND NOT folder IN_LIST CMAKE_CXX_IMPLICIT_LINK_DIRECTORIES)
      list(APPEND heed_c_runtime_folders "${folder}")
    endif()
  endforeach()
endif()
list(APPEND heed_c_runtime pthread)
list(REMOVE_DUPLICATES heed_c_runtime)
find_program(HEED_BINUTILS_LD NAMES ld.bfd ld)
mark_as_advanced(HEED_BINUTILS_LD)
set(heed_c_linker "")
foreach(linker IN ITEMS "${CMAKE_LINKER}" "${HEED_BINUTILS_LD}")  # clang's own linker may lack the option
  if(linker AND NOT heed_c_linker)
    execute_process(COMMAND "${linker}" --help OUTPUT_VARIABLE help ERROR_QUIET)
    if(help MATCHES "--force-group-allocation")
      set(heed_c_linker "${linker}")
    endif()
  endif()
endforeach()
if(CMAKE_OBJCOPY AND heed_c_linker)
  set(together "${heed_c_folder}/together.o")
  set(object "${heed_c_folder}/heed.o")
  add_custom_command(
    OUTPUT "${object}" DEPENDS ${objects}
    COMMAND "${heed_c_linker}" -r --force-group-allocation -o "${together}" ${objects}
    COMMAND "${CMAKE_OBJCOPY}" --wildcard "--keep-global-symbol=heed_*" "${together}" "${object}"
    COMMAND "${CMAKE_COMMAND}" -E rm "${together}"
    VERBATIM COMMAND_EXPAND_LISTS COMMENT "Making libheed.a's object")
  add_library(heed_c_static STATIC "${object}")
  set_source_files_properties("${object}" PROPERTIES EXTERNAL_OBJECT TRUE GENERATED TRUE)
  set_target_properties(heed_c_static PROPERTIES LINKER_LANGUAGE CXX)
  target_link_directories(heed_c_static INTERFACE ${heed_c_runtime_folders})
  target_link_libraries(heed_c_static INTERFACE ${heed_c_runtime})
  if(NOT HEED_INSTALL)
    set_target_properties(heed_c_static PROPERTIES EXCLUDE_FROM_ALL ON)
  endif()
  list(APPEND heed_c_libraries heed_c_static)
else()
  message(STATUS "heed: there is no objcopy, or ld has no --force-group-allocation: heed::c_static is left out")
endif()
foreach(library IN LISTS heed_c_libraries)
  string(REPLACE heed_ "" name "${library}")
  add_library(heed::${name} ALIAS ${library})
  set_target_properties(${library} PROPERTIES OUTPUT_NAME heed EXPORT_NAME ${name})
  target_include_directories(${library} SYSTEM INTERFACE "$<BUILD_INTERFACE:${HEED_DLPACK_INCLUDE}>")
  target_include_directories(${library} INTERFACE "$<BUILD_INTERFACE:${PROJECT_SOURCE_DIR}/include>"
                                                  "$<INSTALL_INTERFACE:${CMAKE_INSTALL_INCLUDEDIR}>")
endforeach()

set(compiled heed_c heed_c_dispatch)
if("$<TARGET_OBJECTS:heed_engine>" IN_LIST objects)
  list(APPEND compiled heed_engine heed_compiled)
endif()
foreach(level IN LISTS heed_c_levels)
  string(MAKE_C_IDENTIFIER "${level}" name)
  list(APPEND compiled heed_c_${name})
endforeach()
set_target_properties(${compiled} PROPERTIES POSITION_INDEPENDENT_CODE ON CXX_VISIBILITY_PRESET hidden
                                             VISIBILITY_INLINES_HIDDEN ON INTERPROCEDURAL_OPTIMIZATION OFF)
# objcopy leaves g++'s unique symbols global.
set_property(TARGET ${compiled} APPEND PROPERTY COMPILE_OPTIONS $<$<CXX_COMPILER_ID:GNU>:-fno-gnu-unique>)
if(HEED_SANITIZE)
  foreach(library IN LISTS compiled)
    target_compile_options(${library} PRIVATE ${HEED_SANITIZED})
  endforeach()
  target_link_options(heed_c PRIVATE -fsanitize=${HEED_SANITIZE})
  foreach(library IN LISTS heed_c_libraries)
    target_link_options(${library} INTERFACE -fsanitize=${HEED_SANITIZE})
  endforeach()
endif()

# Installs the libraries, their links, a CMake package (heed-config.cmake reads it) and libheed.pc
# for pkg-config, as a component of its own beside the headers.
if(HEED_INSTALL)
  set(heed_c_pc_dir "${CMAKE_INSTALL_LIBDIR}/pkgconfig")
  file(RELATIVE_PATH HEED_C_PC_UP "/prefix/${heed_c_pc_dir}" /prefix)
  string(REGEX REPLACE "/$" "" HEED_C_PC_UP "${HEED_C_PC_UP}")
  foreach(kind IN ITEMS LIBDIR INCLUDEDIR)
    set(HEED_C_PC_${kind} "\${prefix}")
    cmake_path(APPEND HEED_C_PC_${kind} "${CMAKE_INSTALL_${kind}}")
  endforeach()
  list(TRANSFORM heed_c_runtime PREPEND "-l")
  list(TRANSFORM heed_c_runtime_folders PREPEND "-L")
  list(PREPEND heed_c_runtime ${heed_c_runtime_folders})
  list(JOIN heed_c_runtime " " HEED_C_PC_RUNTIME)
  configure_file(cmake/libheed.pc.in libheed.pc @ONLY)
  install(TARGETS ${heed_c_libraries} EXPORT heed-c-targets LIBRARY COMPONENT heed_c NAMELINK_COMPONENT heed_c
                                                            ARCHIVE COMPONENT heed_c)
  install(FILES "${PROJECT_BINARY_DIR}/libheed.pc" DESTINATION "${heed_c_pc_dir}" COMPONENT heed_c)
  # It looks for libheed.so in the folder above its own.
  install(FILES examples/python/heed.py DESTINATION "${CMAKE_INSTALL_LIBDIR}/heed" COMPONENT heed_python)
endif()
