# SPDX-License-Identifier: Apache-2.0
# Compiles each of EXAMPLES with the generated HEADER alone into PROGRAM, and runs it.
get_filename_component(folder "${HEADER}" DIRECTORY)
foreach(example IN LISTS EXAMPLES)
  file(READ "${example}" text)
  string(REGEX REPLACE "#include <heed/[^>]*>" "#include \"heed.hpp\"" text "${text}")
  file(WRITE "${folder}/example.cpp" "${text}")
  execute_process(COMMAND "${CXX}" -std=c++20 "-I${folder}" "${folder}/example.cpp" -o "${PROGRAM}"
                  COMMAND_ERROR_IS_FATAL ANY)
  execute_process(COMMAND "${PROGRAM}" COMMAND_ERROR_IS_FATAL ANY)
endforeach()
