# SPDX-License-Identifier: Apache-2.0
# Writes OUT/heed-VERSION.tar.gz, the commit that is checked out with heed as one header (SINGLE) and its pages as HTML (PAGES, where
# they were made) beside it. One commit has one archive, byte for byte, whoever packs it.
#   cmake -DSOURCE=the checkout -DVERSION=... -DOUT=... -DSINGLE=... -DPAGES=... -P dist.cmake
foreach(program IN ITEMS git tar gzip)
  string(TOUPPER ${program} variable)
  find_program(${variable} ${program} REQUIRED)
endforeach()
function(ask out)
  execute_process(COMMAND ${ARGN} WORKING_DIRECTORY "${SOURCE}" OUTPUT_VARIABLE answer OUTPUT_STRIP_TRAILING_WHITESPACE
                  COMMAND_ERROR_IS_FATAL ANY)
  set(${out} "${answer}" PARENT_SCOPE)
endfunction()

ask(changes "${GIT}" status --porcelain)
if(changes)
  message(FATAL_ERROR "an archive has what is committed, and these files differ from it:\n${changes}")
endif()
ask(time "${GIT}" log -1 --format=%ct)

set(name "heed-${VERSION}")
set(tree "${OUT}/${name}")
file(REMOVE_RECURSE "${OUT}")
file(MAKE_DIRECTORY "${OUT}")
ask(nothing "${GIT}" archive --prefix=${name}/ --output=${OUT}/tree.tar HEAD)
ask(nothing "${TAR}" -xf "${OUT}/tree.tar" -C "${OUT}")
file(COPY "${SINGLE}" DESTINATION "${tree}/single")
if(IS_DIRECTORY "${PAGES}")
  file(COPY "${PAGES}" DESTINATION "${tree}")
endif()
ask(nothing "${TAR}" --sort=name --mtime=@${time} --owner=0 --group=0 --numeric-owner --mode=u=rwX,go=rX --format=ustar
    -C "${OUT}" -cf "${OUT}/${name}.tar" ${name})
ask(nothing "${GZIP}" -9n "${OUT}/${name}.tar")
file(REMOVE_RECURSE "${tree}" "${OUT}/tree.tar")
file(SHA256 "${OUT}/${name}.tar.gz" sum)
message(NOTICE "${sum}  ${OUT}/${name}.tar.gz")
