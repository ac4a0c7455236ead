# SPDX-License-Identifier: Apache-2.0
# heed::engine: the engine, which knows no op, once; with <heed/compiled_engine.hpp>.
# heed::compiled: besides, forward() and backward() of heed's own variants; with <heed/compiled.hpp>.
# They are built only if something links them, with the flags of the project that requests them. These must
# be the flags of the files that include heed: another instruction set is an undefined reference.
# For this machine's instruction set:
#   target_link_libraries(heed_engine PUBLIC heed::native)
# Headers are the only lists of what the libraries hold: source files are made from their lines `extern template`. The
# ops' doors, which heed/compiled.hpp promises, go into four files, every fourth line into one, so that they compile beside
# each other and read heed's headers four times. The engine's, which heed/compiled_engine.hpp and heed/mpi/compiled_ranks.hpp promise, go into two, by scalar.
#   HEED_CORE_TARGET  in: the target that carries the include path
#   HEED_INCLUDE      in: that path
#
# heed_write_compiled(folder out): sets `out` to the files of the ops in `folder`.
function(heed_write_compiled folder out)
  set(files 4)
  set(header "${HEED_INCLUDE}/heed/compiled.hpp")
  set_property(DIRECTORY APPEND PROPERTY CMAKE_CONFIGURE_DEPENDS "${header}")
  file(READ "${header}" text)
  string(REGEX MATCHALL "extern template struct [^;]*" promises "${text}")
  list(TRANSFORM promises REPLACE "^extern " "")
  list(LENGTH promises count)
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

namespace heed {
inline namespace HEED_ABI {
static_assert(2 * detail::kCompiledPlaces == @count@, "heed/compiled.hpp: kCompiledPlaces and the lines behind it differ");
@doors@}
}
]])
    list(APPEND sources "${source}")
  endforeach()
  set(${out} "${sources}" PARENT_SCOPE)
endfunction()

# heed_write_engine(folder out): sets `out` to the files of the engine in `folder`. They include the headers that define what
# is promised.
function(heed_write_engine folder out)
  set(text "")
  foreach(header compiled_engine.hpp mpi/compiled_ranks.hpp)
    set_property(DIRECTORY APPEND PROPERTY CMAKE_CONFIGURE_DEPENDS "${HEED_INCLUDE}/heed/${header}")
    file(READ "${HEED_INCLUDE}/heed/${header}" part)
    string(APPEND text "${part}")
  endforeach()
  set(sources "")
  foreach(scalar float double)
    string(REGEX MATCHALL "extern template [^;]*<${scalar}[,>][^;]*" promises "${text}")
    if(scalar STREQUAL "float")
      string(REGEX MATCHALL "extern template [^;]*<BfloatPair>[^;]*" pairs "${text}")
      list(APPEND promises ${pairs})
    endif()
    list(TRANSFORM promises REPLACE "^extern " "")
    set(definitions "")
    foreach(promise IN LISTS promises)
      string(APPEND definitions "${promise};\n")
    endforeach()
    file(CONFIGURE OUTPUT "${folder}/engine_${scalar}.cpp" @ONLY CONTENT [[
#include <heed/compiled_engine.hpp>
#include <heed/engine/explain.hpp>
#include <heed/engine/hvp.hpp>
#include <heed/mpi/compiled_ranks.hpp>

namespace heed {
inline namespace HEED_ABI {
@definitions@}
}
]])
    list(APPEND sources "${folder}/engine_${scalar}.cpp")
  endforeach()
  set(${out} "${sources}" PARENT_SCOPE)
endfunction()

function(heed_add_libraries)
  set(folder "${CMAKE_CURRENT_BINARY_DIR}/heed_compiled")
  heed_write_engine("${folder}" engine)
  add_library(heed_engine STATIC EXCLUDE_FROM_ALL ${engine})
  add_library(heed::engine ALIAS heed_engine)
  target_link_libraries(heed_engine PUBLIC ${HEED_CORE_TARGET})
  heed_write_compiled("${folder}" ops)
  add_library(heed_compiled STATIC EXCLUDE_FROM_ALL ${ops})
  add_library(heed::compiled ALIAS heed_compiled)
  target_link_libraries(heed_compiled PUBLIC heed_engine)
endfunction()

if(NOT TARGET heed_compiled)
  heed_add_libraries()
endif()
