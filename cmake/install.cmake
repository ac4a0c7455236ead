# SPDX-License-Identifier: Apache-2.0
# Headers, CMake package and pkg-config file. Nothing depends on the architecture or on the prefix.
include(CMakePackageConfigHelpers)
set(heed_package_dir "${CMAKE_INSTALL_DATADIR}/cmake/heed")
set(heed_pc_dir "${CMAKE_INSTALL_DATADIR}/pkgconfig")

# "../..", whatever the data directory is called.
file(RELATIVE_PATH HEED_PC_UP "/prefix/${heed_pc_dir}" /prefix)
string(REGEX REPLACE "/$" "" HEED_PC_UP "${HEED_PC_UP}")
set(HEED_PC_INCLUDEDIR "\${prefix}")
cmake_path(APPEND HEED_PC_INCLUDEDIR "${CMAKE_INSTALL_INCLUDEDIR}")
set(HEED_PC_OPENMP "")
if(TARGET OpenMP::OpenMP_CXX AND CMAKE_CXX_COMPILER_ID MATCHES "^(GNU|Clang)$" AND HEED_OPENMP)
  set(HEED_PC_OPENMP " -fopenmp")
endif()

configure_file(cmake/heed.pc.in heed.pc @ONLY)
configure_package_config_file(cmake/heed-config.cmake.in heed-config.cmake
                              INSTALL_DESTINATION "${heed_package_dir}")
write_basic_package_version_file(heed-config-version.cmake COMPATIBILITY SameMinorVersion
                                 ARCH_INDEPENDENT)

install(TARGETS heed EXPORT heed-targets)
install(EXPORT heed-targets NAMESPACE heed:: DESTINATION "${heed_package_dir}" COMPONENT heed)
install(FILES "${PROJECT_BINARY_DIR}/heed-config.cmake"
              "${PROJECT_BINARY_DIR}/heed-config-version.cmake" cmake/heed-usage.cmake
        DESTINATION "${heed_package_dir}" COMPONENT heed)
install(FILES cmake/compiled.cmake RENAME heed-compiled.cmake DESTINATION "${heed_package_dir}"
        COMPONENT heed)
install(FILES "${PROJECT_BINARY_DIR}/heed.pc" DESTINATION "${heed_pc_dir}" COMPONENT heed)
install(DIRECTORY include/heed DESTINATION "${CMAKE_INSTALL_INCLUDEDIR}" COMPONENT heed
        FILES_MATCHING PATTERN "*.hpp")
install(FILES LICENSE DESTINATION "${CMAKE_INSTALL_DOCDIR}" COMPONENT heed)
