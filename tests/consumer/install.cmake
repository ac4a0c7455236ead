# SPDX-License-Identifier: Apache-2.0
# Installs COMPONENTS of heed from BUILD and moves the result to STAGE: an installed heed can be moved.
file(REMOVE_RECURSE "${STAGE}" "${STAGE}-before")
foreach(component IN LISTS COMPONENTS)
  execute_process(COMMAND "${CMAKE_COMMAND}" --install "${BUILD}" --prefix "${STAGE}-before"
                          --component ${component} COMMAND_ERROR_IS_FATAL ANY)
endforeach()
file(RENAME "${STAGE}-before" "${STAGE}")
