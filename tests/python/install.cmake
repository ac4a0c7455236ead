# SPDX-License-Identifier: Apache-2.0
# Installs the package of examples/python as include/heed/c/README.md says, and its wheel beside NumPy alone; both must compute.
#   PYTHON, SOURCE, FOLDER  in: a Python that has venv and NumPy, heed's tree, where to work
file(REMOVE_RECURSE "${FOLDER}")
file(MAKE_DIRECTORY "${FOLDER}")
set(compute "import heed; assert heed.__file__.startswith('${FOLDER}'), heed.__file__; heed.compare(['sdpa', 'dar', 'intent', 'differential-v2'], length=24, dim=8, turns=1)")
macro(run)
  execute_process(COMMAND ${ARGN} WORKING_DIRECTORY "${SOURCE}" COMMAND_ERROR_IS_FATAL ANY)
endmacro()
run("${PYTHON}" -m venv --system-site-packages "${FOLDER}/v")
run("${FOLDER}/v/bin/pip" install --no-build-isolation ./examples/python)
run("${CMAKE_COMMAND}" -E chdir "${FOLDER}" "${FOLDER}/v/bin/python" -B -c "${compute}")

run("${FOLDER}/v/bin/pip" wheel --no-build-isolation --no-deps --wheel-dir "${FOLDER}" ./examples/python)
run("${PYTHON}" -m venv "${FOLDER}/bare")
execute_process(COMMAND "${PYTHON}" -c "import numpy; print(numpy.__path__[0])" OUTPUT_VARIABLE numpy
                OUTPUT_STRIP_TRAILING_WHITESPACE COMMAND_ERROR_IS_FATAL ANY)
file(GLOB packages "${FOLDER}/bare/lib/python3*/site-packages")
file(CREATE_LINK "${numpy}" "${packages}/numpy" SYMBOLIC)
file(GLOB wheel "${FOLDER}/heed-*-py3-none-*.whl")
run("${FOLDER}/bare/bin/pip" install --no-index --no-deps "${wheel}")
run("${CMAKE_COMMAND}" -E chdir "${FOLDER}" "${FOLDER}/bare/bin/python" -B -c "${compute}")
file(REMOVE_RECURSE "${SOURCE}/examples/python/build" "${SOURCE}/examples/python/heed.egg-info")
