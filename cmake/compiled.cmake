# SPDX-License-Identifier: Apache-2.0
# heed::compiled: forward() and backward() of heed's own variants, once; with <heed/compiled.hpp>. Built only
# if something links it, with the flags of the project that asks for it, which must be those of the files that
# include heed: another instruction set is an undefined reference. For this machine's:
#   target_link_libraries(heed_compiled PUBLIC heed::native)
# Headers are the only lists of what the library holds: its source files are made from their lines `extern template`. The
# ops' doors, which heed/compiled.hpp promises, go into four files, every fourth line into one, so that they compile beside
# each other and read heed's headers four times. One more file is heed/compiled_engine.hpp without the word "extern".
#   HEED_CORE_TARGET  in: the target that carries the include path
#   HEED_INCLUDE      in: that path
#
# heed_write_compiled(folder out include): sets `out` to these files in `folder`; those of the ops include `include`
# beside the engine's promises, or nothing if it is empty.
function(heed_write_compiled folder out include)
  set(files 4)
  set(header "${HEED_INCLUDE}/heed/compiled.hpp")
  set_property(DIRECTORY APPEND PROPERTY CMAKE_CONFIGURE_DEPENDS "${header}")
  file(READ "${header}" text)
  string(REGEX MATCHALL "extern template struct [^;]*" promises "${text}")
  list(TRANSFORM promises REPLACE "^extern " "")
  list(LENGTH promises count)
  set(more "")
  if(include)
    set(more "#include <${include}>\n")
  endif()
  set(sources "")
  math(EXPR last "${count} - 1")
  math(EXPR last_file "${files} - 1")
  foreach(file RANGE ${last_file})
    set(doors "")
    foreach(place RANGE ${file} ${last} ${files})
      list(GET promises ${place} promise)
      string(APPEND doors "${promise};\n")
    endforeach()
    set(source "${folder}/ops_${file}.cpp")
    file(CONFIGURE OUTPUT "${source}" @ONLY CONTENT [[
#include <heed/compiled.hpp>
#include <heed/compiled_engine.hpp>
@more@
namespace heed {
inline namespace HEED_ABI {
static_assert(2 * detail::kCompiledPlaces == @count@, "heed/compiled.hpp: kCompiledPlaces and the lines behind it differ");
@doors@}
}
]])
    list(APPEND sources "${source}")
  endforeach()
  heed_write_engine("${folder}/engine.cpp")
  list(APPEND sources "${folder}/engine.cpp")
  set(${out} "${sources}" PARENT_SCOPE)
endfunction()

function(heed_add_compiled)
  heed_write_compiled("${CMAKE_CURRENT_BINARY_DIR}/heed_compiled" sources "heed/engine/packed_doors.hpp")
  add_library(heed_compiled STATIC EXCLUDE_FROM_ALL ${sources})
  add_library(heed::compiled ALIAS heed_compiled)
  target_link_libraries(heed_compiled PUBLIC ${HEED_CORE_TARGET})
endfunction()

# heed_write_engine(source): writes the file `source`, which defines what heed/compiled_engine.hpp promises.
function(heed_write_engine source)
  set(header "${HEED_INCLUDE}/heed/compiled_engine.hpp")
  set_property(DIRECTORY APPEND PROPERTY CMAKE_CONFIGURE_DEPENDS "${header}")
  file(READ "${header}" engine)
  string(REPLACE "extern template" "template" engine "${engine}")
  string(REPLACE "#pragma once" "" engine "${engine}")
  file(CONFIGURE OUTPUT "${source}" @ONLY CONTENT "${engine}")
endfunction()

if(NOT TARGET heed_compiled)
  heed_add_compiled()
endif()
