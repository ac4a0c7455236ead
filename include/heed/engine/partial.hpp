// SPDX-License-Identifier: Apache-2.0
#pragma once

// The answers of parts of the keys, and what they make together.
//
//   Partial<float> a = forward_partial(op, in, mask & key_range<float>(0, 1000));
//   Partial<float> b = forward_partial(op, in, mask & key_range<float>(1000, 4096));
//   Partial<float> whole = merge(a, b);                     // forward(op, in, mask, ...) up to rounding
//
// The parts may as well be of different key and value tensors: a prompt that many continuations share, and what each of
// them has added. With w_a = exp(lse_a - lse) and likewise w_b:
//
//   lse = log(exp(lse_a) + exp(lse_b))          out = w_a out_a + w_b out_b
//
//   dL/dout_a = w_a dL/dout                     dL/dlse_a = w_a (dL/dlse + dL/dout . (out_a - out))
//
// merge() is associative and commutative up to rounding, and a Partial that no forward() has written is its identity.
// Ops      those whose weights are one softmax over the keys (Mergeable in plug/promises.hpp), whose rows are not read out
//          further, and whose scores do not count the keys that a query sees (counts_visible, as LogVisible does): a part
//          would count its own. Others do not compile. Learnt keys of an op are counted by parts that have key 0 of their tensor:
//          by one of the parts of a tensor, and once for each tensor.
// Positions of keys count from the first key of each tensor: a part whose tensor begins n tokens further on takes a first_query
//          (engine/call.hpp) that is n less, which is right for scores that read distances alone.
// Bounds   |out - exact| <= 4 eps max(|out_a|, |out_b|) + what the parts err by; an lse of NaN or +infinity makes its row NaN,
//          and of a part whose lse is -infinity no number of out is read.
// Errors   std::invalid_argument where shapes differ, or out and lse hold not what the shape says.

#include <heed/engine/doors.hpp>

#include <algorithm>
#include <cmath>
#include <concepts>
#include <limits>
#include <utility>
#include <vector>

