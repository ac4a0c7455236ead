// SPDX-License-Identifier: Apache-2.0
#include "text_file.hpp"

#include <heed/io/atomic_file.hpp>

#include <cstddef>
#include <vector>

namespace heed_lm {

std::string read_text_file(const std::string& path) {
  const std::vector<std::byte> bytes = heed::io::read_file(path);
  return {reinterpret_cast<const char*>(bytes.data()), bytes.size()};
}

}  // namespace heed_lm
