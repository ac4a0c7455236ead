// SPDX-License-Identifier: Apache-2.0
#pragma once

// Views of user memory, which heed reads from and writes to and does not own.
//
// Shapes  (batch, heads, len, dim); the innermost stride is always 1, the others are free, so that
//         (B,H,T,d), (B,T,H,d) and packed QKV or QKVI memory are all read in place.
// Accepts raw pointers, Eigen::Tensor / TensorMap (RowMajor), Eigen matrices and maps (RowMajor, one
//         head), and anything with the members of std::mdspan. None of those headers is included
//         here: types are recognised by their members.
// Numbers float and double; bfloat16 and half, under the names that Eigen or the compiler has for them, too.

#include <heed/core/error.hpp>
#include <heed/core/narrow.hpp>

#include <algorithm>
#include <concepts>
#include <cstdint>
#include <type_traits>

namespace heed {
inline namespace HEED_ABI {

// Extents of a four-dimensional tensor.
struct Shape {
  Index batch = 0, heads = 0, len = 0, dim = 0;
  bool operator==(const Shape&) const = default;

  // For example (2,8,512,64).
  [[nodiscard, gnu::cold]] std::string text() const {
    std::string text;  // joined by +=, since g++ 12 warns of the operator + of strings at -O3
    for (const Index extent : {batch, heads, len, dim}) {
      text += text.empty() ? '(' : ',';
      text += std::to_string(extent);
    }
    return text += ')';
  }
};

// Calls f(b, h, t) for each row, in the order of dense memory.
template <class F>
void for_each_row(const Shape& s, F&& f) {
  for (Index b = 0; b < s.batch; ++b)
    for (Index h = 0; h < s.heads; ++h)
      for (Index t = 0; t < s.len; ++t) f(b, h, t);
}

[[nodiscard]] inline Index element_count(const Shape& s, const char* what) {
  return checked_product(checked_product(checked_product(s.batch, s.heads, what), s.len, what),
                         s.dim, what);
}

// Strides in elements; the stride along dim is 1.
struct Strides {
  Index batch = 0, head = 0, row = 0;
};

// The strides of (batch, heads, len, dim) memory without gaps; throws if one does not fit an Index.
[[nodiscard]] inline Strides dense_strides(const Shape& s) {
  const Index head = checked_product(s.len, s.dim, "TensorView: len x dim");
  return {checked_product(s.heads, head, "TensorView: heads x len x dim"), head, s.dim};
}

// The place of a view's memory, whatever its elements are. Checks take this type, so that they are
// compiled once for all element types.
struct MemoryView {
  Shape shape;
  Strides strides;  // in elements
  Index page_rows;  // 0 for memory in one piece
  Index element_bytes, alignment;
  const void* view;
  const void* (*page_of)(const void* view, Index p);

  [[nodiscard]] bool has_elements() const {
    return shape.batch > 0 && shape.heads > 0 && shape.len > 0 && shape.dim > 0;
  }
  // Pages, and the address of the first element of one; memory in one piece is one page.
  [[nodiscard]] Index pages() const {
    return page_rows > 0 ? (shape.len + page_rows - 1) / page_rows : 1;
  }
  [[nodiscard]] std::uintptr_t address(Index p) const {
    return reinterpret_cast<std::uintptr_t>(page_of(view, p));
  }
  // Number of rows on page p.
  [[nodiscard]] Index rows(Index p) const {
    return page_rows > 0 ? std::min(page_rows, shape.len - p * page_rows) : shape.len;
  }

  // Offsets in bytes from the address of page p to its first byte and to the byte behind its last one; strides may be
  // negative. Only for views that have elements. Throws if an offset does not fit an Index.
  struct Span {
    Index first, end;
  };
  [[nodiscard]] Span span(Index p) const {
    Span span{0, shape.dim};
    const auto reach = [&span](Index extent, Index stride) {
      const Index far = checked_product(extent - 1, stride, "TensorView: extent x stride");
      Index& side = far < 0 ? span.first : span.end;
      if (__builtin_add_overflow(side, far, &side))
        fail("TensorView: extent ", extent, " at stride ", stride,
             " reaches beyond a 64-bit index");
    };
    reach(shape.batch, strides.batch);
    reach(shape.heads, strides.head);
    reach(rows(p), strides.row);
    for (Index* offset : {&span.first, &span.end})
      *offset = checked_product(*offset, element_bytes, "TensorView: offset in bytes");
    return span;
  }
};

namespace detail {

// True if these pages of two views share a byte. Two views of one packed tensor (equal strides)
// with separate columns do not.
[[nodiscard]] inline bool pages_overlap(const MemoryView& a, Index p, const MemoryView& b,
                                        Index r) {
  const MemoryView::Span of_a = a.span(p), of_b = b.span(r);
  const std::uintptr_t at_a = a.address(p), at_b = b.address(r);
  if (at_a + std::uintptr_t(of_a.end) <= at_b + std::uintptr_t(of_b.first) ||
      at_b + std::uintptr_t(of_b.end) <= at_a + std::uintptr_t(of_a.first))
    return false;
  if (a.element_bytes != b.element_bytes) return true;
  // In a packed tensor every element of a view lies in the columns [0, width) behind its first one, of rows that
  // both views share.
  const Index row = a.strides.row;
  const auto width = [](const MemoryView& v) {
    return (v.shape.heads - 1) * v.strides.head + v.shape.dim;
  };
  const bool same_rows = row == b.strides.row && row > 0 && width(a) <= row && width(b) <= row &&
                         a.strides.head >= 0 && b.strides.head >= 0 &&
                         (a.shape.batch == 1 || a.strides.batch % row == 0) &&
                         (b.shape.batch == 1 || b.strides.batch % row == 0);
  if (!same_rows) return true;
  Index shift = Index(at_b - at_a) / a.element_bytes % row;
  if (shift < 0) shift += row;
  return shift < width(a) || shift + width(b) > row;
}

}  // namespace detail

// True if two views may touch a common byte.
[[nodiscard]] inline bool may_overlap(const MemoryView& a, const MemoryView& b) {
  if (!a.has_elements() || !b.has_elements()) return false;
  for (Index p = 0; p < a.pages(); ++p)
    for (Index r = 0; r < b.pages(); ++r)
      if (detail::pages_overlap(a, p, b, r)) return true;
  return false;
}

namespace detail {

// True if memory of `From` can be viewed as Elements: it holds the same type, or the same 16-bit
// format under another library's name.
template <class From, class Element>
concept ViewableAs = std::convertible_to<From*, Element*> ||(
    (std::is_const_v<Element> ||
     !std::is_const_v<From>)&&same_format<std::remove_const_t<From>, std::remove_const_t<Element>>);

template <class Element, class From>
[[nodiscard]] Element* pointer_as(From* data) {
  if constexpr (std::convertible_to<From*, Element*>)
    return data;
  else
    return reinterpret_cast<Element*>(data);
}

template <class E, class Element>
concept EigenTensorLike = requires(E& e) {
  requires ViewableAs<std::remove_pointer_t<decltype(e.data())>, Element>;
  { e.dimension(0) } -> std::convertible_to<Index>;
  {E::NumDimensions};
  {E::Layout};
};

template <class E, class Element>
concept EigenMatrixLike = requires(E& e) {
  requires ViewableAs<std::remove_pointer_t<decltype(e.data())>, Element>;
  { e.rows() } -> std::convertible_to<Index>;
  { e.cols() } -> std::convertible_to<Index>;
  { e.outerStride() } -> std::convertible_to<Index>;
  { e.innerStride() } -> std::convertible_to<Index>;
  {E::IsRowMajor};
};

template <class E, class Element>
concept MdspanLike = requires(E& e) {
  requires ViewableAs<std::remove_pointer_t<decltype(e.data_handle())>, Element>;
  { e.extent(0) } -> std::convertible_to<Index>;
  { e.stride(0) } -> std::convertible_to<Index>;
  {E::rank()};
};

}  // namespace detail

// A view of Elements, which may be const, of shape (batch, heads, len, dim). A default view is empty: it
// stands for an argument that was not given.
template <class Element>
class TensorView {
 public:
  TensorView() = default;

  TensorView(Element* data, const Shape& shape, const Strides& strides)
      : data_(data), shape_(shape), strides_(strides) {}

  // Dense (batch, heads, len, dim) memory. Throws where its size does not fit an Index.
  TensorView(Element* data, const Shape& shape) : TensorView(data, shape, dense_strides(shape)) {}

  // Rows spread over pages of `page_rows` rows each: row t of head (b, h) lies in pages[t / page_rows],
  // at strides within the page. The table must outlive the view. forward() accepts key and value in this form.
  [[nodiscard]] static TensorView paged(Element* const* pages, Index page_rows, const Shape& shape,
                                        const Strides& strides) {
    require(page_rows > 0, "TensorView: page_rows is ", page_rows, ", it must be positive");
    TensorView view(nullptr, shape, strides);
    view.pages_ = pages;
    view.page_rows_ = page_rows;
    return view;
  }

  // A mutable view converts to a const one.
  template <class U>
  requires(std::same_as<const U, Element> && !std::is_const_v<U>)
      TensorView(const TensorView<U>& other)
      : data_(other.data_),
        pages_(other.pages_),
        page_rows_(other.page_rows_),
        shape_(other.shape_),
        strides_(other.strides_) {}

  // Eigen::Tensor<Real, 4, RowMajor> or TensorMap of one: (batch, heads, len, dim).
  template <class E>
  requires detail::EigenTensorLike<std::remove_reference_t<E>, Element> TensorView(E&& e)
      : TensorView(detail::pointer_as<Element>(e.data()),
                   {Index(e.dimension(0)), Index(e.dimension(1)), Index(e.dimension(2)),
                    Index(e.dimension(3))}) {
    using Tensor = std::remove_reference_t<E>;
    static_assert(Tensor::NumDimensions == 4, "heed views Eigen tensors of four dimensions");
    static_assert(int(Tensor::Layout) == 1, "heed views Eigen tensors of layout RowMajor only");
  }

  // A row-major Eigen matrix or map (len, dim): one batch, one head.
  template <class E>
  requires detail::EigenMatrixLike<std::remove_reference_t<E>, Element> TensorView(E&& e)
      : TensorView(detail::pointer_as<Element>(e.data()), {1, 1, Index(e.rows()), Index(e.cols())},
                   {0, 0, Index(e.outerStride())}) {
    static_assert(std::remove_reference_t<E>::IsRowMajor,
                  "heed views row-major Eigen matrices only");
    require(e.innerStride() == 1 || e.cols() <= 1, "TensorView: the inner stride is ",
            Index(e.innerStride()), ", it must be 1");
  }

  // Four- or two-dimensional mdspan-like types whose last stride is 1.
  template <class E>
  requires detail::MdspanLike<std::remove_reference_t<E>, Element> TensorView(E&& e)
      : data_(detail::pointer_as<Element>(e.data_handle())) {
    constexpr auto rank = std::remove_reference_t<E>::rank();
    static_assert(rank == 4 || rank == 2, "heed views mdspans of rank 4 or 2");
    require(e.stride(rank - 1) == 1 || e.extent(rank - 1) <= 1, "TensorView: the last stride is ",
            Index(e.stride(rank - 1)), ", it must be 1");
    if constexpr (rank == 4) {
      shape_ = {Index(e.extent(0)), Index(e.extent(1)), Index(e.extent(2)), Index(e.extent(3))};
      strides_ = {Index(e.stride(0)), Index(e.stride(1)), Index(e.stride(2))};
    } else {
      shape_ = {1, 1, Index(e.extent(0)), Index(e.extent(1))};
      strides_ = {0, 0, Index(e.stride(0))};
    }
  }

  [[nodiscard]] Element* data() const { return data_; }
  [[nodiscard]] const Shape& shape() const { return shape_; }
  [[nodiscard]] const Strides& strides() const { return strides_; }
  // Rows per page; 0 for memory in one piece.
  [[nodiscard]] Index page_rows() const { return page_rows_; }
  // Addresses of the pages; null for memory in one piece.
  [[nodiscard]] Element* const* page_table() const { return pages_; }
  [[nodiscard]] bool given() const { return data_ != nullptr || shape_ != Shape{}; }
  [[nodiscard]] bool has_elements() const {
    return shape_.batch > 0 && shape_.heads > 0 && shape_.len > 0 && shape_.dim > 0;
  }

  // First element of row t. In pages only the rows up to the end of its page follow at strides().row.
  [[nodiscard]] Element* row(Index b, Index h, Index t) const {
    if (page_rows_ > 0)
      return pages_[t / page_rows_] +
             (b * strides_.batch + h * strides_.head + t % page_rows_ * strides_.row);
    return data_ + (b * strides_.batch + h * strides_.head + t * strides_.row);
  }
  [[nodiscard]] Element& operator()(Index b, Index h, Index t, Index c) const {
    return row(b, h, t)[c];
  }

  // The pages as views of their own; the view itself if it is in one piece.
  [[nodiscard]] Index pages() const {
    return page_rows_ > 0 ? (shape_.len + page_rows_ - 1) / page_rows_ : 1;
  }
  [[nodiscard]] TensorView page(Index p) const {
    if (page_rows_ == 0) return *this;
    Shape shape = shape_;
    shape.len = shape.len - p * page_rows_ < page_rows_ ? shape.len - p * page_rows_ : page_rows_;
    return {pages_[p], shape, strides_};
  }

  // Address and sizes of the memory, for checks; valid as long as the view.
  [[gnu::noinline]] operator MemoryView() const {
    const auto page = [](const void* view, Index p) -> const void* {
      return static_cast<const TensorView*>(view)->page(p).data();
    };
    return {shape_, strides_, page_rows_, Index(sizeof(Element)), Index(alignof(Element)),
            this,   page};
  }

 private:
  template <class U>
  friend class TensorView;

  Element* data_ = nullptr;
  Element* const* pages_ = nullptr;
  Index page_rows_ = 0;
  Shape shape_;
  Strides strides_;
};

// View of (batch, len, heads, dim) memory, the layout of most projections.
template <class Element>
[[nodiscard]] TensorView<Element> view_bthd(Element* data, Index batch, Index len, Index heads,
                                            Index dim) {
  const Index row = checked_product(heads, dim, "view_bthd: heads x dim");
  return {data,
          {batch, heads, len, dim},
          {checked_product(len, row, "view_bthd: len x heads x dim"), dim, row}};
}

// View of part `part` of a packed projection (batch, len, parts * heads * dim): QKV has 3 parts, QKVI
// has 4.
template <class Element>
[[nodiscard]] TensorView<Element> view_packed(Element* data, Index batch, Index len, Index heads,
                                              Index dim, Index parts, Index part) {
  require(part >= 0 && part < parts, "view_packed: part is ", part, ", it must lie in [0, ", parts,
          "), the parts");
  const Index width = checked_product(heads, dim, "view_packed: heads x dim");
  const Index row = checked_product(parts, width, "view_packed: parts x heads x dim");
  return {data ? data + part * width : data,
          {batch, heads, len, dim},
          {checked_product(len, row, "view_packed: len x parts x heads x dim"), dim, row}};
}

}  // namespace HEED_ABI
}  // namespace heed
