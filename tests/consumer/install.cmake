# SPDX-License-Identifier: Apache-2.0
# Installs heed from BUILD and moves the result to STAGE: an installed heed can be moved.
file(REMOVE_RECURSE "${STAGE}" "${STAGE}-before")
execute_process(COMMAND "${CMAKE_COMMAND}" --install "${BUILD}" --prefix "${STAGE}-before"
                        --component heed COMMAND_ERROR_IS_FATAL ANY)
file(RENAME "${STAGE}-before" "${STAGE}")
