// SPDX-License-Identifier: Apache-2.0
#pragma once

// The words that rows of formulas have in common in the engine: sums and largest numbers of columns, and learnt numbers
// (plug/row_formula.hpp, plug/readout_formula.hpp).

#include <heed/plug/row_long_hand.hpp>

namespace heed {
inline namespace HEED_ABI {
namespace detail {

// Row inherits it and knows its head(). Tape: the RowTape that it runs on. With `grad`, the tape records.
template <class Row, class Part, class Tape, class Real>
class TapedWords {
 public:
  TapedWords(Tape& tape, const Part& part, Part* grad) : tape_(tape), part_(part), grad_(grad) {}

  [[nodiscard]] auto learnt(const Param<Real>& parameter) const {
    return learnt(parameter, parameter.size() == 1 ? 0 : static_cast<const Row&>(*this).head());
  }
  [[nodiscard]] auto learnt(const Param<Real>& parameter, Index n) const {
    Real* first = gradient_of(parameter);
    return tape_.learnt(parameter[checked_entry(parameter, n)], first ? first + n : nullptr);
  }
  template <class X>
  [[nodiscard]] auto sum(const X& x) const {
    return tape_.sum(node_of<ColumnNode<Real>>(x));
  }
  template <class X>
  [[nodiscard]] auto largest(const X& x) const {
    return tape_.largest(node_of<ColumnNode<Real>>(x));
  }
  template <class X>
  [[nodiscard]] auto keep(const X& x) const {
    return tape_.keep(node_of<ColumnNode<Real>>(x));
  }

 protected:
  // The memory for the gradient of a parameter of the part; null without gradients.
  [[nodiscard]] Real* gradient_of(const Param<Real>& parameter) const {
    Real* to = nullptr;
    find_parameter(part_, parameter, [&](const auto& entry) {
      if (grad_) to = (grad_->*entry.member).data();
    });
    return to;
  }

  Tape& tape_;

 private:
  const Part& part_;
  Part* grad_;
};

}  // namespace detail
}  // namespace HEED_ABI
}  // namespace heed
