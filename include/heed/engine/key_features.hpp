// SPDX-License-Identifier: Apache-2.0
#pragma once

// Key features that outlive a call: norms, categories and projected rows of keys, computed by the first call that reads a
// key and read by those after it. A KvCache has such features (KvCache::inputs()), and hands them to calls beside its keys.
// They have the bits that the call would compute.
//
// Which  Features of scores that promise KeptFeatures (plug/promises.hpp). A call with another score computes its own, and so
//        do calls of one query whose heads are taken for queries of one head while each map has features of its own.
// For    one op on the keys of one tensor, which grows. A call of another op, on other keys, or with other numbers that
//        the features depend on is refused.
// Memory (key_features + rank) numbers per key, map and key-value head (query head where a score has tables), and room for
//        as many keys again.

#include <heed/core/error.hpp>
#include <heed/core/view.hpp>

#include <algorithm>
#include <cstdint>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

namespace heed {
inline namespace HEED_ABI {

template <class Real>
class DerivedKeys;

namespace detail {

// Numbers of an op that key features depend on, and the name that its author gives them.
template <class Number>
struct NamedNumbers {
  const char* name;
  std::vector<Number> numbers = {};

  // A sentence about those of a call that differ; empty if none do.
  [[nodiscard]] std::string difference(const std::vector<Number>& call) const {
    constexpr const char* kept = ", the key_features that are kept are of an op with ";
    if (numbers == call) return {};
    if (numbers.size() != call.size())
      return joined({name, " has ", call.size(), " values", kept, numbers.size()});
    std::size_t n = 0;
    while (numbers[n] == call[n]) ++n;
    return joined({name, "[", n, "] is ", call[n], kept, numbers[n]});
  }
};

// What key features depend on beside the numbers of the keys.
template <class Real>
struct KeyFeaturesStamp {
  std::string_view op;         // its type
  Shape keys;                  // but for their number
  std::uintptr_t address = 0;  // of the first key
  Index heads = 0;             // with features of their own
  std::vector<Index> sources;  // of each map of each such head: kv_head, key_column, width
  std::vector<NamedNumbers<Real>> parameters;
  NamedNumbers<Real> tables{"table"}, projection{"projection"};
  NamedNumbers<double> numbers{"feature_numbers()"};

  // In what `call` differs, as a sentence; empty if in nothing.
  [[nodiscard]] std::string difference(const KeyFeaturesStamp& call) const {
    std::string text;
    const auto unless_same = [&text](bool same, const auto&... parts) {
      if (!same && text.empty()) text = joined({Part(parts)...});
    };
    const auto unless_equal = [&](const auto& own, const auto& others) {
      if (text.empty()) text = own.difference(others.numbers);
    };
    unless_same(op == call.op, "key_features are those of another op");
    unless_same(keys == call.keys,
                "key_features are of keys (batch, kv_heads, len, dim_qk) with batch ", keys.batch,
                ", kv_heads ", keys.heads, " and dim_qk ", keys.dim, ", these have ",
                call.keys.batch, ", ", call.keys.heads, " and ", call.keys.dim);
    unless_same(address == call.address, "key_features are of keys at another address");
    if (text.empty())
      for (std::size_t n = 0; n < parameters.size(); ++n)
        unless_equal(parameters[n], call.parameters[n]);
    unless_same(heads == call.heads, "key_features are of ", heads, " heads, the call has ",
                call.heads);
    unless_same(sources == call.sources,
                "key_features are of heads that read other columns of the keys");
    unless_equal(projection, call.projection);
    unless_equal(tables, call.tables);
    unless_equal(numbers, call.numbers);
    return text;
  }
};

}  // namespace detail

template <class Real>
class KeyFeatures {
 public:
  KeyFeatures() = default;
  // What is left of features that were moved from is as new.
  KeyFeatures(KeyFeatures&& other) noexcept { *this = std::move(other); }
  KeyFeatures& operator=(KeyFeatures&& other) noexcept {
    std::swap(stamp_, other.stamp_);
    std::swap(features_, other.features_);
    std::swap(projected_, other.projected_);
    std::swap(room_, other.room_);
    std::swap(len_, other.len_);
    if (this != &other) other.forget();
    return *this;
  }

  // The features of keys 0 ... len() - 1 are known.
  [[nodiscard]] Index len() const { return len_; }
  [[nodiscard]] Index bytes() const {
    return Index((features_.size() + projected_.size()) * sizeof(Real));
  }
  // Forgets those of the keys from `len` on: called before such a key changes.
  void truncate(Index len) { len_ = std::min(len_, std::max<Index>(0, len)); }
  // Forgets all, and what they were of.
  void forget() noexcept {
    stamp_ = {};
    features_ = {};
    projected_ = {};
    room_ = len_ = 0;
  }

 private:
  friend class DerivedKeys<Real>;

  // Room for those of `len` keys in each of `blocks` arrays [feature][room] and [room][rank]. Throws std::bad_alloc; they
  // are then as they were.
  void reserve(Index blocks, Index len, Index features, Index rank) {
    if (len <= room_) return;
    const Index room = std::max(len, 2 * room_);
    std::vector<Real> wider(std::size_t(blocks * features * room)),
        longer(std::size_t(blocks * rank * room));
    for (Index n = 0; n < blocks * features && room_ > 0; ++n)
      std::copy_n(features_.data() + n * room_, len_, wider.data() + n * room);
    for (Index n = 0; n < blocks && rank > 0 && room_ > 0; ++n)
      std::copy_n(projected_.data() + n * rank * room_, len_ * rank,
                  longer.data() + n * rank * room);
    features_ = std::move(wider);
    projected_ = std::move(longer);
    room_ = room;
  }

  detail::KeyFeaturesStamp<Real> stamp_;
  std::vector<Real> features_, projected_;
  Index room_ = 0, len_ = 0;
};

}  // namespace HEED_ABI
}  // namespace heed
