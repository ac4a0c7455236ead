# SPDX-License-Identifier: Apache-2.0
# Filters each README.md for doxygen (sed -E -f): pictures and links within the repository become their words.
s;!?\[([^]]*)\]\([^):, ]*\);\1;g
