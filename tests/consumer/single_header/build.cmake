# SPDX-License-Identifier: Apache-2.0
# Compiles EXAMPLE, whose heed is the generated HEADER and no other, into PROGRAM, and runs it.
get_filename_component(folder "${HEADER}" DIRECTORY)
file(READ "${EXAMPLE}" text)
string(REPLACE "#include <heed/attention.hpp>" "#include \"heed.hpp\"" text "${text}")
if(text MATCHES "#include <heed/")
  message(FATAL_ERROR "${EXAMPLE} includes more of heed than heed/attention.hpp")
endif()
file(WRITE "${folder}/example.cpp" "${text}")
execute_process(COMMAND "${CXX}" -std=c++20 "-I${folder}" "${folder}/example.cpp" -o "${PROGRAM}"
                COMMAND_ERROR_IS_FATAL ANY)
execute_process(COMMAND "${PROGRAM}" COMMAND_ERROR_IS_FATAL ANY)
