# SPDX-License-Identifier: Apache-2.0
# Runs the recipes of RECIPES for conan and vcpkg below FOLDER; a project must find what they make. PYTHON may be empty.
function(find_heed folder)
  file(REMOVE_RECURSE "${FOLDER}/consumer")
  execute_process(COMMAND "${CMAKE_COMMAND}" -S "${CMAKE_CURRENT_LIST_DIR}" -B "${FOLDER}/consumer" "-DCMAKE_CXX_COMPILER=${CXX}"
                          "-DPACKAGE=${folder}" COMMAND_ERROR_IS_FATAL ANY)
endfunction()

execute_process(COMMAND "${CMAKE_COMMAND}" "-DPORT=${RECIPES}/vcpkg/heed" "-DFOLDER=${FOLDER}/vcpkg"
                        -P "${CMAKE_CURRENT_LIST_DIR}/vcpkg.cmake" COMMAND_ERROR_IS_FATAL ANY)
find_heed("${FOLDER}/vcpkg/packages/heed/share/heed")
if(PYTHON)
  execute_process(COMMAND "${PYTHON}" -B "${CMAKE_CURRENT_LIST_DIR}/conan.py" "${RECIPES}/conanfile.py" "${FOLDER}/conan"
                  OUTPUT_VARIABLE package OUTPUT_STRIP_TRAILING_WHITESPACE COMMAND_ERROR_IS_FATAL ANY)
  find_heed("${package}")
endif()
