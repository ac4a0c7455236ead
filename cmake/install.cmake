# SPDX-License-Identifier: Apache-2.0
# Headers, CMake package and pkg-config file; nothing of it depends on the architecture or on the
# prefix. With HEED_INSTALL_COMPILED also the libraries heed_engine and heed_compiled, which are built with the flags
# of this build and depend on them.
include(CMakePackageConfigHelpers)
set(heed_package_dir "${CMAKE_INSTALL_DATADIR}/cmake/heed")
set(heed_pc_dir "${CMAKE_INSTALL_DATADIR}/pkgconfig")

# "../..", whatever the name of the data directory is.
file(RELATIVE_PATH HEED_PC_UP "/prefix/${heed_pc_dir}" /prefix)
string(REGEX REPLACE "/$" "" HEED_PC_UP "${HEED_PC_UP}")
set(HEED_PC_INCLUDEDIR "\${prefix}")
cmake_path(APPEND HEED_PC_INCLUDEDIR "${CMAKE_INSTALL_INCLUDEDIR}")
set(HEED_BUILT_WITH_OPENMP OFF)
if(TARGET OpenMP::OpenMP_CXX AND HEED_OPENMP)
  set(HEED_BUILT_WITH_OPENMP ON)
endif()
set(HEED_PC_OPENMP "")
if(TARGET OpenMP::OpenMP_CXX AND CMAKE_CXX_COMPILER_ID MATCHES "^(GNU|Clang)$" AND HEED_OPENMP)
  set(HEED_PC_OPENMP " -fopenmp")
endif()

configure_file(cmake/heed.pc.in heed.pc @ONLY)
configure_package_config_file(cmake/heed-config.cmake.in heed-config.cmake
                              INSTALL_DESTINATION "${heed_package_dir}" PATH_VARS CMAKE_INSTALL_INCLUDEDIR)
set(heed_architecture ARCH_INDEPENDENT)
if(HEED_INSTALL_COMPILED)
  set(heed_architecture "")
endif()
write_basic_package_version_file(heed-config-version.cmake COMPATIBILITY SameMinorVersion
                                 ${heed_architecture})

install(TARGETS heed EXPORT heed-targets)
install(EXPORT heed-targets NAMESPACE heed:: DESTINATION "${heed_package_dir}" COMPONENT heed)
install(FILES "${PROJECT_BINARY_DIR}/heed-config.cmake"
              "${PROJECT_BINARY_DIR}/heed-config-version.cmake" cmake/heed-usage.cmake
        DESTINATION "${heed_package_dir}" COMPONENT heed)
# A package that holds heed-compiled-targets.cmake brings the library; users of any other build it by
# heed-compiled.cmake. Tests check both kinds of package: without the option the library is a component of its own,
# which no full installation contains and only the tests install.
if(HEED_INSTALL_COMPILED OR HEED_BUILD_TESTS)
  set(heed_component heed_compiled EXCLUDE_FROM_ALL)
  if(HEED_INSTALL_COMPILED)
    set(heed_component heed)
  endif()
  set_target_properties(heed_engine PROPERTIES EXCLUDE_FROM_ALL FALSE EXPORT_NAME engine)
  set_target_properties(heed_compiled PROPERTIES EXCLUDE_FROM_ALL FALSE EXPORT_NAME compiled)
  if(HEED_NATIVE)
    target_link_libraries(heed_engine PUBLIC heed::native)
  endif()
  install(TARGETS heed_engine heed_compiled EXPORT heed-compiled-targets ARCHIVE COMPONENT ${heed_component})
  install(EXPORT heed-compiled-targets NAMESPACE heed:: DESTINATION "${heed_package_dir}"
          COMPONENT ${heed_component})
endif()
if(TARGET heed_c)
  install(EXPORT heed-c-targets NAMESPACE heed:: DESTINATION "${heed_package_dir}" COMPONENT heed_c)
endif()
install(FILES cmake/compiled.cmake RENAME heed-compiled.cmake DESTINATION "${heed_package_dir}"
        COMPONENT heed)
install(FILES "${PROJECT_BINARY_DIR}/heed.pc" DESTINATION "${heed_pc_dir}" COMPONENT heed)
install(DIRECTORY include/heed DESTINATION "${CMAKE_INSTALL_INCLUDEDIR}" COMPONENT heed
        FILES_MATCHING PATTERN "*.hpp" PATTERN "*.h")
install(FILES LICENSE DESTINATION "${CMAKE_INSTALL_DOCDIR}" COMPONENT heed)
