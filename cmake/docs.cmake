# SPDX-License-Identifier: Apache-2.0
# cmake --build build -t docs: build/docs/html, a page per header and per README.md beside them, the top README.md in front.
# Only where doxygen is found; what it warns of is an error.
find_package(Doxygen QUIET)
if(NOT DOXYGEN_FOUND)
  return()
endif()

set(DOXYGEN_OUTPUT_DIRECTORY "${PROJECT_BINARY_DIR}/docs")
set(DOXYGEN_QUIET YES)
set(DOXYGEN_WARN_AS_ERROR FAIL_ON_WARNINGS)
set(DOXYGEN_FILE_PATTERNS *.hpp *.h *.md)
set(DOXYGEN_FILTER_PATTERNS "*.hpp=sed -E -f '${PROJECT_SOURCE_DIR}/cmake/doxygen.sed'"
                            "*.h=sed -E -f '${PROJECT_SOURCE_DIR}/cmake/doxygen.sed'"
                            "*.md=sed -E -f '${PROJECT_SOURCE_DIR}/cmake/doxygen_readme.sed'")
set(DOXYGEN_STRIP_FROM_PATH "${PROJECT_SOURCE_DIR}/include" "${PROJECT_SOURCE_DIR}")
set(DOXYGEN_STRIP_FROM_INC_PATH "${PROJECT_SOURCE_DIR}/include")
set(DOXYGEN_USE_MDFILE_AS_MAINPAGE "${PROJECT_SOURCE_DIR}/README.md")

# Pages show every declaration, and lists the first sentence of its comment.
set(DOXYGEN_EXTRACT_ALL YES)
set(DOXYGEN_EXTRACT_STATIC YES)
set(DOXYGEN_HIDE_IN_BODY_DOCS YES)
set(DOXYGEN_EXCLUDE_SYMBOLS heed::detail heed::*::detail heed::detail::* heed::*::detail::*)
set(DOXYGEN_JAVADOC_AUTOBRIEF YES)
set(DOXYGEN_BUILTIN_STL_SUPPORT YES)
set(DOXYGEN_SORT_MEMBER_DOCS NO)
set(DOXYGEN_LAYOUT_FILE "${PROJECT_SOURCE_DIR}/cmake/doxygen_layout.xml")

# Each page shows the header itself, comments included; no graphs.
set(DOXYGEN_SOURCE_BROWSER YES)
set(DOXYGEN_STRIP_CODE_COMMENTS NO)
set(DOXYGEN_GENERATE_TREEVIEW YES)
set(DOXYGEN_GENERATE_LATEX NO)
set(DOXYGEN_HAVE_DOT NO)
set(DOXYGEN_CLASS_GRAPH NO)

doxygen_add_docs(docs "${PROJECT_SOURCE_DIR}/include/heed" "${PROJECT_SOURCE_DIR}/README.md"
                 COMMENT "Writing ${PROJECT_BINARY_DIR}/docs/html")
if(HEED_BUILD_TESTS)
  add_test(NAME docs_build_without_warnings
           COMMAND Doxygen::doxygen "${PROJECT_BINARY_DIR}/Doxyfile.docs")
endif()
