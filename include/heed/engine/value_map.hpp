// SPDX-License-Identifier: Apache-2.0
#pragma once

// Values as a readout transforms them (value() in plug/readout.hpp): y = f(x) of each number, in a copy that a call makes of
// the tensor, and the slopes f'(x) by which gradients and tangents go on: dL/dx = dL/dy f'(x).

#include <heed/engine/tiles.hpp>
#include <heed/engine/widened.hpp>

#include <memory>

namespace heed {
inline namespace HEED_ABI {

template <class Real>
class ValueMap {
 public:
  // Null where the readout leaves values as they are. slopes: will chain() or tangents() be called?
  [[nodiscard]] static std::unique_ptr<ValueMap> of(const OpTiles<Real>& op,
                                                    const StoredView<const Real>& value,
                                                    bool slopes, int threads) {
    if (!op.readout.traits.maps_values) return nullptr;
    return std::unique_ptr<ValueMap>(new ValueMap(op, value, slopes, threads));
  }
  ValueMap(const ValueMap&) = delete;  // views refer to its memory

  // f(x), of the shape of the values.
  [[nodiscard]] TensorView<const Real> values() const { return view(values_); }
  // f'(x) dx for tangents of the values.
  [[nodiscard]] TensorView<const Real> tangents(const TensorView<const Real>& dx) {
    for_rows([&](Index b, Index h, Index t, Index at) {
      for (Index c = 0; c < shape_.dim; ++c) slopes_[at + c] *= dx.row(b, h, t)[c];
    });
    return view(slopes_);
  }
  // dL/dy becomes dL/dx.
  void chain(const TensorView<Real>& gradient) const {
    for_rows([&](Index b, Index h, Index t, Index at) {
      Real* row = gradient.row(b, h, t);
      for (Index c = 0; c < shape_.dim; ++c) row[c] *= slopes_[at + c];
    });
  }

 private:
  using Memory = std::unique_ptr<Real[]>;

  ValueMap(const OpTiles<Real>& op, const StoredView<const Real>& value, bool slopes, int threads)
      : shape_(value.shape()), threads_(threads) {
    const auto count = std::size_t(element_count(shape_, "the transformed values"));
    values_.reset(new Real[count]);
    if (slopes) slopes_.reset(new Real[count]);
    for_rows([&](Index b, Index h, Index t, Index at) {
      Real* const row = values_.get() + at;
      if (value.narrow())
        widen_rows(value, b, h, t, 1, row, shape_.dim);
      else
        std::copy_n(value.plain().row(b, h, t), shape_.dim, row);
      op.readout.map_values(row, slopes ? slopes_.get() + at : nullptr, shape_.dim);
    });
  }
  [[nodiscard]] TensorView<const Real> view(const Memory& of) const { return {of.get(), shape_}; }
  // body(b, h, t, place in memory) for each row.
  template <class Body>
  void for_rows(const Body& body) const {
    const Index len = shape_.len;
    parallel_for(shape_.batch * shape_.heads, threads_, [&](Index head) {
      for (Index t = 0; t < len; ++t)
        body(head / shape_.heads, head % shape_.heads, t, (head * len + t) * shape_.dim);
    });
  }

  Shape shape_;
  int threads_;
  Memory values_, slopes_;
};

}  // namespace HEED_ABI
}  // namespace heed
