// SPDX-License-Identifier: Apache-2.0
#include "text_file.hpp"

#include <heed/io/atomic_file.hpp>
#include <heed/io/foreign_file.hpp>
#include <heed/io/safetensors_types.hpp>

#include <cstddef>
#include <vector>

namespace heed_lm {

std::string read_text_file(const std::string& path, Content content) {
  const std::vector<std::byte> bytes = heed::io::read_file(path);
  std::string text(reinterpret_cast<const char*>(bytes.data()), bytes.size());
  const bool page = content == Content::text && heed::io::begins_like_html(text);
  if (const std::string_view kind = heed::io::foreign_kind(text);
      content != Content::bytes && !page && !kind.empty())
    heed::io::refuse(path, "the file ", kind);
  return text;
}

}  // namespace heed_lm
