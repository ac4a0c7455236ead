// SPDX-License-Identifier: Apache-2.0
#pragma once

// Keys and values of a growing sequence, for decoding: forward() reads it in place.
//
//   KvCache<float> cache(batch, kv_heads, dim_qk, dim_v);
//   cache.append(new_keys, new_values);                          // (batch, kv_heads, n, dim) each
//   forward(op, {query, cache.keys(), cache.values(), {}}, causal<float>(Align::bottom_right), out);
//
// Memory  pages of `page_rows` rows for all batches and heads; growing adds pages and copies none. KvCache<bfloat16> and
//         KvCache<half> take half of it, and half of the time that decoding waits for memory: append() rounds.

#include <heed/core/stored_view.hpp>
#include <heed/simd/widen.hpp>

#include <algorithm>
#include <limits>
#include <memory>
#include <new>
#include <utility>
#include <vector>

namespace heed {
inline namespace HEED_ABI {

template <class Real>
class KvCache {
 public:
  static constexpr Index kDefaultPageRows = 256;
  // What calls on the cache compute with.
  using Arithmetic = ArithmeticOf<Real>;

  // page_rows: a positive multiple of kPanelLanes<Arithmetic>. Throws std::invalid_argument.
  KvCache(Index batch, Index kv_heads, Index dim_qk, Index dim_v,
          Index page_rows = kDefaultPageRows)
      : key_shape_{batch, kv_heads, 0, dim_qk},
        value_shape_{batch, kv_heads, 0, dim_v},
        page_rows_(page_rows) {
    require(batch >= 0 && kv_heads >= 0 && dim_qk >= 0 && dim_v >= 0, "KvCache: batch ", batch,
            ", kv_heads ", kv_heads, ", dim_qk ", dim_qk, ", dim_v ", dim_v,
            "; none may be negative");
    require(page_rows > 0 && page_rows % kPanelLanes<Arithmetic> == 0, "KvCache: page_rows is ",
            page_rows, ", it must be a positive multiple of ", kPanelLanes<Arithmetic>);
    const Index keys = page_numbers(key_shape_), values = page_numbers(value_shape_);
    require(values <= std::numeric_limits<Index>::max() / Index(sizeof(Real)) - keys,
            "KvCache: a page of ", keys, " numbers of keys and ", values,
            " of values exceeds the address space");
  }

  // What is left of a cache that was moved from is an empty cache of its shape.
  KvCache(KvCache&& other) noexcept
      : key_shape_(other.key_shape_),
        value_shape_(other.value_shape_),
        page_rows_(other.page_rows_),
        pages_(std::move(other.pages_)),
        key_pages_(std::move(other.key_pages_)),
        value_pages_(std::move(other.value_pages_)) {
    other.key_shape_.len = other.value_shape_.len = 0;
    for (auto* pages : {&other.key_pages_, &other.value_pages_}) pages->clear();
    other.pages_.clear();
  }
  KvCache& operator=(KvCache&& other) noexcept {
    KvCache taken(std::move(other));
    std::swap(key_shape_, taken.key_shape_);
    std::swap(value_shape_, taken.value_shape_);
    std::swap(page_rows_, taken.page_rows_);
    pages_.swap(taken.pages_);
    key_pages_.swap(taken.key_pages_);
    value_pages_.swap(taken.value_pages_);
    return *this;
  }

  // Tokens held, and tokens for which there is room.
  [[nodiscard]] Index len() const { return key_shape_.len; }
  [[nodiscard]] Index capacity() const { return Index(pages_.size()) * page_rows_; }

  // Room for `len` tokens. Throws std::bad_alloc; the cache is then as it was.
  void reserve(Index len) {
    if (len <= capacity()) return;
    const Index keys = page_numbers(key_shape_), values = page_numbers(value_shape_);
    const auto count = std::size_t((len - capacity() - 1) / page_rows_ + 1);
    std::vector<std::unique_ptr<Real[]>> added;
    make_room(added, count);
    while (added.size() < count)
      added.push_back(std::make_unique<Real[]>(std::size_t(keys + values)));
    make_room(pages_, count);
    make_room(key_pages_, count);
    make_room(value_pages_, count);
    for (std::unique_ptr<Real[]>& page : added) {  // throws no more
      key_pages_.push_back(page.get());
      value_pages_.push_back(page.get() + keys);
      pages_.push_back(std::move(page));
    }
  }

  // Adds the tokens of `key` (batch, kv_heads, n, dim_qk) and `value` (batch, kv_heads, n, dim_v), in
  // any layout, rounded to the nearest numbers that the cache holds. Throws std::invalid_argument, std::bad_alloc; the
  // cache is then as it was. Views taken before are no longer valid.
  void append(const StoredView<const Arithmetic>& key, const StoredView<const Arithmetic>& value) {
    check(key, key_shape_, "key");
    check(value, value_shape_, "value");
    require(value.shape().len == key.shape().len, "KvCache::append: value has len ",
            value.shape().len, ", key has ", key.shape().len);
    const Index count = key.shape().len;
    require(count <= std::numeric_limits<Index>::max() - len(), "KvCache::append: ", count,
            " tokens after ", len(), " overflow a 64-bit index");
    reserve(len() + count);
    copy(key, key_pages_, key_shape_);
    copy(value, value_pages_, value_shape_);
    key_shape_.len = value_shape_.len = len() + count;
  }

  // Forgets the tokens from `len` on; their memory is kept.
  void truncate(Index len) {
    require(len >= 0 && len <= this->len(), "KvCache::truncate: len is ", len, ", the cache holds ",
            this->len(), " tokens");
    key_shape_.len = value_shape_.len = len;
  }

  // Valid until the next append() or reserve().
  [[nodiscard]] TensorView<const Real> keys() const { return view(key_pages_, key_shape_); }
  [[nodiscard]] TensorView<const Real> values() const { return view(value_pages_, value_shape_); }

 private:
  // Room for `count` more, at least doubled: vectors that grow one by one are copied seldom.
  template <class Element>
  static void make_room(std::vector<Element>& all, std::size_t count) {
    const std::size_t needed = all.size() + count;
    if (needed <= all.capacity()) return;
    if (needed > all.max_size()) throw std::bad_alloc();
    all.reserve(std::max(needed, std::min(2 * all.capacity(), all.max_size())));
  }
  // A page is (batch, kv_heads, page_rows, dim).
  [[nodiscard]] Strides strides(const Shape& shape) const {
    return {shape.heads * page_rows_ * shape.dim, page_rows_ * shape.dim, shape.dim};
  }
  [[nodiscard]] Index page_numbers(const Shape& shape) const {
    return element_count({shape.batch, shape.heads, page_rows_, shape.dim}, "KvCache: a page");
  }
  [[nodiscard]] TensorView<const Real> view(const std::vector<Real*>& pages,
                                            const Shape& shape) const {
    return TensorView<const Real>::paged(pages.data(), page_rows_, shape, strides(shape));
  }

  void check(const MemoryView& rows, const Shape& own, const char* name) const {
    Shape wanted = own;
    wanted.len = rows.shape.len;
    require(rows.shape == wanted && wanted.len >= 0, "KvCache::append: ", name, " has shape ",
            rows.shape, ", the cache holds (", own.batch, ",", own.heads, ",n,", own.dim, ")");
    if (!rows.has_elements()) return;
    const std::uintptr_t address = rows.address(0);
    require(address != 0, "KvCache::append: ", name, " has a null pointer and shape ", rows.shape);
    const auto own_page = [&](const void* page) {
      return reinterpret_cast<std::uintptr_t>(page) == address;
    };
    require(
        rows.page_rows == 0 || (std::none_of(key_pages_.begin(), key_pages_.end(), own_page) &&
                                std::none_of(value_pages_.begin(), value_pages_.end(), own_page)),
        "KvCache::append: ", name,
        " is a view of this cache, which append changes; copy its rows first");
  }
  void copy(const StoredView<const Arithmetic>& rows, const std::vector<Real*>& pages,
            const Shape& own) {
    const TensorView<Real> to = TensorView<Real>::paged(
        pages.data(), page_rows_, {own.batch, own.heads, capacity(), own.dim}, strides(own));
    rows.visit([&](const auto& from) {
      for (Index b = 0; b < own.batch; ++b)
        for (Index h = 0; h < own.heads; ++h)
          for (Index t = 0; t < from.shape().len; ++t)
            convert(from.row(b, h, t), own.dim, to.row(b, h, own.len + t));
    });
  }

  Shape key_shape_, value_shape_;
  Index page_rows_;
  std::vector<std::unique_ptr<Real[]>> pages_;
  std::vector<Real*> key_pages_, value_pages_;
};

}  // namespace HEED_ABI
}  // namespace heed
