// SPDX-License-Identifier: Apache-2.0
#pragma once

// Recognises files of other kinds by their first bytes.

#include <heed/core/config.hpp>

#include <cctype>
#include <cstddef>
#include <string>
#include <string_view>

namespace heed {
inline namespace HEED_ABI {
namespace io {

// Bytes that suffice to tell.
inline constexpr std::size_t foreign_bytes = 64;

// True for the beginning of an HTML page, behind white space.
[[nodiscard]] inline bool begins_like_html(std::string_view text) {
  std::string start;
  for (const char c : text.substr(0, foreign_bytes))
    if (!start.empty() || std::isspace(static_cast<unsigned char>(c)) == 0)
      start += static_cast<char>(std::tolower(static_cast<unsigned char>(c)));
  return start.starts_with("<!doctype html") || start.starts_with("<html");
}

// The kind of a file that begins with these bytes, as the end of a sentence: "begins like a Git LFS
// pointer: fetch the file itself". Empty for possible safetensors, JSON or plain text.
[[nodiscard]] inline std::string_view foreign_kind(std::string_view bytes) {
  if (bytes.starts_with("version https://git-lfs"))
    return "begins like a Git LFS pointer: fetch the file itself";
  if (begins_like_html(bytes)) return "begins like an HTML page: fetch the file itself";
  if (bytes.starts_with("\x1F\x8B")) return "begins like gzip: unpack it";
  if (bytes.starts_with("PK\x03\x04"))
    return "begins like a zip archive, as torch.save writes: unpack it, or save safetensors "
           "instead";
  if (bytes.size() > 1 && bytes[0] == '\x80' && bytes[1] >= 2 && bytes[1] <= 5)
    return "begins like a pickle, as torch.save writes: save safetensors instead";
  return {};
}

}  // namespace io
}  // namespace HEED_ABI
}  // namespace heed
