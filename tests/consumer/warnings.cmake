# SPDX-License-Identifier: Apache-2.0
# Warnings of strict projects that both g++ and clang know.
set(warnings -Wall -Wextra -Wpedantic -Wconversion -Wsign-conversion -Wshadow -Wold-style-cast -Wdouble-promotion -Wcast-align
             -Wnull-dereference -Wundef)
