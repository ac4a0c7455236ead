// SPDX-License-Identifier: Apache-2.0
#pragma once

// Checksums of a safetensors file, by which its reader notices damage. The metadata's entry "checksums" is a JSON object:
// it maps each tensor's name to the checksum of its bytes, and "__metadata__", which is no tensor's name, to the checksum
// of all other metadata. Other readers see an ordinary entry.
//
// A checksum is a Digest of the bytes, eight of them at a time: it always changes if only one such
// word changes, as by a flipped bit, and misses one in 2^64 of all other changes.

#include <heed/core/digest.hpp>

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <map>
#include <span>
#include <string>

namespace heed {
inline namespace HEED_ABI {
namespace io {

inline constexpr const char *kChecksums = "checksums", *kMetadata = "__metadata__";

inline void add_bytes(Digest& digest, std::span<const std::byte> bytes) {
  digest.add(bytes.size());
  while (!bytes.empty()) {
    std::uint64_t word = 0;
    const std::size_t count = std::min(bytes.size(), sizeof word);
    std::memcpy(&word, bytes.data(), count);
    digest.add(word);
    bytes = bytes.subspan(count);
  }
}

[[nodiscard]] inline std::string checksum_of(std::span<const std::byte> bytes) {
  Digest digest;
  add_bytes(digest, bytes);
  return digest.text();
}
[[nodiscard]] inline std::string checksum_of(const std::map<std::string, std::string>& metadata) {
  Digest digest;
  for (const auto& [key, value] : metadata) {
    if (key == kChecksums) continue;
    add_bytes(digest, std::as_bytes(std::span(key)));
    add_bytes(digest, std::as_bytes(std::span(value)));
  }
  return digest.text();
}

}  // namespace io
}  // namespace HEED_ABI
}  // namespace heed
