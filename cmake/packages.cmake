# SPDX-License-Identifier: Apache-2.0
# The packages of Debian or Ubuntu that heed's own programs need. Every message about a missing part
# quotes them.
set(HEED_PACKAGES g++ cmake ninja-build libeigen3-dev catch2 libbenchmark-dev nlohmann-json3-dev
                  libcli11-dev libpcre2-dev)
list(JOIN HEED_PACKAGES " " HEED_APT_LINE)
set(HEED_APT_LINE "sudo apt-get update && sudo apt-get install -y ${HEED_APT_LINE}")
