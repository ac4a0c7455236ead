// SPDX-License-Identifier: Apache-2.0
#pragma once

// Pages of keys and values, for KvCache and KvPool: their memory, and the table of pages of one
// growing sequence (or of a batch of equally long ones), which forward() reads in place.

#include <heed/core/error.hpp>
#include <heed/simd/quantise.hpp>
#include <heed/simd/scratch.hpp>
#include <heed/simd/stored_view.hpp>
#include <heed/simd/widen.hpp>

#include <algorithm>
#include <initializer_list>
#include <limits>
#include <new>
#include <string>
#include <utility>
#include <vector>

namespace heed {
inline namespace HEED_ABI {

inline constexpr Index kDefaultPageRows = 256;

// Stored: float, double, bfloat16, half or std::int8_t.
template <class Stored>
class KvPages {
 public:
  using Arithmetic = ArithmeticOf<Stored>;
  // True if rows are stored with a scale.
  static constexpr bool scaled = std::is_same_v<Stored, std::int8_t>;
  using View = std::conditional_t<scaled, ScaledView, TensorView<const Stored>>;

  // Keys and values of page_rows tokens of all batches and heads, in whole lines of cache; `scales` has the scales of both.
  struct Page {
    Scratch<Stored> numbers;
    Scratch<float> scales;
    Stored *keys, *values;
    float *key_scales, *value_scales;

    Page(Index key_numbers, Index value_numbers, Index row_scales)
        : numbers(Scratch<Stored>::lasting(room<Stored>({key_numbers, value_numbers}))),
          scales(Scratch<float>::lasting(room<float>({row_scales, row_scales}))),
          keys(numbers.take(key_numbers)),
          values(numbers.take(value_numbers)),
          key_scales(scales.take(row_scales)),
          value_scales(scales.take(row_scales)) {}

    template <class Number>
    [[nodiscard]] static Index room(std::initializer_list<Index> counts) {
      return scratch_elements<Number>([&](Scratch<Number>& s) {
        for (const Index count : counts) (void)s.take(count);
        return 0;
      });
    }
  };

  // owner: the name of the class in error texts. Throws std::invalid_argument.
  KvPages(const char* owner, Index batch, Index kv_heads, Index dim_qk, Index dim_v,
          Index page_rows)
      : owner_(owner),
        key_shape_{batch, kv_heads, 0, dim_qk},
        value_shape_{batch, kv_heads, 0, dim_v},
        page_rows_(page_rows) {
    require(batch >= 0 && kv_heads >= 0 && dim_qk >= 0 && dim_v >= 0, owner, ": batch ", batch,
            ", kv_heads ", kv_heads, ", dim_qk ", dim_qk, ", dim_v ", dim_v,
            "; none may be negative");
    require(page_rows > 0 && page_rows % kPanelLanes<Arithmetic> == 0, owner, ": page_rows is ",
            page_rows, ", it must be a positive multiple of ", kPanelLanes<Arithmetic>);
    constexpr Index most = std::numeric_limits<Index>::max(), scale_bytes = 2 * sizeof(float);
    const Index keys = page_numbers(key_shape_), values = page_numbers(value_shape_);
    const Index scales = scale_numbers();
    require(scales <= most / scale_bytes &&
                values <= (most - scales * scale_bytes) / Index(sizeof(Stored)) - keys,
            owner, ": a page of ", keys, " numbers of keys and ", values,
            " of values exceeds the address space");
  }
  // A table that was moved from is an empty one of its shape.
  KvPages(KvPages&& other) noexcept
      : owner_(other.owner_),
        key_shape_(other.key_shape_),
        value_shape_(other.value_shape_),
        page_rows_(other.page_rows_),
        key_(std::exchange(other.key_, {})),
        value_(std::exchange(other.value_, {})) {
    other.key_shape_.len = other.value_shape_.len = 0;
  }
  KvPages& operator=(KvPages&& other) noexcept {
    KvPages taken(std::move(other));
    std::swap(owner_, taken.owner_);
    std::swap(key_shape_, taken.key_shape_);
    std::swap(value_shape_, taken.value_shape_);
    std::swap(page_rows_, taken.page_rows_);
    std::swap(key_, taken.key_);
    std::swap(value_, taken.value_);
    return *this;
  }

  // A table of this shape without pages.
  [[nodiscard]] KvPages empty_copy() const {
    return {owner_,         key_shape_.batch, key_shape_.heads,
            key_shape_.dim, value_shape_.dim, page_rows_};
  }

  // Number of tokens, of pages, of rows per page, and of tokens that fit.
  [[nodiscard]] Index len() const { return key_shape_.len; }
  [[nodiscard]] Index pages() const { return Index(key_.numbers.size()); }
  [[nodiscard]] Index page_rows() const { return page_rows_; }
  [[nodiscard]] Index capacity() const { return pages() * page_rows_; }
  [[nodiscard]] Index pages_for(Index len) const {
    return len / page_rows_ + (len % page_rows_ > 0 ? 1 : 0);
  }
  void set_len(Index len) { key_shape_.len = value_shape_.len = len; }

  [[nodiscard]] View keys() const { return view(key_, key_shape_); }
  [[nodiscard]] View values() const { return view(value_, value_shape_); }

  // Memory for one page; throws std::bad_alloc.
  [[nodiscard]] Page new_page() const {
    return Page(page_numbers(key_shape_), page_numbers(value_shape_), scale_numbers());
  }
  [[nodiscard]] Index page_bytes() const {
    return (page_numbers(key_shape_) + page_numbers(value_shape_)) * Index(sizeof(Stored)) +
           2 * scale_numbers() * Index(sizeof(float));
  }
  // Makes room in the table for `count` more pages, after which add() throws nothing; throws
  // std::bad_alloc, and the table is then unchanged.
  void make_room(std::size_t count) {
    for (Pages* pages : {&key_, &value_}) {
      make_room(pages->numbers, count);
      make_room(pages->scales, count);
    }
  }
  void add(const Page& page) {
    key_.numbers.push_back(page.keys);
    key_.scales.push_back(page.key_scales);
    value_.numbers.push_back(page.values);
    value_.scales.push_back(page.value_scales);
  }
  void replace(Index p, const Page& page) {
    const auto at = std::size_t(p);
    key_.numbers[at] = page.keys;
    key_.scales[at] = page.key_scales;
    value_.numbers[at] = page.values;
    value_.scales[at] = page.value_scales;
  }
  void drop_last() {
    for (Pages* pages : {&key_, &value_}) {
      pages->numbers.pop_back();
      pages->scales.pop_back();
    }
  }
  // Makes room for `count` more, at least doubling: a vector that grows one by one is then copied seldom.
  template <class Element>
  static void make_room(std::vector<Element>& all, std::size_t count) {
    const std::size_t needed = all.size() + count;
    if (needed <= all.capacity()) return;
    if (needed > all.max_size()) throw std::bad_alloc();
    all.reserve(std::max(needed, std::min(2 * all.capacity(), all.max_size())));
  }

  // Throws unless `key` and `value` have the same number of tokens, fit this table, and lie in other memory than its own.
  void check(const StoredView<const Arithmetic>& key,
             const StoredView<const Arithmetic>& value) const {
    check(key, key_shape_, "key");
    check(value, value_shape_, "value");
    require(value.shape().len == key.shape().len, owner_, "::append: value has len ",
            value.shape().len, ", key has ", key.shape().len);
    require(key.shape().len <= std::numeric_limits<Index>::max() - len(), owner_,
            "::append: ", key.shape().len, " tokens after ", len(), " overflow a 64-bit index");
  }
  // Numbers of memory that write() needs to widen a row.
  [[nodiscard]] Index widened_numbers() const {
    return scaled ? std::max(key_shape_.dim, value_shape_.dim) : 0;
  }
  // Writes rows [first, first + count) of checked keys and values behind those held; there must be room.
  void write(const StoredView<const Arithmetic>& key, const StoredView<const Arithmetic>& value,
             Index first, Index count, float* widened) {
    copy(key, key_, key_shape_, first, count, widened);
    copy(value, value_, value_shape_, first, count, widened);
    set_len(len() + count);
  }
  // Copies the first `rows` tokens of a page.
  void copy_rows(const Page& from, Page& to, Index rows) const {
    const auto copy = [&](const auto* source, auto* target, Index width) {
      for (Index n = 0; n < key_shape_.batch * key_shape_.heads; ++n)
        std::copy_n(source + n * page_rows_ * width, rows * width, target + n * page_rows_ * width);
    };
    copy(from.keys, to.keys, key_shape_.dim);
    copy(from.values, to.values, value_shape_.dim);
    if (!scaled) return;
    copy(from.key_scales, to.key_scales, 1);
    copy(from.value_scales, to.value_scales, 1);
  }

 private:
  // The memory of the keys, or of the values, of each page.
  struct Pages {
    std::vector<Stored*> numbers;
    std::vector<float*> scales;
  };

  // A page is (batch, kv_heads, page_rows, dim).
  [[nodiscard]] Strides strides(const Shape& shape) const {
    return {shape.heads * page_rows_ * shape.dim, page_rows_ * shape.dim, shape.dim};
  }
  [[nodiscard]] Index page_numbers(const Shape& shape) const {
    return element_count({shape.batch, shape.heads, page_rows_, shape.dim},
                         (std::string(owner_) + ": a page").c_str());
  }
  // Number of scales of a page; 0 unless rows are scaled.
  [[nodiscard]] Index scale_numbers() const {
    return scaled ? page_numbers(of_scales(key_shape_)) : 0;
  }
  [[nodiscard]] static Shape of_scales(Shape shape) {
    shape.dim = 1;
    return shape;
  }
  template <class Number>
  [[nodiscard]] TensorView<Number> view_of(const std::vector<Number*>& pages,
                                           const Shape& shape) const {
    return TensorView<Number>::paged(pages.data(), page_rows_, shape, strides(shape));
  }
  [[nodiscard]] View view(const Pages& pages, const Shape& shape) const {
    if constexpr (scaled)
      return {view_of(pages.numbers, shape), view_of(pages.scales, of_scales(shape))};
    else
      return view_of(pages.numbers, shape);
  }

  void check(const MemoryView& rows, const Shape& own, const char* name) const {
    Shape wanted = own;
    wanted.len = rows.shape.len;
    require(rows.shape == wanted && wanted.len >= 0, owner_, "::append: ", name, " has shape ",
            rows.shape, ", the cache holds (", own.batch, ",", own.heads, ",n,", own.dim, ")");
    if (!rows.has_elements()) return;
    const std::uintptr_t address = rows.address(0);
    require(address != 0, owner_, "::append: ", name, " has a null pointer and shape ", rows.shape);
    const auto own_page = [&](const void* page) {
      return reinterpret_cast<std::uintptr_t>(page) == address;
    };
    require(rows.page_rows == 0 ||
                (std::none_of(key_.numbers.begin(), key_.numbers.end(), own_page) &&
                 std::none_of(value_.numbers.begin(), value_.numbers.end(), own_page)),
            owner_, "::append: ", name,
            " is a view of this cache, which append changes; copy its rows first");
  }
  // widened: memory for a row, used if rows are scaled.
  void copy(const StoredView<const Arithmetic>& rows, const Pages& pages, const Shape& own,
            Index first, Index count, float* widened) {
    const Shape room{own.batch, own.heads, capacity(), own.dim};
    const TensorView<Stored> numbers = view_of(pages.numbers, room);
    const TensorView<float> scales = view_of(pages.scales, of_scales(room));
    const auto store = [&](const auto& row, Index b, Index h, Index t) {
      if constexpr (scaled) {
        convert(row, own.dim, widened);
        scales(b, h, t, 0) = quantise(widened, own.dim, numbers.row(b, h, t));
      } else {
        convert(row, own.dim, numbers.row(b, h, t));
      }
    };
    rows.visit([&](const auto& from) {
      for (Index b = 0; b < own.batch; ++b)
        for (Index h = 0; h < own.heads; ++h)
          for (Index t = 0; t < count; ++t)
            store(rows_of(from, b, h, first + t), b, h, own.len + t);
    });
  }

  const char* owner_;
  Shape key_shape_, value_shape_;
  Index page_rows_;
  Pages key_, value_;
};

}  // namespace HEED_ABI
}  // namespace heed
