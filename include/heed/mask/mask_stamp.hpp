// SPDX-License-Identifier: Apache-2.0
#pragma once

// A stamp of a mask, by which two calls compare theirs: the values of small parts, a digest of
// large ones, and of a view the shape alone. Addresses and functions are no part of it: a mask that
// was made anew, a view that was moved and a bias that was computed again have the same stamp.

#include <heed/core/digest.hpp>
#include <heed/mask/mask.hpp>

#include <cstdint>
#include <string>
#include <vector>

namespace heed {
inline namespace HEED_ABI {

struct MaskStamp {
  std::vector<Band> bands;
  std::vector<KeyRange> key_ranges;
  Shape allowed, bias;
  double soft_cap = 0;
  // Digests; 0 where the mask has no such part.
  std::uint64_t key_lengths = 0, documents = 0, slopes = 0, rules = 0;

  MaskStamp() = default;
  template <class Real>
  explicit MaskStamp(const Mask<Real>& mask)
      : bands(mask.bands),
        key_ranges(mask.key_ranges),
        allowed(mask.allowed.shape()),
        bias(mask.bias.shape()),
        soft_cap(double(mask.soft_cap)) {
    if (mask.key_lengths) key_lengths = digest_of(*mask.key_lengths);
    if (mask.query_documents && mask.key_documents)
      documents = digest_of(*mask.query_documents, *mask.key_documents);
    if (mask.slopes) slopes = digest_of(*mask.slopes, int(mask.slope_align), mask.slope_offset);
    if (mask.rules.empty()) return;
    Digest digest;
    digest.add(mask.rules.size());
    for (const auto& rule : mask.rules) rule->add_to(digest);
    rules = digest.sum();
  }

  void add_to(Digest& digest) const {
    for (const Band& band : bands) {
      for (const Index number : {band.left, band.right, band.offset}) digest.add(number);
      digest.add(int(band.align));
    }
    for (const KeyRange& keys : key_ranges)
      for (const Index number : {keys.begin, keys.end}) digest.add(number);
    for (const Shape& s : {allowed, bias})
      for (const Index extent : {s.batch, s.heads, s.len, s.dim}) digest.add(extent);
    digest.add(soft_cap);
    for (const std::uint64_t sum : {key_lengths, documents, slopes, rules}) digest.add(sum);
  }

  // The difference from `other`, as the end of a sentence about saved numbers; empty if there is none.
  [[nodiscard]] std::string difference(const MaskStamp& other) const {
    return *this == other ? std::string() : text_of_difference(other);
  }
  [[nodiscard]] bool operator==(const MaskStamp&) const = default;

 private:
  template <class... Parts>
  [[nodiscard]] static std::uint64_t digest_of(const Parts&... parts) {
    Digest digest;
    (digest.add(parts), ...);
    return digest.sum();
  }
  [[nodiscard, gnu::cold]] std::string text_of_difference(const MaskStamp& other) const;
};

// The texts of bands, or of ranges, joined.
template <class Part>
[[nodiscard, gnu::cold]] std::string texts_of(const std::vector<Part>& parts) {
  std::string text;
  for (const Part& part : parts) {
    text += text.empty() ? "" : " & ";
    text += part.text();
  }
  return text;
}

inline std::string MaskStamp::text_of_difference(const MaskStamp& other) const {
  std::string text;
  // If both have the part, `values` say how it differs.
  const auto compare = [&text](bool same, const char* name, bool given, bool others,
                               const auto&... values) {
    if (same || !text.empty()) return;
    if (given && others) return (void)(text = detail::sentence("is of a call with ", values...));
    text = detail::sentence("is of a call ", given ? "with " : "without ", name, ", this one is ",
                            given ? "without" : "with");
  };
  const auto compare_sums = [&](const char* name, std::uint64_t sum, std::uint64_t of_other) {
    compare(sum == of_other, name, sum != 0, of_other != 0, "other ", name);
  };
  const auto compare_shapes = [&](const char* name, const Shape& shape, const Shape& of_other) {
    compare(shape == of_other, name, shape != Shape{}, of_other != Shape{}, name, " of shape ",
            shape, ", this one's has ", of_other);
  };
  compare(bands == other.bands, "bands", !bands.empty(), !other.bands.empty(), "the bands ",
          texts_of(bands), ", this one has ", texts_of(other.bands));
  compare(key_ranges == other.key_ranges, "key ranges", !key_ranges.empty(),
          !other.key_ranges.empty(), "the key ranges ", texts_of(key_ranges), ", this one has ",
          texts_of(other.key_ranges));
  compare_sums("key lengths", key_lengths, other.key_lengths);
  compare_shapes("a boolean mask", allowed, other.allowed);
  compare_shapes("a bias", bias, other.bias);
  compare_sums("documents", documents, other.documents);
  compare_sums("slopes", slopes, other.slopes);
  compare(soft_cap == other.soft_cap, "a soft cap", soft_cap != 0, other.soft_cap != 0,
          "a soft cap of ", soft_cap, ", this one has ", other.soft_cap);
  compare(rules == other.rules, "a function of positions", rules != 0, other.rules != 0,
          "other functions of positions or block lists");
  return text;
}

}  // namespace HEED_ABI
}  // namespace heed
