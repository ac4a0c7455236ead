# SPDX-License-Identifier: Apache-2.0
# Turns the formula of a score of your own into a library for torch.ops.load_library, with this machine's instructions:
#   cmake -P examples/torch/own.cmake FORMULA.hpp [FOLDER]
# my_score.hpp holds a class template MyScore as heed/plug/own_score.hpp describes it.
# FOLDER/libmy_score.so (in the current folder by default) then registers torch.ops.heed.my_score,
# with gradients for all tensors and learnt parameters.
cmake_minimum_required(VERSION 3.22)
if(CMAKE_ARGC LESS 4 OR CMAKE_ARGC GREATER 5)
  message(FATAL_ERROR "usage: cmake -P own.cmake FORMULA.hpp [FOLDER]")
endif()
get_filename_component(formula "${CMAKE_ARGV3}" ABSOLUTE)
get_filename_component(name "${formula}" NAME_WE)
set(folder ".")
if(CMAKE_ARGC EQUAL 5)
  set(folder "${CMAKE_ARGV4}")
endif()
get_filename_component(folder "${folder}" ABSOLUTE)
if(NOT EXISTS "${formula}")
  message(FATAL_ERROR "there is no file ${CMAKE_ARGV3}")
endif()
if(NOT name MATCHES "^[a-z][a-z0-9_]*$")
  message(FATAL_ERROR "the file is named ${name}.hpp, its name must be lower-case letters, digits and underscores: my_score.hpp holds MyScore")
endif()

set(build "${folder}/${name}.build")
set(builder "")
find_program(ninja NAMES ninja ninja-build)
if(ninja AND NOT EXISTS "${build}/CMakeCache.txt")
  set(builder -G Ninja)
endif()
execute_process(COMMAND "${CMAKE_COMMAND}" --log-level=NOTICE -S "${CMAKE_CURRENT_LIST_DIR}/own" -B "${build}" ${builder}
                        -DCMAKE_BUILD_TYPE=Release "-DFORMULA=${formula}" "-DOUTPUT=${folder}"
                RESULT_VARIABLE result)
if(NOT result EQUAL 0)
  message(FATAL_ERROR "configuring failed; the reason stands above")
endif()
execute_process(COMMAND "${CMAKE_COMMAND}" --build "${build}" RESULT_VARIABLE result)
if(NOT result EQUAL 0)
  message(FATAL_ERROR "compiling ${CMAKE_ARGV3} failed; the compiler's first error says why")
endif()
message(NOTICE "torch.ops.load_library(\"${folder}/lib${name}.so\") has torch.ops.heed.${name}")