namespace heed {
inline namespace HEED_ABI {

// out (batch, heads, len_q, dim_v) and lse (batch, heads, len_q), dense; or gradients of both.
template <class Real>
struct Partial {
  Shape shape;  // of out
  std::vector<Real> out, lse;

  // The result of no keys at all.
  explicit Partial(const Shape& of)
      : shape(checked(of)),
        out(std::size_t(element_count(of, "Partial")), Real(0)),
        lse(rows(), -std::numeric_limits<Real>::infinity()) {}

  [[nodiscard]] std::size_t rows() const {
    return std::size_t(shape.batch * shape.heads * shape.len);
  }
  // What forward() writes to, and what backward() reads.
  [[nodiscard]] Outputs<Real> outputs() {
    return {StoredView<Real>(out.data(), shape), StoredView<Real>(lse.data(), lse_shape())};
  }
  [[nodiscard]] OutputGradients<Real> gradients() const {
    return {StoredView<const Real>(out.data(), shape),
            StoredView<const Real>(lse.data(), lse_shape())};
  }

 private:
  [[nodiscard]] static Shape checked(const Shape& of) {
    require(of.batch >= 0 && of.heads >= 0 && of.len >= 0 && of.dim >= 0, "Partial: the shape is ",
            of, ", extents must not be negative");
    return of;
  }
  [[nodiscard]] Shape lse_shape() const { return {shape.batch, shape.heads, shape.len, 1}; }
};

namespace detail {

template <class Real>
void require_same(const Partial<Real>& a, const Partial<Real>& b, const char* where,
                  const char* names) {
  require(a.shape == b.shape, where, ": ", names, " have shapes ", a.shape, " and ", b.shape,
          ", they must be the same");
  for (const Partial<Real>* part : {&a, &b}) {
    const auto numbers = std::size_t(element_count(part->shape, where));
    require(part->out.size() == numbers && part->lse.size() == part->rows(), where,
            ": a part of shape ", part->shape, " holds ", part->out.size(), " numbers of out and ",
            part->lse.size(), " of lse, it needs ", numbers, " and ", part->rows());
  }
}

// A part's number of out times its share; 0 where the row sees no key, whatever out holds.
template <class Real>
[[nodiscard]] Real weighed(Real lse, Real share, Real out) {
  return lse == -std::numeric_limits<Real>::infinity() ? Real(0) : share * out;
}

// The share exp(part - whole) of a part; 0 of a row that sees no key.
template <class Real>
[[nodiscard]] Real share_of(Real part, Real whole) {
  return part == -std::numeric_limits<Real>::infinity() ? Real(0) : std::exp(part - whole);
}

}  // namespace detail

template <class Real>
[[nodiscard]] Partial<Real> merge(const Partial<Real>& a, const Partial<Real>& b) {
  detail::require_same(a, b, "heed::merge", "the parts");
  Partial<Real> whole(a.shape);
  const std::size_t dim = std::size_t(a.shape.dim);
  for (std::size_t row = 0; row < whole.rows(); ++row) {
    const Real top = std::max(a.lse[row], b.lse[row]);
    const Real sum = detail::share_of(a.lse[row], top) + detail::share_of(b.lse[row], top);
    if (sum != Real(0)) whole.lse[row] = top + std::log(sum);
    const Real of_a = detail::share_of(a.lse[row], whole.lse[row]),
               of_b = detail::share_of(b.lse[row], whole.lse[row]);
    for (std::size_t n = row * dim; n < (row + 1) * dim; ++n)
      whole.out[n] =
          detail::weighed(a.lse[row], of_a, a.out[n]) + detail::weighed(b.lse[row], of_b, b.out[n]);
  }
  return whole;
}

// The gradients for a and b, given those for merge(a, b) = whole.
template <class Real>
[[nodiscard]] std::pair<Partial<Real>, Partial<Real>> merge_backward(const Partial<Real>& a,
                                                                     const Partial<Real>& b,
                                                                     const Partial<Real>& whole,
                                                                     const Partial<Real>& grad) {
  detail::require_same(a, b, "heed::merge_backward", "the parts");
  detail::require_same(a, whole, "heed::merge_backward", "a part and the whole");
  detail::require_same(whole, grad, "heed::merge_backward", "the whole and its gradient");
  const std::size_t dim = std::size_t(a.shape.dim);
  const auto gradient_of = [&](const Partial<Real>& part) {
    Partial<Real> to(part.shape);
    for (std::size_t row = 0; row < part.rows(); ++row) {
      const Real share = detail::share_of(part.lse[row], whole.lse[row]);
      Real pull = grad.lse[row];
      for (std::size_t n = row * dim; n < (row + 1) * dim; ++n) {
        to.out[n] = share * grad.out[n];
        pull += grad.out[n] * (part.out[n] - whole.out[n]);
      }
      to.lse[row] = share == Real(0) ? Real(0) : share * pull;
    }
    return to;
  };
  return {gradient_of(a), gradient_of(b)};
}

namespace detail {

// Does forward() over parts of the keys say all that merge() needs?
template <class Op>
inline constexpr bool parts_merge =
    mergeable<typename Op::NormaliserType>&& Op::ReadoutType::identity &&
    !Op::ScoreType::counts_visible;

// Checks and computes a part, for Inputs and for PackedInputs.
template <class Op, class In, class Real>
[[nodiscard]] Partial<Real> open_partial(const Op& op, const In& in, const Mask<Real>& mask,
                                         Saved<Real>* saved, const Options& options) {
  static_assert(check_attention_op<Op>());
  static_assert(
      !Op::ScoreType::counts_visible,
      "heed: a score that counts the keys which a query sees (counts_visible, LogVisible) counts "
      "those of a part alone, so that parts do not merge (engine/partial.hpp)");
  static_assert(
      parts_merge<Op>,
      "heed: parts of keys merge where an op's weights are one softmax and its rows are "
      "not read out further (Mergeable in plug/promises.hpp); this op is of another kind");
  const Shape &q = in.query.shape(), &v = in.value.shape();
  Partial<Real> part({q.batch, q.heads, q.len, v.dim});
  heed::forward(op, in, mask, part.outputs(), saved, options);
  return part;
}

}  // namespace detail

// forward() as one part of a row's keys: those that the mask leaves of the ones given; of Inputs or PackedInputs.
template <AttentionOp Op, std::same_as<typename Op::Scalar> Real = typename Op::Scalar>
[[nodiscard]] Partial<Real> forward_partial(const Op& op, const Inputs<Real>& in,
                                            const Mask<typename Op::Scalar>& mask = {},
                                            Saved<typename Op::Scalar>* saved = nullptr,
                                            const Options& options = {}) {
  return detail::open_partial(op, in, mask, saved, options);
}
template <AttentionOp Op, std::same_as<PackedInputs<typename Op::Scalar>> In>
[[nodiscard]] Partial<typename Op::Scalar> forward_partial(
    const Op& op, const In& in, const Mask<typename Op::Scalar>& mask = {},
    Saved<typename Op::Scalar>* saved = nullptr, const Options& options = {}) {
  return detail::open_partial(op, in, mask, saved, options);
}
// For calls that do not fit (engine/mistakes.hpp).
template <class Op>
Partial<typename detail::NumbersOf<Op>::Scalar> forward_partial(
    const Op& op, const detail::Given<Op, detail::InputsArgument>& in,
    const detail::Given<Op, detail::MaskArgument>& mask = {},
    const detail::Given<Op, detail::SavedPointerArgument>& saved = nullptr,
    const Options& options = {});

}  // namespace HEED_ABI
}  // namespace heed
