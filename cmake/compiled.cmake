# SPDX-License-Identifier: Apache-2.0
# heed::compiled: forward() and backward() of heed's own variants, once; with <heed/compiled.hpp>. Built only
# if something links it, with the flags of the project that asks for it, which must be those of the files that
# include heed: another instruction set is an undefined reference. For this machine's:
#   target_link_libraries(heed_compiled PUBLIC heed::native)
#   HEED_CORE_TARGET  in: the target that carries the include path
#   HEED_INCLUDE      in: that path
function(heed_add_compiled)
  file(STRINGS "${HEED_INCLUDE}/heed/compiled.hpp" promises REGEX "^extern template ")
  set(ops "")
  foreach(promise IN LISTS promises)
    if(NOT promise MATCHES "Door<([A-Za-z0-9]+)<(float|double)>>")
      message(FATAL_ERROR "heed/compiled.hpp: this line promises no op: ${promise}")
    endif()
    list(APPEND ops ${CMAKE_MATCH_1})
    string(APPEND code_${CMAKE_MATCH_1} "template struct detail::Door<${CMAKE_MATCH_1}<${CMAKE_MATCH_2}>>;\n")
  endforeach()
  list(REMOVE_DUPLICATES ops)

  set(sources "")
  foreach(op IN LISTS ops)
    set(source "${CMAKE_CURRENT_BINARY_DIR}/heed_compiled/${op}.cpp")
    set(HEED_CODE "${code_${op}}")
    file(CONFIGURE OUTPUT "${source}" @ONLY CONTENT
         "#include <heed/compiled.hpp>\n#include <heed/engine/doors.hpp>\n
namespace heed {\ninline namespace HEED_ABI {\n@HEED_CODE@}\n}\n")
    list(APPEND sources "${source}")
  endforeach()
  add_library(heed_compiled STATIC EXCLUDE_FROM_ALL ${sources})
  add_library(heed::compiled ALIAS heed_compiled)
  target_link_libraries(heed_compiled PUBLIC ${HEED_CORE_TARGET})
endfunction()

if(NOT TARGET heed_compiled)
  heed_add_compiled()
endif()
