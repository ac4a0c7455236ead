// SPDX-License-Identifier: Apache-2.0
#pragma once

// A view of memory that holds Real, bfloat16, half or scaled int8: the type of tensors in all public calls.

#include <heed/core/scaled_view.hpp>
#include <heed/simd/storage.hpp>

namespace heed {
inline namespace HEED_ABI {

// A TensorView<Element>, or a view of narrower numbers that stand for Elements. Scaled int8 needs a const Element.
template <class Element>
class StoredView {
 public:
  using Real = std::remove_const_t<Element>;
  template <class Number>
  using Of = TensorView<std::conditional_t<std::is_const_v<Element>, const Number, Number>>;

  StoredView() = default;
  // Accepts everything that a TensorView of one of the three types can be made of.
  template <class From>
  requires std::constructible_from<TensorView<Element>, From &&> StoredView(From&& from)
      : plain_(static_cast<From&&>(from)) {}
  template <class From>
  requires(!std::constructible_from<TensorView<Element>, From&&> &&
           std::constructible_from<Of<bfloat16>, From&&>) StoredView(From&& from)
      : bfloat16_(static_cast<From&&>(from)),
        kind_(Kind::as_bfloat16),
        storage_(stored_as<bfloat16>()) {}
  template <class From>
  requires(!std::constructible_from<TensorView<Element>, From&&> &&
           std::constructible_from<Of<half>, From&&>) StoredView(From&& from)
      : half_(static_cast<From&&>(from)), kind_(Kind::as_half), storage_(stored_as<half>()) {}
  StoredView(const ScaledView& from) requires std::is_const_v<Element>
      : scaled_(from),
        kind_(Kind::as_scaled),
        storage_(&detail::StorageOf<Real, ScaledRows>::table) {}
  StoredView(Element* data, const Shape& shape) : plain_(data, shape) {}
  StoredView(Element* data, const Shape& shape, const Strides& strides)
      : plain_(data, shape, strides) {}
  // A mutable view converts to a const one.
  template <class U>
  requires(std::same_as<const U, Element> && !std::is_const_v<U>)
      StoredView(const StoredView<U>& other)
      : plain_(other.plain_),
        bfloat16_(other.bfloat16_),
        half_(other.half_),
        kind_(static_cast<Kind>(other.kind_)),
        storage_(other.storage_) {}

  // True if the numbers are stored in another type than Element.
  [[nodiscard]] bool narrow() const { return kind_ != Kind::plain; }
  [[nodiscard]] bool scaled() const { return kind_ == Kind::as_scaled; }
  // The functions that read and write the rows where narrow(), else null.
  [[nodiscard]] const Storage<Real>* storage() const { return storage_; }
  // Rows t, t + 1, ... of head (b, h), up to the end of their page.
  [[nodiscard]] UntypedRows rows(Index b, Index h, Index t) const {
    return visit([&](const auto& v) { return UntypedRows(rows_of(v, b, h, t)); });
  }
  // The view of memory that holds Elements; empty where narrow().
  [[nodiscard]] const TensorView<Element>& plain() const { return plain_; }

  // Address and sizes of the memory, for checks; valid as long as the view.
  [[gnu::noinline]] operator MemoryView() const {
    return visit([](const auto& v) { return MemoryView(v); });
  }

  // Address and sizes of the scales, for checks; without elements unless scaled(). Valid as long as the view.
  [[nodiscard, gnu::noinline]] MemoryView scales() const {
    if constexpr (std::is_const_v<Element>)
      if (scaled()) return scaled_.scales();
    return {};
  }

  // f(view) for the view of the stored numbers.
  template <class F>
  decltype(auto) visit(F&& f) const {
    switch (kind_) {
      case Kind::as_bfloat16: return f(bfloat16_);
      case Kind::as_half: return f(half_);
      case Kind::as_scaled:
        if constexpr (std::is_const_v<Element>) return f(scaled_);
        [[fallthrough]];
      default: return f(plain_);
    }
  }

  [[nodiscard]] const Shape& shape() const {
    return visit([](const auto& v) -> const Shape& { return v.shape(); });
  }
  [[nodiscard]] Index page_rows() const {
    return visit([](const auto& v) { return v.page_rows(); });
  }
  [[nodiscard]] bool given() const {
    return visit([](const auto& v) { return v.given(); });
  }
  [[nodiscard]] bool has_elements() const {
    return visit([](const auto& v) { return v.has_elements(); });
  }
  [[nodiscard]] Real operator()(Index b, Index h, Index t, Index c) const {
    return visit([&](const auto& v) { return Real(v(b, h, t, c)); });
  }

 private:
  template <class U>
  friend class StoredView;
  enum class Kind : unsigned char { plain, as_bfloat16, as_half, as_scaled };
  struct Never {};
  template <class Number>
  [[nodiscard]] static const Storage<Real>* stored_as() {
    return &detail::StorageOf<Real, StoredRows<Number>>::table;
  }

  TensorView<Element> plain_;
  Of<bfloat16> bfloat16_;
  Of<half> half_;
  std::conditional_t<std::is_const_v<Element>, ScaledView, Never> scaled_;
  Kind kind_ = Kind::plain;
  const Storage<Real>* storage_ = nullptr;
};

}  // namespace HEED_ABI
}  // namespace heed
